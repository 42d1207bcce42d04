"""Compact recording of the spans of all simulated processes."""

import asyncio
import heapq
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from streamrl.telemetry.spans import Span, SpanArgValue

SpanArgs = Mapping[str, SpanArgValue]
NO_SPAN_ARGS: SpanArgs = {}
LAST_FACTS = ("lengths", "tokens")
"""Facts that a process knows at the end of its work."""


class ProcessRecorder:
    """Recorder of one process's spans; spans that overlap get different lanes."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.closed_spans: list[tuple[str, int, float, float, SpanArgs]] = []
        self._clock = asyncio.get_running_loop()
        self._free_lanes: list[int] = []
        self._open_spans: dict[int, tuple[str, float, SpanArgs]] = {}
        self._paused_names: Collection[str] = ()

    def begin_span(self, name: str, args: SpanArgs = NO_SPAN_ARGS) -> int:
        lane = heapq.heappop(self._free_lanes) if self._free_lanes else len(self._open_spans)
        self._open_spans[lane] = name, self._clock.time(), args
        return lane

    def end_span(self, lane: int) -> None:
        name, since, args = self._open_spans.pop(lane)
        heapq.heappush(self._free_lanes, lane)
        if name not in self._paused_names:
            self.closed_spans.append((name, lane, since, self._clock.time(), args))

    def pause_spans(self, names: Collection[str]) -> None:
        """End all open spans of these names; `resume_spans` begins them again.

        The ended part has no LAST_FACTS: only the last part of a work carries them.
        """
        now, self._paused_names = self._clock.time(), names
        self.closed_spans += [
            (name, lane, since, now, {k: "" if k in LAST_FACTS else v for k, v in args.items()})
            for lane, (name, since, args) in self._open_spans.items()
            if name in names
        ]

    def resume_spans(self) -> None:
        now = self._clock.time()
        for lane, (name, _, args) in self._open_spans.items():
            if name in self._paused_names:
                self._open_spans[lane] = name, now, args
        self._paused_names = ()

    def close_spans(self) -> None:
        for lane in list(self._open_spans):
            self.end_span(lane)


class ProcessRecordings:
    """Recorders by process name; a restarted process continues with its recorder."""

    def __init__(self) -> None:
        self._recorders: dict[str, ProcessRecorder] = {}

    def get_recorder(self, process: str) -> ProcessRecorder:
        return self._recorders.setdefault(process, ProcessRecorder(process))

    @cached_property
    def spans_by_process(self) -> Mapping[str, Sequence[Span]]:
        """Spans by process name. Cached: read the property only after the simulation."""
        return {
            process: [Span(process, *work) for work in recorder.closed_spans]
            for process, recorder in self._recorders.items()
        }
