"""Generation steps ahead: the rollouts of several steps in the same engines, as they come.

Whoever has a place gets a token in every decode step, whichever step it is of; those who came first
have their places first. So a step's rollouts are where they are in a schedule of their own
(`durations.Share`), and go on in it by one for each decode step, or by less where there are fewer
places than they would take. How long a decode step takes depends on all of them.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.placement.stage_timings import GeneratorTiming

ROUNDING = 1e-9


@dataclass(frozen=True)
class Stream:
    """A step's rollouts of one replica, by the decode steps that they have had.

    bounds [n + 1]: between which ones running [n] rollouts have a place, with resident [n] tokens,
    and prompts and groups that are done take besides_s [n] for each. results: after how many a
    part of the groups is complete. places: for rollouts at a time.
    """

    timing: GeneratorTiming
    bounds: Sequence[float]
    running: Sequence[float]
    resident: Sequence[float]
    besides_s: Sequence[float]
    results: Sequence[float]
    places: float


class Result(NamedTuple):
    """A part of a step's groups is complete, and whether all of them are."""

    at_s: float
    step: int
    number: int
    is_last: bool


@dataclass(slots=True)
class _Batch:
    """A step's rollouts: how far they are, in which stretch, and the results there were."""

    step: int
    at: float = 0.0
    stretch: int = 0
    results: int = 0
    speed: float = 0.0


class Flowing:
    """Engines that go on until they are told of something new. Times only grow."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._now = 0.0
        self._batches: list[_Batch] = []
        self._blocks: list[tuple[float, float]] = []

    def admit(self, step: int) -> None:
        """Rollouts of another step come now."""
        self._batches.append(_Batch(step))

    def block(self, start_s: float, end_s: float) -> None:
        """Others have the devices; nothing is sampled meanwhile."""
        bisect.insort(self._blocks, (start_s, end_s))

    def advance(self, limit_s: float) -> Result | None:
        """Go on to the next result that comes until then, or else until then."""
        while True:
            result = self._result()
            if result is not None:
                return result
            until = self._until(limit_s)
            if self._now >= limit_s or (not self._batches and until == math.inf):
                return None
            if self._batches:
                self._go_on(until)
            else:
                self._now = until

    def _until(self, limit_s: float) -> float:
        """Until when nobody has the devices; first waits until that is so."""
        blocks = self._blocks
        while blocks and blocks[0][0] <= self._now:
            self._now = max(self._now, min(blocks[0][1], limit_s))
            if self._now < blocks[0][1]:
                break
            del blocks[0]
        return min(limit_s, blocks[0][0]) if blocks else limit_s

    def _result(self) -> Result | None:
        results = self._stream.results
        for i, batch in enumerate(self._batches):
            if batch.at >= results[batch.results] * (1 - ROUNDING):
                batch.results += 1
                is_last = batch.results == len(results)
                if is_last:
                    del self._batches[i]
                at_s = self._now + self._stream.timing.begin_s
                return Result(at_s, batch.step, batch.results - 1, is_last)
        return None

    def _go_on(self, until_s: float) -> None:
        """To where something changes, or until then."""
        stream = self._stream
        step_s = self._decode_step_s()
        steps = (until_s - self._now) / step_s
        for batch in self._batches:
            if batch.speed:
                goal = min(stream.bounds[batch.stretch + 1], stream.results[batch.results])
                steps = min(steps, max(0.0, goal - batch.at) / batch.speed)
        if math.isfinite(until_s) and steps * step_s >= (until_s - self._now) * (1 - ROUNDING):
            self._now = until_s
        else:
            self._now += steps * step_s
        last = len(stream.running) - 1
        for batch in self._batches:
            batch.at += steps * batch.speed
            ends = stream.bounds[batch.stretch + 1] * (1 - ROUNDING)
            if batch.at >= ends and batch.stretch < last:
                batch.stretch += 1

    def _decode_step_s(self) -> float:
        """How long one takes; how much of it each batch has, which is its speed."""
        stream, free = self._stream, self._stream.places
        running = resident = besides_s = 0.0
        for batch in self._batches:
            asked = stream.running[batch.stretch]
            # The first has all it would have alone.
            is_first = batch is self._batches[0]
            batch.speed = speed = 1.0 if is_first or asked <= free else free / asked
            free = max(0.0, free - asked * speed)
            running += asked * speed
            resident += stream.resident[batch.stretch] * speed
            besides_s += stream.besides_s[batch.stretch] * speed
        return stream.timing.decode_step_s(running, resident) + besides_s
