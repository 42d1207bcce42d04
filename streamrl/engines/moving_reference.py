"""A reference that follows the policy at a distance: a copy made now and then, or an average.

The rank that publishes keeps it in main memory and moves it as the policy's parameters pass by;
reference scorers follow it as a model of its own. So it depends on the steps alone, not on when who
pulled what. `decay` 0 with an interval is TRL's synchronised reference (arXiv:2404.09656 calls it
hard update), `decay` above 0 its soft update: r <- decay r + (1 - decay) p.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from streamrl.errors import CheckpointError, ConfigError

STATE_FILE = "reference.pt"


@dataclass
class ReferenceConfig:
    """The reference: how many, and whether it follows the policy."""

    #: Steps after which the reference moves; 0 leaves it where the run started.
    every: int = 0
    #: How much of the reference stays when it moves: 0 makes it a copy of the policy.
    decay: float = 0.0
    #: Processes that compute reference logprobs, each with the whole model.
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"reference.replicas={self.replicas}: must be at least 1")
        if self.every < 0:
            raise ConfigError(f"reference.every={self.every}: must be 0 or more")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"reference.decay={self.decay}: must be from 0 to below 1")
        if self.decay and not self.every:
            raise ConfigError(
                f"reference.decay={self.decay}: the reference does not move with reference.every=0"
            )

    def moves_at(self, version: int) -> bool:
        """Whether the reference moves when the policy reaches this version."""
        return bool(self.every) and version > 0 and version % self.every == 0

    def version_for(self, version: int) -> int:
        """The policy's version at which the reference moved last, as of this one."""
        return version - version % self.every if self.every else version


class MovingReference:
    """The parameters of the reference, on the CPU: empty until the policy has first passed by."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._tensors: dict[str, Tensor] = {}

    def follow(self, policy: Iterable[tuple[str, Tensor]], *, moves: bool) -> None:
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
        """Write it into a folder that exists."""
        torch.save(self._tensors, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; raises CheckpointError if there is nothing."""
        path = folder / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{folder} was written without a reference that moves: reference.every has to be 0"
            )
        self._tensors = torch.load(path, weights_only=True)
