"""Failures of nodes in a simulated run: rate, restart time, and lost work."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh

MAX_EXPECTED_FAILURES = 5.0
"""Largest expected number of failures during work that one failure undoes entirely.

A design limit that lets simulations end: with x expected failures one attempt in e^x succeeds; x =
5: 1 in 150; x = 10: 1 in 22,000.
"""


@dataclass(frozen=True)
class FailureModel:
    """Failure rate of nodes, and the time and work that a failure costs.

    mttf_s: mean time to failure of a node; times are exponentially distributed.
    restart_s: time until the processes of a failed node run again with their models.
    checkpoint_every: steps between checkpoints; a trainer failure restarts the run from the last.
    node_devices: devices per node.
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
                f"failures.mttf_s={self.mttf_s:g}: must be above restart_s={self.restart_s:g}; a"
                " node would fail again before its restart ends"
            )

    def check_progress(
        self, trained_meshes: Iterable[Mesh], *, first_s: float, step_s: float, steps: int
    ) -> None:
        """Raise ConfigError if training nodes fail too often for the run to progress.

        A trainer failure loses unfinished rollouts and all training since the last checkpoint.

        trained_meshes: devices of all trainers.
        first_s: time of a step until its first rollouts are done.
        step_s: training time of a step.
        steps: number of steps of the run.
        """
        size = self.node_devices
        nodes = len({device // size for mesh in trained_meshes for device in mesh.devices})
        unsaved = min(self.checkpoint_every, steps)
        max_s = MAX_EXPECTED_FAILURES * self.mttf_s / nodes
        rule = f"must be at most {MAX_EXPECTED_FAILURES:g} times as long"
        subject = f"failures.mttf_s={self.mttf_s:g}: one of {nodes} training nodes fails every"
        subject += f" {self.mttf_s / nodes:.6g} s"
        if first_s > max_s:
            raise ConfigError(f"{subject}: the first rollouts take {first_s:.6g} s: {rule}")
        if unsaved * step_s > max_s:
            raise ConfigError(
                f"{subject}: {unsaved} steps without a checkpoint take"
                f" {unsaved * step_s:.6g} s: {rule}; lower checkpoint.every"
            )


@dataclass(frozen=True)
class NodeCrash:
    """A node failure, and the work that the run lost.

    processes: names of the processes that crashed.
    lost_tokens: sampled tokens of unfinished groups.
    repeated_steps: trained steps that the run repeats.
    is_restart: whether the whole run restarted.
    """

    processes: tuple[str, ...]
    lost_tokens: int
    repeated_steps: int = 0
    is_restart: bool = False


def sample_failure_times(node: int, failures: FailureModel, seed: int) -> Iterator[float]:
    """Yield the seconds between a node's failures, the first from the start; never ends."""
    rng = random.Random(f"{seed}/{node}")
    while True:
        yield rng.expovariate(1 / failures.mttf_s)
