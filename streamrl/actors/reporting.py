"""Turns finished steps into reports, beside the stream and never in its way."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.actors.calls import call
from streamrl.actors.feed import Feed, StepReport
from streamrl.actors.trainer import step_normaliser
from streamrl.actors.wiring import ActorReport
from streamrl.algorithms.objective import summarise
from streamrl.config import RunConfig
from streamrl.dataflow import Kind
from streamrl.pipeline import StepOutcome
from streamrl.telemetry.contract import check_row
from streamrl.telemetry.spans import Span
from streamrl.telemetry.step_row import Activity, StepFacts, step_row


@dataclass(frozen=True)
class StageActors:
    """The actors of one stage and their names."""

    stage: str
    kind: Kind
    names: Sequence[str]
    actors: Sequence[Any]


@dataclass(frozen=True)
class Snapshot:
    """What was read at the end of a step, before the next one changed it."""

    outcome: StepOutcome
    weights: Mapping[str, float]
    evaluation: Mapping[str, float]


class Reporter:
    """Drains the actors after each step, computes the step's row and posts it."""

    def __init__(
        self, config: RunConfig, stages: Sequence[StageActors], feed: Feed, *, start_s: float
    ) -> None:
        self._config = config
        self._stages = stages
        self._feed = feed
        self._window_start = start_s
        self._spans: dict[str, list[Span]] = {stage.stage: [] for stage in stages}
        self._snapshots: asyncio.Queue[Snapshot] = asyncio.Queue()

    def note(self, snapshot: Snapshot) -> None:
        """A step has ended; its report follows in its own time."""
        self._snapshots.put_nowait(snapshot)

    async def run(self) -> None:
        """Report every noted step, without end."""
        while True:
            snapshot = await self._snapshots.get()
            await self._report(snapshot)
            self._snapshots.task_done()

    async def finish(self, running: "asyncio.Task[None]") -> None:
        """Wait until every noted step is reported by `running`, the task of `run`; end it."""
        joined = asyncio.create_task(self._snapshots.join())
        await asyncio.wait({joined, running}, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            running.result()
        running.cancel()

    async def _report(self, snapshot: Snapshot) -> None:
        reports = await self._drain()
        closed = [s for stage in reports.values() for r in stage for s in r.spans if not s.is_open]
        samples = [sample for stage in reports.values() for r in stage for sample in r.samples]
        outcome = snapshot.outcome
        row = step_row(
            StepFacts(
                version=outcome.version,
                groups=outcome.groups,
                sums=outcome.sums,
                metrics=self._metrics(snapshot),
                queue=outcome.queue,
                ledger=outcome.ledger,
                activity=self._activity(reports),
                start_s=self._window_start,
                end_s=outcome.ended_at,
                max_staleness=self._config.pipeline.max_staleness,
            )
        )
        check_row(row)
        self._window_start = outcome.ended_at
        self._feed.post(StepReport(outcome.version + 1, row, closed, samples))

    async def _drain(self) -> dict[str, list[ActorReport]]:
        """What every actor did since the last step, by stage."""
        calls = [
            call(actor.drain.remote(), f"{name}.drain")
            for stage in self._stages
            for name, actor in zip(stage.names, stage.actors, strict=True)
        ]
        replies = iter(await asyncio.gather(*calls))
        return {s.stage: list(itertools.islice(replies, len(s.actors))) for s in self._stages}

    def _activity(self, reports: Mapping[str, Sequence[ActorReport]]) -> dict[str, Activity]:
        """Spans that reach into the window; those drained early are kept for the next one."""
        activity = {}
        for stage in self._stages:
            kept = [s for s in self._spans[stage.stage] if not s.is_open]
            spans = kept + [s for report in reports[stage.stage] for s in report.spans]
            spans = [span for span in spans if span.end_s > self._window_start]
            self._spans[stage.stage] = spans
            activity[stage.stage] = Activity(stage.kind.value, len(stage.actors), spans)
        return activity

    def _metrics(self, snapshot: Snapshot) -> dict[str, float]:
        outcome = snapshot.outcome
        divisor = step_normaliser(self._config, outcome.totals)
        return {
            **summarise(outcome.sums, divisor),
            **outcome.update.metrics,
            **snapshot.weights,
            **snapshot.evaluation,
        }
