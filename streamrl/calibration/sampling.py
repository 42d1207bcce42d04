"""How long decode steps take, of when groups began and were done.

The spans do not say when which step was. So the generator's own model goes through what was asked
of it, group by group, and what its steps would have to take for the groups to be done when they
were is the answer.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from streamrl.calibration.clocks import Interval, RestingClock, WorkClock
from streamrl.calibration.lines import Fit, fit_parts
from streamrl.calibration.measured import Sampled
from streamrl.messages import Array
from streamrl.placement import GeneratorTiming
from streamrl.simulator.engine import Engine

MOST_GROUPS = 1600
"""More of one replica say nothing new."""


@dataclass(frozen=True)
class Asked:
    """A replica's groups in the order they began; times on its own clock.

    counts: whether what lay beside a group is all here.
    """

    begins: Array
    ends: Array
    prompt_tokens: Sequence[int]
    lengths: Sequence[Sequence[int]]
    counts: Array

    @classmethod
    def parts(cls, sampled: Sequence[Sampled], clock: WorkClock) -> "list[Asked]":
        """Those of one process, in parts that each begin with nothing to sample."""
        episodes = list(_episodes(sampled))
        number = max(1, min(len(episodes), MOST_GROUPS * len(episodes) // len(sampled)))
        places = np.linspace(0, len(episodes) - 1, number).astype(int)
        return [cls.of(episodes[place], sampled, clock) for place in places]

    @classmethod
    def of(cls, chosen: Sequence[Sampled], sampled: Sequence[Sampled], clock: WorkClock) -> "Asked":
        """The first that are chosen of one process's."""
        left_out = chosen[MOST_GROUPS:]
        chosen = chosen[:MOST_GROUPS]
        # Where one of its groups is in pieces, all of them stood still in between.
        rests: list[Interval] = [
            (before[1], behind[0]) for one in sampled for before, behind in pairwise(one.pieces)
        ]
        own = RestingClock(rests, clock)
        return cls(
            own.at(np.array([one.start_s for one in chosen])),
            own.at(np.array([one.end_s for one in chosen])),
            [one.prompt_tokens for one in chosen],
            [one.lengths for one in chosen],
            # Who had others beside them that are left out says nothing.
            np.array([not left_out or one.end_s <= left_out[0].start_s for one in chosen]),
        )

    def replay(self, timing: GeneratorTiming) -> Array:
        """When each group would be done."""
        engine: Engine[int] = Engine(timing)
        done = np.zeros(len(self.begins))

        def advance(until: float) -> None:
            while (at := engine.next_s) <= until and not engine.is_empty:
                for group in engine.advance(at):
                    done[group.key] = at

        for key, begin in enumerate(self.begins):
            advance(begin)
            engine.add(key, self.prompt_tokens[key], self.lengths[key], float(begin))
        advance(np.inf)
        return done

    def typical(self) -> tuple[float, float, float]:
        """Of a group: decode steps, rollouts in all of them together, prompt tokens beside it."""
        steps = [max(lengths) for lengths in self.lengths]
        beside, prompts = [], []
        ends = self.ends.tolist()
        running: list[tuple[float, int]] = []
        for key, begin in enumerate(self.begins.tolist()):
            while running and running[0][0] <= begin:
                heapq.heappop(running)
            heapq.heappush(running, (ends[key], len(self.lengths[key])))
            count = sum(rollouts for _, rollouts in running)
            beside.append(count * steps[key])
            prompts.append(count * self.prompt_tokens[key])
        return float(np.median(steps)), float(np.median(beside)), float(np.median(prompts))


def fit_sampling(asked: Sequence[Asked], start: GeneratorTiming) -> Fit:
    """step_s, rollout_s and prefill_token_s; what else a step takes is as in `start`."""
    sizes = np.array([one.typical() for one in asked]).mean(axis=0)
    measured = np.concatenate([(one.ends - one.begins)[one.counts] for one in asked])

    def predict(parts: Array) -> Array:
        step_s, rollout_s, prefill_token_s = parts / sizes
        timing = replace(
            start,
            step_s=float(step_s),
            rollout_s=float(rollout_s),
            prefill_token_s=float(prefill_token_s),
        )
        return np.concatenate([(one.replay(timing) - one.begins)[one.counts] for one in asked])

    return fit_parts(predict, measured, sizes)


def _episodes(sampled: Sequence[Sampled]) -> Iterator[list[Sampled]]:
    """Groups of one process, in order, cut where it had none."""
    together: list[Sampled] = []
    until = float("-inf")
    for one in sampled:
        if together and one.start_s >= until:
            yield together
            together = []
        together.append(one)
        until = max(until, one.end_s)
    if together:
        yield together
