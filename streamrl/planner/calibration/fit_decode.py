"""Fit the times of a generator's decode steps to the times at which groups began and finished.

Spans show when a group was sampled, but not its single decode steps. So the fit replays the groups
through the simulator's engine model and searches the coefficients for which each group finishes
when it did. A turn of an episode is a group of one rollout.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from streamrl.messages import Array
from streamrl.planner.calibration.robust_fit import CoefficientEstimate, fit_parts
from streamrl.planner.calibration.sampled_groups import GeneratedGroup, split_gaps
from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.planner.simulator.simulated_engine import SimulatedEngine

WINDOW_GROUPS = 800
"""Number of consecutive groups of a replica that are replayed together."""
MAX_GROUPS = 3200
"""Maximum number of groups per replica to replay, spread over the run.

More groups do not improve the fit.
"""
MIN_COHORT_GROUPS = 16
"""Minimum number of groups in a cohort, for which a common pace is estimated."""
DECODE_COEFFICIENTS = ("step_s", "rollout_s", "prefill_token_s", "group_s")


@dataclass(frozen=True)
class GroupWindow:
    """Consecutive recorded groups of a generator replica, for one term of the decode fit.

    Groups that were still running when the window starts come first, as load. Only a group whose
    concurrent groups are all in the window counts in the fit.
    """

    groups: Sequence[GeneratedGroup]
    start_s: float
    end_s: float

    def contains_group(self, group: GeneratedGroup) -> bool:
        return self.start_s <= group.start_s and group.end_s <= self.end_s

    @classmethod
    def split_episode(cls, episode: Sequence[GeneratedGroup]) -> "Iterator[GroupWindow]":
        """Yield windows of similar size over an episode of groups.

        Windows in which no group counts in the fit are left out.
        """
        edges = np.linspace(
            0, len(episode), max(1, round(len(episode) / WINDOW_GROUPS)) + 1
        ).astype(int)
        for first, last in pairwise(edges.tolist()):
            start_s = episode[first].start_s
            end_s = episode[last].start_s if last < len(episode) else np.inf
            running = [group for group in episode[:first] if group.end_s > start_s]
            window = cls([*running, *episode[first:last]], start_s, end_s)
            if any(window.contains_group(group) for group in window.groups):
                yield window


class PausableClock:
    """A clock that stops during pauses, given as (start, end) in seconds."""

    def __init__(self, pauses: Iterable[tuple[float, float]]) -> None:
        edges: list[float] = []
        for start, end in sorted(pauses):
            if edges and start <= edges[-1]:
                edges[-1] = max(edges[-1], end)
            else:
                edges += (start, end)
        lengths = np.diff(edges)
        lengths[1::2] = 0.0
        self._edges, self._paused_s = np.array(edges), np.concatenate([[0.0], np.cumsum(lengths)])

    def read_at(self, times: Array) -> Array:
        if not len(self._edges):
            return times
        return np.asarray(times - np.interp(times, self._edges, self._paused_s))


@dataclass(frozen=True)
class DecodeReplay:
    """Measured times of a window of groups, ordered by begin, without the replica's pauses.

    complete_mask: whether all concurrent groups of a group are in the window, so that it counts.
    load_times: when the replica loaded versions.
    cohort_ids: groups with equal numbers were admitted together and share a pace.
    cached_tokens: prompt tokens of each group in the prefix cache.
    """

    begin_times: Array
    end_times: Array
    prompt_tokens: Sequence[int]
    lengths: Sequence[Sequence[int]]
    complete_mask: Array
    load_times: Array
    cohort_ids: Array
    cached_tokens: Sequence[int]

    @classmethod
    def from_process(
        cls, groups: Sequence[GeneratedGroup], loads: Sequence[float]
    ) -> "list[DecodeReplay]":
        """Return the measured times of a generator process, an object per GroupWindow.

        Of a long run only some windows are used, spread over the run.

        groups: groups of the process, ordered by begin.
        loads: times at which the process loaded versions.
        """
        windows = [
            window
            for episode in split_gaps(groups)
            for window in GroupWindow.split_episode(episode)
        ]
        number = max(1, min(len(windows), MAX_GROUPS * len(windows) // len(groups)))
        positions = np.linspace(0, len(windows) - 1, number).astype(int)
        # A gap in the span of a group means that the whole replica was paused.
        clock = PausableClock(
            (before[1], after[0]) for group in groups for before, after in pairwise(group.intervals)
        )
        return [cls.from_window(windows[position], loads, clock) for position in positions]

    @classmethod
    def from_window(
        cls, window: "GroupWindow", loads: Sequence[float], clock: PausableClock
    ) -> "DecodeReplay":
        groups = window.groups
        end_s = max(group.end_s for group in groups)
        window_loads = [load for load in loads if groups[0].start_s < load < end_s]
        return cls(
            clock.read_at(np.array([group.start_s for group in groups])),
            clock.read_at(np.array([group.end_s for group in groups])),
            [group.prompt_tokens for group in groups],
            [group.lengths for group in groups],
            np.array([window.contains_group(group) for group in groups]),
            clock.read_at(np.array(window_loads)),
            _number_cohorts([group.admitted_version for group in groups]),
            [group.cached_tokens for group in groups],
        )

    def replay_groups(self, timing: GeneratorTiming, *, pause_s: float) -> Array:
        """Return the time at which each group finishes in the engine model with these timings.

        pause_s: time to load a version.
        """
        engine: SimulatedEngine[int] = SimulatedEngine(timing)
        end_times = np.zeros(len(self.begin_times))

        def advance(until: float) -> None:
            """Simulate the engine until this time, and note when groups finish."""
            while engine.has_event_by(until) and not engine.is_empty:
                event_s = engine.next_event_s
                for group in engine.advance_to(event_s):
                    end_times[group.key] = event_s

        loads = deque(self.load_times.tolist())
        for key, begin in enumerate(self.begin_times.tolist()):
            while loads and loads[0] <= begin:
                advance(loads[0])
                engine.load_version(0, pause_s, loads.popleft())
            advance(begin)
            cached = (self.cached_tokens[key], engine.version)
            prompt_tokens, lengths = self.prompt_tokens[key], self.lengths[key]
            engine.add_group(key, prompt_tokens, lengths, begin, cached=cached)
        for load in loads:
            advance(load)
            engine.load_version(0, pause_s, load)
        advance(np.inf)
        return end_times

    def compute_typical_work(self) -> Array:
        """Return the median work of the engine while a group is sampled, float64 [4].

        The entries are decode steps, decode steps times running rollouts, prefilled tokens, groups.
        The last three include concurrent groups.
        """
        steps = np.array([max(lengths) for lengths in self.lengths])
        prefilled = np.array(self.prompt_tokens) - np.array(self.cached_tokens)
        # Of the groups so far, ordered by begin, those that have ended do not run any more.
        by_end = np.argsort(self.end_times)
        num_ended = np.searchsorted(self.end_times[by_end], self.begin_times, side="right")
        groups = np.arange(1, len(steps) + 1) - num_ended
        sizes = np.array([len(lengths) for lengths in self.lengths])
        rollouts = np.cumsum(sizes) - np.append(0, np.cumsum(sizes[by_end]))[num_ended]
        work = [steps, rollouts * steps, rollouts * prefilled, groups]
        medians: Array = np.median(work, axis=1)
        return medians


def fit_decode(
    replays: Sequence[DecodeReplay], start: GeneratorTiming, *, pause_s: float
) -> list[CoefficientEstimate]:
    """Fit the generator coefficients DECODE_COEFFICIENTS, in this order, to replays of a run.

    start: timing that supplies all other terms of a decode step.
    pause_s: time in which a generator pauses to load a version.

    prefill_token_s has a lower bound: the compute time of a prompt token in `start`. Without the
        bound, where groups come and go all the time, a fit can shift the prefill time into the
        other coefficients.

    A machine has slow moments that slow down all groups. So predictions are scaled to the pace of
    each cohort first, and only the differences within a cohort distinguish the coefficients. If
    `start` recomputes running rollouts at each load, recomputing costs `prefill_token_s` per token.
    """
    sizes = np.array([replay.compute_typical_work() for replay in replays]).mean(axis=0)
    measured = np.concatenate(
        [(replay.end_times - replay.begin_times)[replay.complete_mask] for replay in replays]
    )
    cohorts = _renumber_cohorts([replay.cohort_ids[replay.complete_mask] for replay in replays])
    lower_bounds = np.zeros(len(DECODE_COEFFICIENTS))
    lower_bounds[DECODE_COEFFICIENTS.index("prefill_token_s")] = min(
        start.compute_rollout_s, start.prefill_token_s
    )

    def predict(parts: Array) -> Array:
        """Return the predicted time of each group that counts, scaled to its cohort's pace."""
        timing = replace_coefficients(start, (lower_bounds + parts / sizes).tolist())
        ends = [replay.replay_groups(timing, pause_s=pause_s) for replay in replays]
        durations = [
            (end - replay.begin_times)[replay.complete_mask]
            for end, replay in zip(ends, replays, strict=True)
        ]
        return _scale_to_cohort_pace(np.concatenate(durations), measured, cohorts)

    fit = fit_parts(predict, measured, sizes)
    return [
        replace(estimate, value=bound + estimate.value)
        for bound, estimate in zip(lower_bounds.tolist(), fit, strict=True)
    ]


