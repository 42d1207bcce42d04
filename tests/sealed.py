"""Checkpoints whose state.json is written anew, so that its hashes hold after a test's changes."""

import json
from pathlib import Path
from typing import Any

from streamrl.files.file_proofs import list_files, prove_files
from streamrl.run_dir.checkpoint import write_state


def seal(checkpoint: Path, **changes: Any) -> None:
    """Write state.json with some fields changed, and with proofs of the files that are there."""
    fields = json.loads((checkpoint / "state.json").read_text()) | changes
    (checkpoint / "state.json").unlink()
    proofs = prove_files(list_files(checkpoint))
    fields["files"] = {str(path.relative_to(checkpoint)): proofs[path] for path in proofs}
    write_state(checkpoint, {name: fields[name] for name in fields if name not in OWN_FIELDS})


OWN_FIELDS = ("format", "hash")
"""Fields that `write_state` adds."""
