"""Nodes that die, and what that costs."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh

MAX_EXPECTED_FAILURES = 5.0
"""Most deaths, on average, in what is lost whole if one comes: a choice, so that simulations end.

With x of them one attempt in e^x gets through: with 5 one in 150, and with 10 one in 22,000.
"""


@dataclass(frozen=True)
class FailureModel:
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
        for key in ("restart_s", "mttf_s", "checkpoint_every", "node_devices"):
            value = vars(self)[key]
            if not 0 < value < math.inf:
                raise ConfigError(f"failures.{key}={value:g}: must be above 0 and finite")
        if self.mttf_s <= self.restart_s:
            raise ConfigError(
                f"failures.mttf_s={self.mttf_s:g}: must be above restart_s={self.restart_s:g}, or a"
                " node dies again before it is back"
            )

    def check_progress(
        self, trained: Iterable[Mesh], *, first_s: float, step_s: float, steps: int
    ) -> None:
        """Raise ConfigError if nodes that train die too often for the run to get anywhere.

        A death leaves what is sampled, but for rollouts under way, and of what is trained the last
        checkpoint. trained: the devices of all trainers. first_s: of a step, until the first
        rollouts are there. step_s: to train it. steps: of the run.
        """
        size = self.node_devices
        nodes = len({device // size for mesh in trained for device in mesh.devices})
        unsaved = min(self.checkpoint_every, steps)
        most_s = MAX_EXPECTED_FAILURES * self.mttf_s / nodes
        most = f"must be at most {MAX_EXPECTED_FAILURES:g} times as long"
        place = f"failures.mttf_s={self.mttf_s:g}: of {nodes} nodes that train one dies every"
        place += f" {self.mttf_s / nodes:.6g} s"
        if first_s > most_s:
            raise ConfigError(f"{place}: the first rollouts take {first_s:.6g} s: {most}")
        if unsaved * step_s > most_s:
            raise ConfigError(
                f"{place}: {unsaved} steps without a checkpoint are trained for"
                f" {unsaved * step_s:.6g} s: {most}; checkpoint.every says how many there are"
            )


@dataclass(frozen=True)
class NodeCrash:
    """What the death of a node took along.

    lost_tokens: sampled, of groups that were not done. steps_again: made before, and to be made
    once more. is_restart: the whole run started again.
    """

    time_s: float
    processes: tuple[str, ...]
    lost_tokens: int
    repeated_steps: int = 0
    is_restart: bool = False


def sample_failure_times(node: int, failures: FailureModel, seed: int) -> Iterator[float]:
    """Seconds from each of a node's deaths, or the beginning, to the next, without end."""
    rng = random.Random(f"{seed}/{node}")
    while True:
        yield rng.expovariate(1 / failures.mttf_s)
