"""Generation ahead: rollouts of several steps in the same engines.

Every running rollout gets one token per decode step, whichever training step it belongs to. Earlier
steps get slots first. The rollouts of a step follow the schedule they would have alone
(`generation_model.ReplicaSchedule`): a decode step advances them by 1, or by less if fewer slots
are left than they would use. The time of a decode step depends on all running rollouts.
"""

import bisect
import math
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.planner.costs.generation_model import RolloutProfile

ROUNDING_TOLERANCE = 1e-9


class CompletionEvent(NamedTuple):
    """Event: a cut (fraction) of a step's groups is complete.

    result_index: number of the cut within the step.
    is_last: whether the cut is the last of the step.
    """

    at_s: float
    step: int
    result_index: int
    is_last: bool


@dataclass(slots=True)
class _StepProgress:
    """Position of a training step's rollouts in their profile.

    decode_steps: decode steps of the profile that are done.
    segment, num_results: current segment, and number of completed cuts.
    speed: progress in the profile per real decode step, at most 1.
    """

    step: int
    decode_steps: float = 0.0
    segment: int = 0
    num_results: int = 0
    speed: float = 0.0


class OverlappedGeneration:
    """Estimated progress of the rollouts of several training steps on the same engines.

    Estimated time only moves forward.
    """

    def __init__(self, profile: RolloutProfile) -> None:
        self._profile = profile
        self._now = 0.0
        self._steps: list[_StepProgress] = []
        self._blocked_spans: list[tuple[float, float]] = []

    def admit_step(self, step: int) -> None:
        self._steps.append(_StepProgress(step))

    def block_devices(self, start_s: float, end_s: float) -> None:
        """Record that other jobs have the devices from `start_s` to `end_s`; generation stops."""
        bisect.insort(self._blocked_spans, (start_s, end_s))

    def advance(self, limit_s: float) -> CompletionEvent | None:
        """Generate until the next cut (fraction) of a step's groups is complete.

        Return None if time reaches `limit_s` before.
        """
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
        """Advance the time, at most to `limit_s`, past spans in which other jobs have the devices.

        Returns the start of the next such span, or `limit_s` if that is earlier; without meaning if
        the time has reached `limit_s`.
        """
        spans = self._blocked_spans
        while spans and spans[0][0] <= self._now:
            self._now = max(self._now, min(spans[0][1], limit_s))
            if self._now < spans[0][1]:
                break
            del spans[0]
        return min(limit_s, spans[0][0]) if spans else limit_s

    def _pop_result(self) -> CompletionEvent | None:
        results = self._profile.result_steps
        for i, progress in enumerate(self._steps):
            if progress.decode_steps >= results[progress.num_results] * (1 - ROUNDING_TOLERANCE):
                progress.num_results += 1
                is_last = progress.num_results == len(results)
                if is_last:
                    del self._steps[i]
                at_s = self._now + self._profile.timing.begin_s
                return CompletionEvent(at_s, progress.step, progress.num_results - 1, is_last)
        return None

    def _advance_until(self, until_s: float) -> None:
        profile = self._profile
        step_s = self._decode_step_s()
        steps = (until_s - self._now) / step_s
        for progress in self._steps:
            if progress.speed:
                goal = min(
                    profile.bounds[progress.segment + 1], profile.result_steps[progress.num_results]
                )
                steps = min(steps, max(0.0, goal - progress.decode_steps) / progress.speed)
        if math.isfinite(until_s) and steps * step_s >= (until_s - self._now) * (
            1 - ROUNDING_TOLERANCE
        ):
            self._now = until_s
        else:
            self._now += steps * step_s
        last = len(profile.running_rollouts) - 1
        for progress in self._steps:
            progress.decode_steps += steps * progress.speed
            segment_end = profile.bounds[progress.segment + 1] * (1 - ROUNDING_TOLERANCE)
            if progress.decode_steps >= segment_end and progress.segment < last:
                progress.segment += 1

    def _decode_step_s(self) -> float:
        profile, free = self._profile, self._profile.slots
        running = resident = overhead_s = 0.0
        for progress in self._steps:
            wanted_slots = profile.running_rollouts[progress.segment]
            # The earliest step advances as if it were alone.
            is_first = progress is self._steps[0]
            progress.speed = speed = (
                1.0 if is_first or wanted_slots <= free else free / wanted_slots
            )
            free = max(0.0, free - wanted_slots * speed)
            running += wanted_slots * speed
            resident += profile.resident_tokens[progress.segment] * speed
            overhead_s += profile.overhead_s[progress.segment] * speed
        return profile.timing.decode_step_s(running, resident) + overhead_s
