"""What every process did and when, kept short while the clock runs."""

import asyncio
import heapq
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from streamrl.telemetry.spans import Span, SpanArgValue

SpanArgs = Mapping[str, SpanArgValue]
NO_SPAN_ARGS: SpanArgs = {}


class ProcessRecorder:
    """The work of one process, as spans are: what overlaps lies in different lanes."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.closed_spans: list[tuple[str, int, float, float, SpanArgs]] = []
        self._clock = asyncio.get_running_loop()
        self._free_lanes: list[int] = []
        self._open_spans: dict[int, tuple[str, float, SpanArgs]] = {}
        self._paused_names: Collection[str] = ()

    def begin_span(self, name: str, facts: SpanArgs = NO_SPAN_ARGS) -> int:
        """A piece of work of this name begins, in the lane returned; `facts` as of a real span."""
        lane = heapq.heappop(self._free_lanes) if self._free_lanes else len(self._open_spans)
        self._open_spans[lane] = name, self._clock.time(), facts
        return lane

    def end_span(self, lane: int) -> None:
        """It has ended."""
        name, since, facts = self._open_spans.pop(lane)
        heapq.heappush(self._free_lanes, lane)
        if name not in self._paused_names:
            self.closed_spans.append((name, lane, since, self._clock.time(), facts))

    def pause_spans(self, names: Collection[str]) -> None:
        """Work of these names stands still until `go_on`."""
        now, self._paused_names = self._clock.time(), names
        self.closed_spans += [
            (name, lane, since, now, {**facts, "lengths": ""} if "lengths" in facts else facts)
            for lane, (name, since, facts) in self._open_spans.items()
            if name in names
        ]

    def resume_spans(self) -> None:
        """The work that stood still goes on."""
        now = self._clock.time()
        for lane, (name, _, facts) in self._open_spans.items():
            if name in self._paused_names:
                self._open_spans[lane] = name, now, facts
        self._paused_names = ()

    def close_spans(self) -> None:
        """The process is no more, nor is what it was at."""
        for lane in list(self._open_spans):
            self.end_span(lane)


class ProcessRecordings:
    """The recorders of all processes, by process; those that come back go on with theirs."""

    def __init__(self) -> None:
        self._recorders: dict[str, ProcessRecorder] = {}

    def get_recorder(self, process: str) -> ProcessRecorder:
        """The one of a process."""
        return self._recorders.setdefault(process, ProcessRecorder(process))

    @cached_property
    def spans_by_process(self) -> Mapping[str, Sequence[Span]]:
        """By process, once the clock stands still."""
        return {
            process: [Span(process, *work) for work in recorder.closed_spans]
            for process, recorder in self._recorders.items()
        }
