"""What the coordinator tells the driver, in order, for as long as the run lasts."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import DeadlineError
from streamrl.telemetry.metric_names import Row
from streamrl.telemetry.spans import Span


@dataclass(frozen=True)
class StepReport:
    """A finished step: its row, the spans for the trace, a few scored texts."""

    step: int
    row: Row
    spans: Sequence[Span] = ()
    samples: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


@dataclass(frozen=True)
class EventReport:
    """Something that happened between steps."""

    name: str
    fields: Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class StatusReport:
    """What the run is doing while no step is under way."""

    text: str


Report = StepReport | EventReport | StatusReport


class Feed:
    """A list of reports for one reader, with a place to wait for the next."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()
        self._forgotten = 0
        self._posted = asyncio.Event()
        self._taken = asyncio.Event()

    def post(self, report: Report) -> None:
        """Add a report."""
        self._reports.append(report)
        self._posted.set()

    async def after(self, count: int, wait_s: float) -> list[Report]:
        """The reports behind the first `count`, waiting up to `wait_s` for one.

        Who asks for what comes behind `count` has those before: they are forgotten.
        """
        while self._forgotten < count:
            self._reports.popleft()
            self._forgotten += 1
        self._taken.set()
        if not self._reports:
            self._posted.clear()
            try:
                await asyncio.wait_for(self._posted.wait(), wait_s)
            except TimeoutError:
                return []
        return list(self._reports)

    async def delivered(self, timeout_s: float) -> None:
        """Wait until the reader has all that was posted so far. Raises DeadlineError."""
        posted = self._forgotten + len(self._reports)
        try:
            async with asyncio.timeout(timeout_s):
                while self._forgotten < posted:
                    self._taken.clear()
                    await self._taken.wait()
        except TimeoutError:
            missing = posted - self._forgotten
            raise DeadlineError(
                f"{missing} reports were not fetched by the driver within {timeout_s:g} s"
            ) from None
