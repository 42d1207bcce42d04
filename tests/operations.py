"""Count of the lines of the package that a piece of work executes: a measure without a clock."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import streamrl

PACKAGE = str(Path(streamrl.__file__).parent)


@dataclass
class LineCount:
    """Number of executed lines; each round of a loop counts."""

    lines: int = 0


@contextmanager
def count_lines() -> Iterator[LineCount]:
    """Count the package's lines that this thread executes in calls within the block."""
    count, before = LineCount(), sys.gettrace()

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        count.lines += event == "line"
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    sys.settrace(trace_call)
    try:
        yield count
    finally:
        sys.settrace(before)
