"""EMA reference: a reference model updated from the policy at fixed steps.

The publishing rank keeps the reference in host memory and updates it while it publishes the policy;
reference scorers follow it like any published model. The result therefore depends only on the
training steps, not on the timing of pulls. Following arXiv 2404.09656 (TR-DPO), `decay` 0 is the
hard update (a copy, TRL's sync_ref_model), `decay` above 0 the soft update:
r <- decay * r + (1 - decay) * p.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from streamrl.engines.checkpoint.sharded_state import load_tensors, save_tensors
from streamrl.engines.trainer_config import REFERENCE_FILE
from streamrl.errors import CheckpointError
from streamrl.files.atomic_write import wrap_checkpoint_errors


class EmaReference:
    """Parameters of the EMA reference, on the CPU; empty before the first `update_from_policy`."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._tensors: dict[str, Tensor] = {}

    def update_from_policy(self, policy: Iterable[tuple[str, Tensor]], *, moves: bool) -> None:
        """Consume all (name, tensor) of the policy; update the reference if `moves`.

        The first call copies the policy. Without `moves`, later calls only exhaust the iterator,
        because advancing it may be a collective. Raises CheckpointError if the policy has a
        parameter that the reference lacks.
        """
        if not self._tensors:
            # Assigned at once: an iterator that fails leaves no half reference behind.
            self._tensors = {name: self._copy_tensor(tensor) for name, tensor in policy}
            return
        for name, tensor in policy:
            if name not in self._tensors:
                raise CheckpointError(f"the reference was saved without {name}")
            elif moves:
                reference = self._tensors[name]
                reference.lerp_(tensor.detach().to("cpu", reference.dtype), 1 - self._decay)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        dtype = torch.float32 if self._decay else tensor.dtype
        return tensor.detach().to("cpu", dtype, copy=True)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def save(self, folder: Path) -> None:
        """Write the reference into an existing checkpoint folder.

        Raises as `ModelTrainer.save_training_state` does.
        """
        with wrap_checkpoint_errors(folder / REFERENCE_FILE):
            save_tensors(folder / REFERENCE_FILE, self._tensors)

    def load(self, folder: Path) -> None:
        """Read the reference from a checkpoint folder. Raises CheckpointError if none was saved."""
        if (folder / REFERENCE_FILE).is_file():
            self._tensors = load_tensors(folder / REFERENCE_FILE)
        else:
            raise CheckpointError(
                f"{folder} was written without an EMA reference: set reference.every=0"
            )
