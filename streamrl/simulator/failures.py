"""Nodes that die, and what that costs."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from streamrl.errors import ConfigError


@dataclass(frozen=True)
class Failures:
    """How often nodes die, and what follows.

    mttf_s: mean time to failure of a node; times are exponentially distributed. restart_s: until
    what was on it is there again, model and all. checkpoint_every: steps between checkpoints, from
    the last of which the whole run starts again if a trainer dies. node_devices: devices of a node.
    """

    mttf_s: float
    restart_s: float
    checkpoint_every: int = 1
    node_devices: int = 8

    def __post_init__(self) -> None:
        for key in ("mttf_s", "restart_s", "checkpoint_every", "node_devices"):
            if vars(self)[key] <= 0:
                raise ConfigError(f"failures.{key}={vars(self)[key]}: must be above 0")


@dataclass(frozen=True)
class Crash:
    """What the death of a node took along.

    lost_tokens: sampled, of groups that were not done. steps_again: made before, and to be made
    once more. is_restart: the whole run started again.
    """

    at_s: float
    processes: tuple[str, ...]
    lost_tokens: int
    steps_again: int = 0
    is_restart: bool = False


def times_of(node: int, failures: Failures, seed: int) -> Iterator[float]:
    """Seconds from each of a node's deaths, or the beginning, to the next, without end."""
    rng = random.Random(f"{seed}/{node}")
    while True:
        yield rng.expovariate(1 / failures.mttf_s)
