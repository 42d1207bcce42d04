"""How long decode steps take, of when groups began and were done.

The spans do not say when which step was. So the generator's own model goes through what was asked
of it, group by group, and what its steps would have to take for the groups to be done when they
were is the answer.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from streamrl.calibration.cpu_clocks import Interval, PausableClock, WorkClock
from streamrl.calibration.robust_fit import RobustFit, fit_parts
from streamrl.calibration.run_trace import GeneratedGroup
from streamrl.messages import Array
from streamrl.placement import GeneratorTiming
from streamrl.simulator.replicas.engine import SimulatedEngine

WINDOW_GROUPS = 800
"""Groups of a replica that follow one another and are gone through together."""
MAX_GROUPS = 3200
"""More of one replica say nothing new; windows of them are from all over the run."""
MIN_COHORT_GROUPS = 16
"""Groups whose common pace is told from that of others."""
DECODE_COEFFICIENTS = ("step_s", "rollout_s", "prefill_token_s", "group_s")
START_FRACTIONS = (
    (0.25, 0.25, 0.25, 0.25),
    (0.55, 0.15, 0.15, 0.15),
    (0.15, 0.55, 0.15, 0.15),
    (0.15, 0.15, 0.55, 0.15),
    (0.15, 0.15, 0.15, 0.55),
)
"""Parts of a group's time that a fit may begin from, by coefficient."""


@dataclass(frozen=True)
class GroupWindow:
    """Groups that follow one another, behind those that were still there as the first began.

    Who had others beside it that are not here says nothing.
    """

    groups: Sequence[GeneratedGroup]
    start_s: float
    end_s: float

    def contains_group(self, one: GeneratedGroup) -> bool:
        """Whether all that was beside a group is here."""
        return self.start_s <= one.start_s and one.end_s <= self.end_s

    @classmethod
    def split_episode(cls, episode: Sequence[GeneratedGroup]) -> "Iterator[GroupWindow]":
        """An episode in windows of like numbers of groups; none that holds nothing."""
        edges = np.linspace(
            0, len(episode), max(1, round(len(episode) / WINDOW_GROUPS)) + 1
        ).astype(int)
        for first, last in pairwise(edges.tolist()):
            since_s = episode[first].start_s
            until_s = episode[last].start_s if last < len(episode) else np.inf
            still = [one for one in episode[:first] if one.end_s > since_s]
            window = cls([*still, *episode[first:last]], since_s, until_s)
            if any(window.contains_group(one) for one in window.groups):
                yield window


