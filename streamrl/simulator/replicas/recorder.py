"""What every process did and when, kept short while the clock runs."""

import asyncio
import heapq
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from streamrl.telemetry.spans import ArgValue, Span

Facts = Mapping[str, ArgValue]
NO_FACTS: Facts = {}


class Recorder:
    """The work of one process, as spans are: what overlaps lies in different lanes."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.works: list[tuple[str, int, float, float, Facts]] = []
        self._clock = asyncio.get_running_loop()
        self._free: list[int] = []
        self._open: dict[int, tuple[str, float, Facts]] = {}
        self._resting: Collection[str] = ()

    def begin(self, name: str, facts: Facts = NO_FACTS) -> int:
        """A piece of work of this name begins, in the lane returned; `facts` as of a real span."""
        lane = heapq.heappop(self._free) if self._free else len(self._open)
        self._open[lane] = name, self._clock.time(), facts
        return lane

    def end(self, lane: int) -> None:
        """It has ended."""
        name, since, facts = self._open.pop(lane)
        heapq.heappush(self._free, lane)
        if name not in self._resting:
            self.works.append((name, lane, since, self._clock.time(), facts))

    def rest(self, names: Collection[str]) -> None:
        """Work of these names stands still until `go_on`."""
        now, self._resting = self._clock.time(), names
        self.works += [
            (name, lane, since, now, {**facts, "lengths": ""} if "lengths" in facts else facts)
            for lane, (name, since, facts) in self._open.items()
            if name in names
        ]

    def go_on(self) -> None:
        """The work that stood still goes on."""
        now = self._clock.time()
        for lane, (name, _, facts) in self._open.items():
            if name in self._resting:
                self._open[lane] = name, now, facts
        self._resting = ()

    def close(self) -> None:
        """The process is no more, nor is what it was at."""
        for lane in list(self._open):
            self.end(lane)


class Recording:
    """The recorders of all processes, by process; those that come back go on with theirs."""

    def __init__(self) -> None:
        self._recorders: dict[str, Recorder] = {}

    def of(self, process: str) -> Recorder:
        """The one of a process."""
        return self._recorders.setdefault(process, Recorder(process))

    @cached_property
    def spans(self) -> Mapping[str, Sequence[Span]]:
        """By process, once the clock stands still."""
        return {
            process: [Span(process, *work) for work in recorder.works]
            for process, recorder in self._recorders.items()
        }
