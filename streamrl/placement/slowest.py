"""How much longer a step's slowest replica takes than one that has its fair part and the longest.

Groups are dealt to replicas whatever they will be; the one with the most, and the longest, tokens
ends last. Steps are sampled, always the same ones; what a replica has is then summed up, so that
its time is a few products: every rollout has its tokens decoded, its keys and values read, and all
of them share the decode steps.
"""

from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.placement.timings import GeneratorTiming
from streamrl.placement.workload import Workload

SAMPLED = 32768
"""Rollouts, in whole steps."""
FEWEST, MOST = 4, 256
"""Steps that are sampled."""


@dataclass(frozen=True)
class Loads:
    """Of replicas: tokens of the longest rollout, of all, and those read while they are sampled.

    Any shape; the same for all three.
    """

    longest: Array
    tokens: Array
    read: Array

    def seconds(self, timing: GeneratorTiming, steps: Array) -> Array:
        """What so many decode steps take."""
        return timing.reading_s(steps, self.tokens, self.read)


def sampled(workload: Workload, per_group: int, replicas: int) -> Loads:
    """Of whole steps, float64 [steps, replicas]."""
    groups = workload.groups_per_step
    count = int(np.clip(SAMPLED // (groups * per_group), FEWEST, MOST))
    rng = np.random.default_rng(0)
    lengths = workload.lengths.sample(count * groups * per_group, rng).astype(np.float64)
    rounds = -(-groups // replicas)
    padded = np.zeros((count, rounds * replicas, per_group))
    padded[:, :groups] = lengths.reshape(count, groups, per_group)
    dealt = padded.reshape(count, rounds, replicas, per_group)
    read = dealt * workload.prompt_tokens + dealt**2 / 2
    return Loads(dealt.max(axis=(1, 3)), dealt.sum(axis=(1, 3)), read.sum(axis=(1, 3)))


def slower(
    timing: GeneratorTiming,
    every: Loads,
    share: Loads,
    *,
    steps: float,
    slots: float,
    rollouts: int,
) -> float:
    """By how much: the mean of the slowest of `every` replica, to one with `share`.

    That takes `steps` decode steps, with `slots` of its `rollouts` at a time.
    """
    if rollouts <= slots:
        taken = every.longest
    else:
        # What is left when no more rollouts wait grows with the longest of them.
        tail = (steps - share.tokens / slots) / share.longest
        taken = np.maximum(every.longest, every.tokens / slots + tail * every.longest)
    slowest = every.seconds(timing, taken).max(axis=1).mean()
    return float(slowest / share.seconds(timing, np.asarray(steps)).item())
