"""Reports from the coordinator to the driver, in order."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from streamrl.errors import DeadlineError
from streamrl.telemetry.metric_names import MetricsRow
from streamrl.telemetry.progress import SHOW_AFTER_S, WorkStatus
from streamrl.telemetry.rollout_log import RecordedGroup
from streamrl.telemetry.spans import Span
from streamrl.user_code.service_gate import Outage

STATUS_EVERY_S = 1.0
"""Time between two reports on the same work."""


@dataclass(frozen=True)
class StepReport:
    """Report of a finished training step: metrics row, spans for the trace.

    is_repeated: a predecessor of this process trained the step after the last checkpoint.
    """

    step: int
    row: MetricsRow
    spans: Sequence[Span] = ()
    is_repeated: bool = False


@dataclass(frozen=True)
class RolloutReport:
    """All recorded groups of a finished training step."""

    step: int
    groups: Sequence[RecordedGroup]


@dataclass(frozen=True)
class EventReport:
    """Report of an event, such as a dropped group or a restarted actor."""

    name: str
    fields: Mapping[str, str | int | float | bool]


DriverReport = StepReport | RolloutReport | EventReport | WorkStatus


class DriverEvents:
    """Queue of reports that the driver has not received yet; supports a single reader."""

    def __init__(self) -> None:
        self._reports: deque[DriverReport] = deque()
        self._num_delivered = 0
        self._new_report = asyncio.Event()
        self._delivery = asyncio.Event()

    def post_report(self, report: DriverReport) -> None:
        self._reports.append(report)
        self._new_report.set()

    def post_event(self, name: str, **fields: str | int | float | bool) -> None:
        self.post_report(EventReport(name, fields))

    @contextmanager
    def report_status(self, status: WorkStatus) -> Iterator[None]:
        """Report the work of the block, which may advance its count, once it takes long."""
        reporting = asyncio.create_task(self._repeat_status(status))
        try:
            yield
        finally:
            reporting.cancel()
            self.post_report(WorkStatus(""))

    async def _repeat_status(self, status: WorkStatus) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        await asyncio.sleep(SHOW_AFTER_S)
        while True:
            status.elapsed_s = clock() - started
            self.post_report(replace(status))
            await asyncio.sleep(STATUS_EVERY_S)

    async def read_after(self, count: int, wait_s: float) -> list[DriverReport]:
        """Return the reports after the first `count` of the run; wait up to `wait_s` for a report.

        count: number of reports received so far; the queue discards them.
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
        """Wait until the driver has received all reports posted so far.

        Raises DeadlineError after `timeout_s`.
        """
        num_posted = self._num_delivered + len(self._reports)
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_delivered < num_posted:
                    self._delivery.clear()
                    await self._delivery.wait()
        except TimeoutError:
            num_missing = num_posted - self._num_delivered
            raise DeadlineError(
                f"the driver left {num_missing} reports unread for {timeout_s:g} s"
            ) from None


class OutageReporter:
    """Reports the outages of services: an event at their begin and end, a status meanwhile."""

    def __init__(self, events: DriverEvents) -> None:
        self._events = events
        self._texts: dict[str, str] = {}

    def report_outages(self, outages: Sequence[Outage]) -> None:
        """Report what has changed since the last call, once for all actors that wait."""
        texts: dict[str, str] = {}
        for outage in outages:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - outage.down_s))
            text = f"{outage.stage} waits since {since} for {outage.reason}"
            texts[outage.service] = self._texts.get(outage.service, text)
        for name, old, new in (
            ("outage", self._texts, texts),
            ("outage_ended", texts, self._texts),
        ):
            for service in new.keys() - old.keys():
                self._events.post_event(name, text=new[service])
        if texts or self._texts:
            self._events.post_report(WorkStatus("; ".join(texts.values())))
        self._texts = texts
