"""A reference that follows the policy at a distance: a copy made now and then, or an average.

The rank that publishes keeps it in main memory and moves it as the policy's parameters pass by;
reference scorers follow it as a model of its own. So it depends on the steps alone, not on when who
pulled what. `decay` 0 with an interval is TRL's synchronised reference (arXiv:2404.09656 calls it
hard update), `decay` above 0 its soft update: r <- decay r + (1 - decay) p.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from streamrl.engines.checkpoint.legacy_pickles import load_plain_pickle
from streamrl.engines.checkpoint.sharded_state import load_tensors, save_tensors
from streamrl.engines.reference_config import LEGACY_REFERENCE_FILE, REFERENCE_FILE
from streamrl.errors import CheckpointError
from streamrl.files.atomic_write import wrap_checkpoint_errors


class EmaReference:
    """The parameters of the reference, on the CPU: empty until the policy has first passed by."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._tensors: dict[str, Tensor] = {}

    def update_from_policy(self, policy: Iterable[tuple[str, Tensor]], *, moves: bool) -> None:
        """Go through the policy's parameters, all of them, and move; the first time become them.

        Raises CheckpointError if the policy has others than it had.
        """
        is_new = not self._tensors
        for name, tensor in policy:
            if is_new:
                dtype = torch.float32 if self._decay else tensor.dtype
                self._tensors[name] = tensor.detach().to("cpu", dtype, copy=True)
            elif name not in self._tensors:
                raise CheckpointError(f"the reference was saved without {name}")
            elif moves:
                own = self._tensors[name]
                own.lerp_(tensor.detach().to("cpu", own.dtype), 1 - self._decay)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What it is now, under the policy's names."""
        yield from self._tensors.items()

    def save(self, folder: Path) -> None:
        """Write it into a folder that exists. Raises as `ModelTrainer.save` does."""
        with wrap_checkpoint_errors(folder / REFERENCE_FILE):
            save_tensors(folder / REFERENCE_FILE, self._tensors)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; raises CheckpointError if there is nothing."""
        if (folder / REFERENCE_FILE).is_file():
            self._tensors = load_tensors(folder / REFERENCE_FILE)
        elif (folder / LEGACY_REFERENCE_FILE).is_file():
            self._tensors = load_plain_pickle(folder / LEGACY_REFERENCE_FILE)
        else:
            raise CheckpointError(
                f"{folder} was written without a reference that moves: reference.every has to be 0"
            )