def replace_coefficients(start: GeneratorTiming, values: Sequence[float]) -> GeneratorTiming:
    changed = dict(zip(DECODE_COEFFICIENTS, values, strict=True))
    if start.recompute_token_s:
        changed["recompute_token_s"] = changed["prefill_token_s"]
    return replace(start, **changed)  # type: ignore[arg-type]


def _number_cohorts(versions: Sequence[int]) -> Array:
    """Return the cohort number of each group, by the version at which it was admitted.

    A new version begins a new cohort, if the last cohort has MIN_COHORT_GROUPS groups.
    """
    cohorts, cohort, count = [0] * len(versions), 0, 0
    for i, version in enumerate(versions):
        if i and version != versions[i - 1] and count >= MIN_COHORT_GROUPS:
            cohort, count = cohort + 1, 0
        cohorts[i], count = cohort, count + 1
    return np.array(cohorts, np.int64)


def _renumber_cohorts(parts: Sequence[Array]) -> Array:
    """Concatenate the cohort numbers of several replays, so that none repeats."""
    firsts = np.cumsum([0, *(int(part.max(initial=-1)) + 1 for part in parts)])
    numbers: Array = np.concatenate(
        [part + first for part, first in zip(parts, firsts, strict=False)]
    )
    return numbers


def _scale_to_cohort_pace(predicted: Array, measured: Array, cohorts: Array) -> Array:
    """Scale predicted times by each cohort's pace, the median of measured over predicted time.

    Paces are relative to the median pace, so that predictions keep their overall level.
    """
    ratios = measured / np.maximum(predicted, 1e-12)
    paces = np.ones(int(cohorts.max(initial=0)) + 1)
    for cohort in np.unique(cohorts):
        paces[cohort] = np.median(ratios[cohorts == cohort])
    scaled: Array = predicted * (paces / np.median(paces[np.unique(cohorts)]))[cohorts]
    return scaled
