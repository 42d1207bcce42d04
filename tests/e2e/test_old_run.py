"""A run directory written by an earlier version: readable, and resumed to its end.

`run_of_november_2026.tar.gz` holds a PPO run of six steps, killed while it wrote its last
checkpoint: the base model, the rows, and the run with its checkpoint, journals and metrics.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.buffer import journal as journal_module
from streamrl.buffer.journal import CorruptRecord
from streamrl.config.run_config import load_config
from streamrl.engines.checkpoint.sharded_state import VALUE_KIND, open_state, read_progress
from streamrl.resharding.layouts import create_whole_shard
from streamrl.run_dir.checkpoint import find_resume_point, get_journal_dir
from tests.e2e.launched import Launched, audit, rows

ARCHIVE = Path(__file__).with_name("run_of_november_2026.tar.gz")


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """The run directory, unpacked, with its paths corrected."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    run_dir = tmp_path / "runs" / "old"
    run_dir.parent.mkdir()
    (tmp_path / "run").rename(run_dir)
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("FOLDER", str(tmp_path)))
    return run_dir


def test_journals_and_checkpoint_of_an_earlier_version_are_read(old_run: Path):
    assert load_config(old_run / "config.yaml", skips_dry_run=True).run.steps == 6
    resume = find_resume_point(old_run)
    assert resume.checkpoint is not None and resume.checkpoint.path.name == "step_000004"

    for folder in (resume.checkpoint.path, resume.checkpoint.path / "critic"):
        assert read_progress(folder / "trainer").num_updates == 16, "four of each step"
        stored = load_file(folder / "model" / "model.safetensors")
        with open_state(folder / "trainer") as state:
            for name, tensor in stored.items():
                saved = torch.empty(tensor.shape)
                state.fill_shard(VALUE_KIND, create_whole_shard(name, tuple(tensor.shape)), saved)
                assert torch.equal(saved, tensor)

    assert (audit(old_run).num_steps, len(rows(old_run))) == (6, 5)

    for name in ("shard-0", "shard-1"):
        folder = get_journal_dir(old_run, name)
        numbers = journal_module.list_segments(folder)
        paths = [journal_module.get_segment_path(folder, number) for number in numbers]
        entries = [entry for path in paths for entry in journal_module.read_segment(path)]
        assert not any(isinstance(entry, CorruptRecord) for entry in entries)
        kinds = {entry[1].meta["kind"] for entry in entries if isinstance(entry, tuple)}
        assert {"lease", "put", "leave"} <= kinds


@pytest.mark.slow
def test_resume_of_an_earlier_version_trains_to_the_end(old_run: Path):
    earlier = rows(old_run)
    run = Launched(["train", "--resume", str(old_run)], old_run.parent)
    assert run.wait() == 0, run.output
    assert [row["step"] for row in rows(old_run)] == [1, 2, 3, 4, 5, 6]
    assert rows(old_run)[:4] == earlier[:4]
    assert audit(old_run).num_steps == 6
    assert "admitted 24 = trained 24 + filtered 0 + dropped 0 + in flight 0" in run.output
