"""Spans of work in a process, and the fraction of a window that they cover.

Each actor records into its own `SpanRecorder`; the coordinator drains the spans, writes them to the
trace and computes the idle time of each stage.
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
    """A piece of work in a process: [start_s, end_s] in seconds of the recorder's clock.

    The clock is that of the epoch by default. Spans of a process in one lane never overlap.
    args: facts about the work, such as a uid or a number of tokens.
    is_open: the work was still running at the drain; `end_s` is then the time of the drain, and a
        later drain returns the whole span.
    """

    process: str
    name: str
    lane: int
    start_s: float
    end_s: float
    args: Mapping[str, SpanArgValue] = field(default_factory=dict, hash=False)
    is_open: bool = False


class SpanRecorder:
    """Thread-safe recorder of the spans of one process, across its threads and asyncio tasks."""

    def __init__(self, process: str, clock: Callable[[], float] = time.time) -> None:
        self.process = process
        self._clock = clock
        self._lock = threading.Lock()
        self._open_spans: dict[int, Span] = {}
        self._closed_spans: list[Span] = []
        self._paused_names: frozenset[str] = frozenset()

    @contextmanager
    def record_span(self, name: str, **args: SpanArgValue) -> Iterator[dict[str, SpanArgValue]]:
        """Record the block as a span of this name, even if the block raises.

        Yields `args`, to which the block can add further facts.
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
        """End the open spans of these names now, until `resume_spans` reopens them."""
        with self._lock:
            now, self._paused_names = self._clock(), frozenset(names)
            self._closed_spans += [
                self._close_span(s, now) for s in self._open_spans.values() if self._is_paused(s)
            ]

    def resume_spans(self) -> None:
        """Reopen the spans that `pause_spans` ended."""
        with self._lock:
            now = self._clock()
            for lane, span in self._open_spans.items():
                if self._is_paused(span):
                    self._open_spans[lane] = replace(span, start_s=now)
            self._paused_names = frozenset()

    def _is_paused(self, span: Span) -> bool:
        return span.name in self._paused_names

    def drain_spans(self, now: float | None = None) -> list[Span]:
        """Return the spans closed since the last drain, then the spans still open, cut at `now`.

        `now` is a time of the recorder's clock, by default the present.
        """
        with self._lock:
            end_s = self._clock() if now is None else now
            closed, self._closed_spans = self._closed_spans, []
            open_spans = [span for span in self._open_spans.values() if not self._is_paused(span)]
            still_open = [replace(self._close_span(s, end_s), is_open=True) for s in open_spans]
        return closed + still_open

    @staticmethod
    def _close_span(span: Span, end_s: float) -> Span:
        """Return a span that ends at `end_s`."""
        # A wall clock can be set back while a span is open: the length must not become negative.
        # Copy args: the block can still add facts to an open span.
        return replace(span, end_s=max(end_s, span.start_s), args=dict(span.args))


def compute_busy_s(spans: Iterable[Span], *, start: float, end: float) -> float:
    """Return the seconds of [start, end] in which at least one of the spans was open."""
    total, covered_until = 0.0, start
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        left, right = max(span.start_s, covered_until), min(span.end_s, end)
        if right > left:
            total += right - left
            covered_until = right
    return min(total, max(end - start, 0.0))


def sum_busy_s(spans: Iterable[Span], *, start: float, end: float) -> float:
    """Return the busy seconds of [start, end], summed over the spans' processes."""
    by_process: dict[str, list[Span]] = {}
    for span in spans:
        by_process.setdefault(span.process, []).append(span)
    return sum(compute_busy_s(own, start=start, end=end) for own in by_process.values())


def compute_idle_fraction(
    spans: Iterable[Span], *, start: float, end: float, num_processes: int = 1
) -> float:
    """Return the fraction of [start, end] in which a stage's processes did not work.

    The fraction is averaged over `num_processes`, the number of the stage's processes: a process
    without spans counts as idle. Raises ValueError if the window is empty.
    """
    if end <= start:
        raise ValueError(f"idle_fraction: the window [{start}, {end}] is empty")
    spans = list(spans)
    count = max(num_processes, len({span.process for span in spans}))
    idle = 1.0 - sum_busy_s(spans, start=start, end=end) / (count * (end - start))
    return min(max(idle, 0.0), 1.0)
