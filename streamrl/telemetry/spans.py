"""What a process did and when: spans, and how much of a window they fill.

Each actor records into its own `SpanRecorder` and hands the spans over with `drain`; the run writes
them to the trace and computes how idle each stage was.
"""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

SpanArgValue = str | int | float | bool


@dataclass(frozen=True)
class Span:
    """One piece of work: [start_s, end_s] in seconds of the recorder's clock (epoch by default).

    Spans of one process in one lane never overlap. `is_open` is set where the work was still going
    on when the span was drained; `end_s` is then the time of that drain, and the whole span comes
    with a later drain.
    """

    process: str
    name: str
    lane: int
    start_s: float
    end_s: float
    args: Mapping[str, SpanArgValue] = field(default_factory=dict, hash=False)
    is_open: bool = False


class SpanRecorder:
    """Records the spans of one process, across its threads and asyncio tasks."""

    def __init__(self, process: str, clock: Callable[[], float] = time.time) -> None:
        self.process = process
        self._clock = clock
        self._lock = threading.Lock()
        self._open_spans: dict[int, Span] = {}
        self._closed_spans: list[Span] = []
        self._paused_names: frozenset[str] = frozenset()

    @contextmanager
    def record_span(self, name: str, **args: SpanArgValue) -> Iterator[dict[str, SpanArgValue]]:
        """Record the block as one span, also if it raises; `args` are a few small facts.

        Gives them, for the block to add what it has found out.
        """
        with self._lock:
            lane = next(lane for lane in itertools.count() if lane not in self._open_spans)
            start_s = self._clock()
            self._open_spans[lane] = Span(self.process, name, lane, start_s, start_s, args)
        try:
            yield args
        finally:
            with self._lock:
                span = self._open_spans.pop(lane)
                if not self._is_paused(span):
                    self._closed_spans.append(self._close_span(span, self._clock()))

    def pause_spans(self, names: Collection[str]) -> None:
        """Work of these names stands still until `go_on`: spans end here, and begin again there."""
        with self._lock:
            now, self._paused_names = self._clock(), frozenset(names)
            self._closed_spans += [
                self._close_span(s, now) for s in self._open_spans.values() if self._is_paused(s)
            ]

    def resume_spans(self) -> None:
        """The work that stood still goes on."""
        with self._lock:
            now = self._clock()
            for lane, span in self._open_spans.items():
                if self._is_paused(span):
                    self._open_spans[lane] = replace(span, start_s=now)
            self._paused_names = frozenset()

    def _is_paused(self, span: Span) -> bool:
        return span.name in self._paused_names

    def drain_spans(self, now: float | None = None) -> list[Span]:
        """Spans closed since the last drain, then those still open, marked so and ended at `now`.

        `now` is in the recorder's clock and defaults to its time.
        """
        with self._lock:
            end_s = self._clock() if now is None else now
            closed, self._closed_spans = self._closed_spans, []
            works = [span for span in self._open_spans.values() if not self._is_paused(span)]
            still_open = [replace(self._close_span(s, end_s), is_open=True) for s in works]
        return closed + still_open

    @staticmethod
    def _close_span(span: Span, end_s: float) -> Span:
        # A wall clock may be set back while a span is open; its length is then 0, not negative.
        # Facts may still be added to those of an open one.
        return replace(span, end_s=max(end_s, span.start_s), args=dict(span.args))


def compute_busy_s(spans: Iterable[Span], *, start: float, end: float) -> float:
    """Length of the union of the spans within [start, end], in seconds."""
    total, covered_until = 0.0, start
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        left, right = max(span.start_s, covered_until), min(span.end_s, end)
        if right > left:
            total += right - left
            covered_until = right
    return min(total, max(end - start, 0.0))


def compute_idle_fraction(
    spans: Iterable[Span], *, start: float, end: float, num_processes: int = 1
) -> float:
    """Part of [start, end] that a stage's processes did not work, averaged over them; 0 to 1.

    `num_processes` counts the stage's processes: one that has no span was idle throughout. Raises
    ValueError if the window is empty.
    """
    if end <= start:
        raise ValueError(f"idle_fraction: the window [{start}, {end}] is empty")
    by_process: dict[str, list[Span]] = {}
    for span in spans:
        by_process.setdefault(span.process, []).append(span)
    busy = sum(compute_busy_s(own, start=start, end=end) for own in by_process.values())
    idle = 1.0 - busy / (max(num_processes, len(by_process)) * (end - start))
    return min(max(idle, 0.0), 1.0)