@dataclass(frozen=True)
class DecodeReplay:
    """A replica's groups in the order they began; times on its own clock.

    counts: whether what lay beside a group is all here. loads: when versions were taken up. turns:
    which groups went at one pace, as they were admitted together.
    """

    begin_times: Array
    end_times: Array
    prompt_tokens: Sequence[int]
    lengths: Sequence[Sequence[int]]
    complete_mask: Array
    load_times: Array
    cohort_ids: Array

    @classmethod
    def from_process(
        cls, sampled: Sequence[GeneratedGroup], loads: Sequence[float], clock: WorkClock
    ) -> "list[DecodeReplay]":
        """Those of one process: windows of what it had without a rest."""
        windows = [
            one
            for episode in _split_episodes(sampled)
            for one in GroupWindow.split_episode(episode)
        ]
        number = max(1, min(len(windows), MAX_GROUPS * len(windows) // len(sampled)))
        places = np.linspace(0, len(windows) - 1, number).astype(int)
        # Where one of its groups is in pieces, all of them stood still in between.
        rests: list[Interval] = [
            (before[1], behind[0]) for one in sampled for before, behind in pairwise(one.intervals)
        ]
        own = PausableClock(rests, clock)
        return [cls.from_window(windows[place], loads, own) for place in places]

    @classmethod
    def from_window(
        cls, window: "GroupWindow", loads: Sequence[float], clock: PausableClock
    ) -> "DecodeReplay":
        """Those of a window, on this clock."""
        chosen = window.groups
        until = max(one.end_s for one in chosen)
        own = [load for load in loads if chosen[0].start_s < load < until]
        return cls(
            clock.read_at(np.array([one.start_s for one in chosen])),
            clock.read_at(np.array([one.end_s for one in chosen])),
            [one.prompt_tokens for one in chosen],
            [one.lengths for one in chosen],
            np.array([window.contains_group(one) for one in chosen]),
            clock.read_at(np.array(own)),
            _number_cohorts([one.admitted_version for one in chosen]),
        )

    def replay_groups(self, timing: GeneratorTiming, *, pause_s: float) -> Array:
        """When each group would be done, if it took so long to take up a version."""
        engine: SimulatedEngine[int] = SimulatedEngine(timing)
        done = np.zeros(len(self.begin_times))

        def advance(until: float) -> None:
            while engine.has_event_by(until) and not engine.is_empty:
                at = engine.next_event_s
                for group in engine.advance_to(at):
                    done[group.key] = at

        loads = deque(self.load_times.tolist())
        for key, begin in enumerate(self.begin_times.tolist()):
            while loads and loads[0] <= begin:
                advance(loads[0])
                engine.load_version(0, pause_s, loads.popleft())
            advance(begin)
            engine.add_group(key, self.prompt_tokens[key], self.lengths[key], begin)
        for load in loads:
            advance(load)
            engine.load_version(0, pause_s, load)
        advance(np.inf)
        return done

    def compute_typical_work(self) -> Array:
        """Of a group: decode steps, rollouts in all of them together, prompt tokens and groups
        beside it; [4].
        """
        steps = [max(lengths) for lengths in self.lengths]
        beside, prompts, groups = [], [], []
        ends = self.end_times.tolist()
        running: list[tuple[float, int]] = []
        for key, begin in enumerate(self.begin_times.tolist()):
            while running and running[0][0] <= begin:
                heapq.heappop(running)
            heapq.heappush(running, (ends[key], len(self.lengths[key])))
            count = sum(rollouts for _, rollouts in running)
            groups.append(len(running))
            beside.append(count * steps[key])
            prompts.append(count * self.prompt_tokens[key])
        found: Array = np.median([steps, beside, prompts, groups], axis=1)
        return found


def fit_decode(
    asked: Sequence[DecodeReplay], start: GeneratorTiming, *, pause_s: float
) -> RobustFit:
    """COEFFICIENTS, in this order; what else a step takes is as in `start`.

    A prompt's token takes at least as long as it is computed by `start`: what else a fit could make
    of groups that come and go all the time is that it takes nothing, and all else more.

    A machine has slow moments, and in them all groups are slow: what tells the coefficients apart
    is how groups of one turn differ. If `start` computes running rollouts anew for each version,
    that is as prompts are computed.
    """
    sizes = np.array([one.compute_typical_work() for one in asked]).mean(axis=0)
    measured = np.concatenate(
        [(one.end_times - one.begin_times)[one.complete_mask] for one in asked]
    )
    turns = _renumber_cohorts([one.cohort_ids[one.complete_mask] for one in asked])
    least = np.zeros(len(DECODE_COEFFICIENTS))
    least[DECODE_COEFFICIENTS.index("prefill_token_s")] = min(
        start.compute_rollout_s, start.prefill_token_s
    )

    def predict(parts: Array) -> Array:
        timing = replace_coefficients(start, (least + parts / sizes).tolist())
        ends = [one.replay_groups(timing, pause_s=pause_s) for one in asked]
        lasts = [
            (end - one.begin_times)[one.complete_mask] for end, one in zip(ends, asked, strict=True)
        ]
        return _scale_to_cohort_pace(np.concatenate(lasts), measured, turns)

    found = fit_parts(predict, measured, sizes, starts=START_FRACTIONS)
    return replace(found, coefficients=tuple((least + found.coefficients).tolist()))


def replace_coefficients(start: GeneratorTiming, values: Sequence[float]) -> GeneratorTiming:
    """The same with these COEFFICIENTS."""
    step_s, rollout_s, prefill_token_s, group_s = values
    return replace(
        start,
        step_s=step_s,
        rollout_s=rollout_s,
        prefill_token_s=prefill_token_s,
        group_s=group_s,
        recompute_token_s=prefill_token_s if start.recompute_token_s else 0.0,
    )


def _number_cohorts(versions: Sequence[int]) -> Array:
    """A number for each group: that of the turn it is of, by the version it was admitted at."""
    found, last, count = [0] * len(versions), 0, 0
    for i, version in enumerate(versions):
        if i and version != versions[i - 1] and count >= MIN_COHORT_GROUPS:
            last, count = last + 1, 0
        found[i], count = last, count + 1
    return np.array(found, np.int64)


def _renumber_cohorts(parts: Sequence[Array]) -> Array:
    """Numbers of several parts, each with numbers of its own, as numbers that none share."""
    firsts = np.cumsum([0, *(int(part.max(initial=-1)) + 1 for part in parts)])
    found: Array = np.concatenate(
        [part + first for part, first in zip(parts, firsts, strict=False)]
    )
    return found


def _scale_to_cohort_pace(predicted: Array, measured: Array, turns: Array) -> Array:
    """Each turn as fast or slow as it was, and all of them together as predicted."""
    ratios = measured / np.maximum(predicted, 1e-12)
    paces = np.ones(int(turns.max(initial=0)) + 1)
    for turn in np.unique(turns):
        paces[turn] = np.median(ratios[turns == turn])
    found: Array = predicted * (paces / np.median(paces[np.unique(turns)]))[turns]
    return found


def _split_episodes(sampled: Sequence[GeneratedGroup]) -> Iterator[list[GeneratedGroup]]:
    """Groups of one process, in order, cut where it had none."""
    together: list[GeneratedGroup] = []
    until = float("-inf")
    for one in sampled:
        if together and one.start_s >= until:
            yield together
            together = []
        together.append(one)
        until = max(until, one.end_s)
    if together:
        yield together
