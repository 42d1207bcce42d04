"""What the coordinator tells the driver, in order, for as long as the run lasts."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import DeadlineError
from streamrl.telemetry.metric_names import MetricsRow
from streamrl.telemetry.spans import Span


@dataclass(frozen=True)
class StepReport:
    """A finished step: its row, the spans for the trace, a few scored texts."""

    step: int
    row: MetricsRow
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


DriverReport = StepReport | EventReport | StatusReport


class DriverEvents:
    """A list of reports for one reader, with a place to wait for the next."""

    def __init__(self) -> None:
        self._reports: deque[DriverReport] = deque()
        self._num_delivered = 0
        self._new_report = asyncio.Event()
        self._delivery = asyncio.Event()

    def post_report(self, report: DriverReport) -> None:
        """Add a report."""
        self._reports.append(report)
        self._new_report.set()

    async def read_after(self, count: int, wait_s: float) -> list[DriverReport]:
        """The reports behind the first `count`, waiting up to `wait_s` for one.

        Who asks for what comes behind `count` has those before: they are forgotten.
        """
        while self._num_delivered < count:
            self._reports.popleft()
            self._num_delivered += 1
        self._delivery.set()
        if not self._reports:
            self._new_report.clear()
            try:
                await asyncio.wait_for(self._new_report.wait(), wait_s)
            except TimeoutError:
                return []
        return list(self._reports)

    async def wait_until_delivered(self, timeout_s: float) -> None:
        """Wait until the reader has all that was posted so far. Raises DeadlineError."""
        posted = self._num_delivered + len(self._reports)
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_delivered < posted:
                    self._delivery.clear()
                    await self._delivery.wait()
        except TimeoutError:
            missing = posted - self._num_delivered
            raise DeadlineError(
                f"{missing} reports were not fetched by the driver within {timeout_s:g} s"
            ) from None
