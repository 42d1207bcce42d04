"""Generation steps ahead: the rollouts of several steps in the same engines, as they come.

Whoever has a place gets a token in every decode step, whichever step it is of; those who came first
have their places first. So a step's rollouts are where they are in a schedule of their own
(`durations.ReplicaSchedule`), and go on in it by one for each decode step, or by less where there
are fewer places than they would take. How long a decode step takes depends on all of them.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.placement.stage_timings import GeneratorTiming

ROUNDING_TOLERANCE = 1e-9


@dataclass(frozen=True)
class RolloutProfile:
    """A step's rollouts of one replica, by the decode steps that they have had.

    bounds [n + 1]: between which ones running [n] rollouts have a place, with resident [n] tokens,
    and prompts and groups that are done take besides_s [n] for each. results: after how many a
    part of the groups is complete. places: for rollouts at a time.
    """

    timing: GeneratorTiming
    bounds: Sequence[float]
    running_rollouts: Sequence[float]
    resident_tokens: Sequence[float]
    overhead_s: Sequence[float]
    result_steps: Sequence[float]
    slots: float


class CompletionEvent(NamedTuple):
    """A part of a step's groups is complete, and whether all of them are."""

    at_s: float
    step: int
    result_index: int
    is_last: bool


@dataclass(slots=True)
class _StepProgress:
    """A step's rollouts: how far they are, in which stretch, and the results there were."""

    step: int
    decode_steps: float = 0.0
    segment: int = 0
    num_results: int = 0
    speed: float = 0.0


class OverlappedGeneration:
    """Engines that go on until they are told of something new. Times only grow."""

    def __init__(self, stream: RolloutProfile) -> None:
        self._profile = stream
        self._now = 0.0
        self._steps: list[_StepProgress] = []
        self._blocked_spans: list[tuple[float, float]] = []

    def admit_step(self, step: int) -> None:
        """Rollouts of another step come now."""
        self._steps.append(_StepProgress(step))

    def block_devices(self, start_s: float, end_s: float) -> None:
        """Others have the devices; nothing is sampled meanwhile."""
        bisect.insort(self._blocked_spans, (start_s, end_s))

    def advance(self, limit_s: float) -> CompletionEvent | None:
        """Go on to the next result that comes until then, or else until then."""
        while True:
            result = self._pop_result()
            if result is not None:
                return result
            until = self._skip_blocked_spans(limit_s)
            if self._now >= limit_s or (not self._steps and until == math.inf):
                return None
            if self._steps:
                self._advance_until(until)
            else:
                self._now = until

    def _skip_blocked_spans(self, limit_s: float) -> float:
        """Until when nobody has the devices; first waits until that is so."""
        blocks = self._blocked_spans
        while blocks and blocks[0][0] <= self._now:
            self._now = max(self._now, min(blocks[0][1], limit_s))
            if self._now < blocks[0][1]:
                break
            del blocks[0]
        return min(limit_s, blocks[0][0]) if blocks else limit_s

    def _pop_result(self) -> CompletionEvent | None:
        results = self._profile.result_steps
        for i, batch in enumerate(self._steps):
            if batch.decode_steps >= results[batch.num_results] * (1 - ROUNDING_TOLERANCE):
                batch.num_results += 1
                is_last = batch.num_results == len(results)
                if is_last:
                    del self._steps[i]
                at_s = self._now + self._profile.timing.begin_s
                return CompletionEvent(at_s, batch.step, batch.num_results - 1, is_last)
        return None

    def _advance_until(self, until_s: float) -> None:
        """To where something changes, or until then."""
        stream = self._profile
        step_s = self._decode_step_s()
        steps = (until_s - self._now) / step_s
        for batch in self._steps:
            if batch.speed:
                goal = min(stream.bounds[batch.segment + 1], stream.result_steps[batch.num_results])
                steps = min(steps, max(0.0, goal - batch.decode_steps) / batch.speed)
        if math.isfinite(until_s) and steps * step_s >= (until_s - self._now) * (
            1 - ROUNDING_TOLERANCE
        ):
            self._now = until_s
        else:
            self._now += steps * step_s
        last = len(stream.running_rollouts) - 1
        for batch in self._steps:
            batch.decode_steps += steps * batch.speed
            ends = stream.bounds[batch.segment + 1] * (1 - ROUNDING_TOLERANCE)
            if batch.decode_steps >= ends and batch.segment < last:
                batch.segment += 1

    def _decode_step_s(self) -> float:
        """How long one takes; how much of it each batch has, which is its speed."""
        stream, free = self._profile, self._profile.slots
        running = resident = besides_s = 0.0
        for batch in self._steps:
            asked = stream.running_rollouts[batch.segment]
            # The first has all it would have alone.
            is_first = batch is self._steps[0]
            batch.speed = speed = 1.0 if is_first or asked <= free else free / asked
            free = max(0.0, free - asked * speed)
            running += asked * speed
            resident += stream.resident_tokens[batch.segment] * speed
            besides_s += stream.overhead_s[batch.segment] * speed
        return stream.timing.decode_step_s(running, resident) + besides_s
