"""The coordinator: clock, admission, ledger, weight registry. Metadata only; no tensor comes by."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from streamrl.actors.actor_context import TRAINERS, Wiring, make_arbiter, share
from streamrl.actors.coordination.driver_events import (
    EventReport,
    Feed,
    Report,
    StatusReport,
    StepReport,
)
from streamrl.actors.coordination.evaluator import Evaluator
from streamrl.actors.coordination.run_persistence import Durability
from streamrl.actors.coordination.step_reporter import Reporter, RoleActors, Snapshot
from streamrl.actors.liveness import Living
from streamrl.actors.trainer_group import MovedReference, TrainerGroup
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S
from streamrl.algorithms.adaptive_params import Dials
from streamrl.buffer import Admission, Books, ExperienceQueue, StepAssembler
from streamrl.buffer.admission.oversampling import Oversampling
from streamrl.buffer.leases import Overdue
from streamrl.data import PromptStream
from streamrl.dataflow import GENERATE, MOVED, POLICY, REWARD, Kind
from streamrl.errors import DataError, DropError, FilterError, NoSpaceError, StreamError
from streamrl.messages import Ended, Prompt
from streamrl.pipeline import admit, train, watch_stalls
from streamrl.run_dir.crash_stacks import record_stacks
from streamrl.stream.device_lease import Pulse
from streamrl.stream.protocols import Stage, StepOutcome
from streamrl.stream.run_state import SURPLUS, Control
from streamrl.stream.weight_publisher import Publishing, Source, is_due
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightManifest
from streamrl.weights.metrics import weight_metrics
from streamrl.weights.version_registry import REFUSED, Fault, ReaderState, WeightRegistry

REFUSALS = 2
"""After so many refusals each time a version is sent again: it may be damaged where it lies."""


@dataclass(frozen=True)
class Cast:
    """The actors of a run, by role; the trainers' ranks among them."""

    roles: Sequence[RoleActors]

    def of(self, role: str) -> RoleActors:
        """The actors of one role."""
        return next(r for r in self.roles if r.role == role)


@dataclass(frozen=True)
class Start:
    """Where the run starts: prompts, and the state of the checkpoint it goes on from, if any."""

    prompts: PromptStream
    eval_prompts: Mapping[str, Sequence[Prompt]]
    state: Mapping[str, Any] | None
    checkpoint: str = ""
    publisher_node: str = ""


@dataclass(frozen=True)
class Finish:
    """How the run ended. `ledger` is the conservation law in words."""

    version: int
    ledger: str
    interrupted: bool
    checkpoint: str


class CoordinatorActor(Living):
    """Hosts the admitting and the training loop, and answers those who follow the weights."""

    def __init__(self) -> None:
        self._feed = Feed()
        self._loop_spans = SpanRecorder("train-loop")

    async def start(self, wiring: Wiring, cast: Cast, start: Start) -> None:
        """Open the books, see to what was in flight, publish the version the run starts from."""
        config = self._config = wiring.config
        record_stacks(wiring.run_dir, "coordinator")
        self._prompts = start.prompts
        version = 0 if start.state is None else int(start.state["version"])
        self._durability = Durability(config, wiring.run_dir, wiring.shards, start.state)
        books = await self._durability.open_books(self._prompts)
        self._dials = Dials(config.algorithm.row, config.settings)
        self._dials.load_state_dict(start.state["dials"] if start.state else {})
        self._travel = wiring.travel
        self._pulse = Pulse()
        self._arbiter = make_arbiter(config, self._pulse)
        self._lease = share(config, self._arbiter, TRAINERS, TRAINERS)
        self._publisher_node = start.publisher_node
        self._feed.post(EventReport("note", {"text": wiring.travel.choice.reason}))
        trained = [role for role in cast.roles if role.kind is Kind.TRAIN]
        self._trainers = {
            role.role: self._trainer_of(role, has_critic=len(trained) > 1) for role in trained
        }
        self._control = self._make_control(books, version)
        self._queue = ExperienceQueue(wiring.shards, "coordinator")
        self._evaluator = Evaluator(
            config, cast.of(GENERATE.role), cast.of(REWARD.role), self._pulse
        )
        self._eval_prompts = start.eval_prompts
        self._cast = cast
        self._checkpoint = start.checkpoint
        self._saved_version = version
        if books.steps:
            steps = f"{min(books.steps)} to {max(books.steps)}"
            text = f"steps {steps} were made after the checkpoint; they are made again as they were"
            self._feed.post(EventReport("note", {"text": text}))
        await self._control.reconcile(self._queue)
        await self._control.publishing.begin(version, first=True)
        await self._control.publishing.settle()

    def _trainer_of(self, role: RoleActors, *, has_critic: bool) -> TrainerGroup:
        config = self._config
        waits = has_critic and role.role == POLICY
        return TrainerGroup(
            role,
            settings=config.settings,
            config=config.trainer_of(role.role),
            publishes_together=role.role == POLICY and config.fills_generators,
            rests_until=config.critic.warmup_alone if waits else 0,
            probe_every=config.weights.probe_every if role.role == POLICY else 0,
        )

    def _make_control(self, books: Books, version: int) -> Control:
        config, pipeline = self._config, self._config.pipeline
        per_step = pipeline.groups_per_step
        sources: dict[str, Source] = {**self._trainers}
        sources |= {MOVED: MovedReference(self._trainers[POLICY])} if config.reference.every else {}
        registries = {role: self._registry(role) for role in sources}
        publishing = Publishing(
            sources,
            registries,
            due=self._publishes,
            lease=None if config.placement.is_hybrid else self._lease,
            on_fault=lambda role, fault: self._report("publish_failed", role, fault),
        )
        oversampling = Oversampling(config.filter.oversampling, groups_per_step=per_step)
        admission = Admission(
            books.ledger,
            depth=pipeline.lead,
            groups_per_step=per_step,
            capacity_groups=config.capacity_groups,
            total_groups=config.run.steps * per_step,
            version=version,
            oversampling=oversampling,
        )
        assembler = StepAssembler(
            max_staleness=pipeline.max_staleness,
            groups_per_step=per_step,
            drops_stale=pipeline.on_stale == "drop",
            oversampling=oversampling,
        )
        return Control(
            admission,
            assembler,
            books,
            publishing,
            self._dials,
            self._prompts,
            max_attempts=config.queue.max_attempts,
            readmits=config.queue.on_failed_group == "readmit",
            max_filtered=config.filter.max_filter_rounds * per_step,
            max_dropped=config.queue.max_drop_rounds * per_step,
            on_end=lambda uid, how: self._tell(end_reports(uid, how)),
            on_stall=lambda found: self._tell(stall_reports(found, pipeline.on_stall)),
            pulse=self._pulse,
        )

    def _registry(self, role: str) -> WeightRegistry:
        refusals: Counter[int] = Counter()

        def told(kind: str, reader: str, fault: Fault) -> None:
            self._report(kind, reader, fault)
            if kind == REFUSED:
                refusals[fault.version] += 1
                if refusals[fault.version] % REFUSALS == 0:
                    self._control.publishing.resend(role, fault.version)

        keep = self._config.weights.keep_versions
        spread = self._travel.spread(self._publisher_node)
        return WeightRegistry(keep_versions=keep, on_trouble=told, spread=spread)

    def _report(self, kind: str, who: str, fault: Fault) -> None:
        """An event about a version and the actor, or the role, that it gives trouble."""
        fields: dict[str, str | int] = {"actor": who, "version": fault.version}
        self._feed.post(EventReport(kind, {**fields, "reason": fault.reason}))

    def _publishes(self, role: str, version: int) -> bool:
        """Looked at are the last version, and what is evaluated."""
        config, steps = self._config, self._config.run.steps
        evaluated = bool(self._eval_prompts) and config.evaluation.is_due(version, num_steps=steps)
        every, looked_at = config.weights.publish_every, version == steps or evaluated
        return is_due(role, version, every=every, reference=config.reference, looked_at=looked_at)

    async def run(self) -> Finish:
        """Evaluate, stream until the last step or until stopped, evaluate, save."""
        control, config = self._control, self._config
        self._reporter = Reporter(config, self._cast.roles, self._feed, start_s=time.time())
        reporting = asyncio.create_task(self._reporter.run())
        try:
            await self._stream(reporting)
        except (FilterError, DropError, DataError):
            await self._save_of_failed()
            raise
        await self._reporter.finish(reporting)
        interrupted = not control.admission.finished
        if control.torn:
            text = f"stopped between two updates: not saved; a resume goes on from {self._kept}"
            self._feed.post(EventReport("note", {"text": text}))
        elif interrupted or config.checkpoint.at_end:
            await self._save()
        left = await self._queue.stats()
        await self._durability.close()
        counts = control.admission.ledger.check(left.uids, booked=control.booked)
        return Finish(control.admission.version, str(counts), interrupted, self._checkpoint)

    async def _stream(self, reporting: "asyncio.Task[None]") -> None:
        """Admit and train side by side; the first error of either, or of reporting, ends both."""
        training = asyncio.create_task(self._train())
        admitting = asyncio.create_task(admit(self._control, self._queue))
        watching = asyncio.create_task(
            watch_stalls(self._control, self._queue, self._config.pipeline)
        )
        loops = {training, admitting, reporting, watching}
        while not training.done():
            done, _ = await asyncio.wait(
                {task for task in loops if task not in (admitting, watching) or not task.done()},
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                task.result()
        training.result()
        self._control.stop()
        # Admission may wait for room that nobody makes any more.
        for task in (watching, admitting):
            task.cancel()
        await asyncio.wait([watching, admitting])

    async def _train(self) -> None:
        """Train; what the run starts from is evaluated first, while the first step is sampled."""
        if self._control.admission.version == 0 and (row := await self._evaluate_if_due()):
            self._feed.post(StepReport(0, row))
        self._reporter.begin_step(time.time())
        stage = Stage("train", self._queue, self._lease, self._loop_spans)
        await train(stage, self._control, self._trainers, self._config.pipeline, report=self._step)

    async def _step(self, outcome: StepOutcome) -> None:
        """After each step: evaluate if it is time, note the step, maybe save."""
        admission = self._control.admission
        # The ranks' own spans are reported; those of the loop around them only take memory.
        self._loop_spans.drain()
        evaluation = await self._evaluate_if_due()
        registries = self._control.publishing.registries
        traffic = {role: registry.drain() for role, registry in registries.items()}
        weights = weight_metrics(traffic.pop(POLICY), list(traffic.values()))
        row = {**weights, "weights/version": admission.version}
        row |= report_skipped(self._prompts, self._feed)
        self._reporter.note(Snapshot(outcome, row, evaluation))
        if self._durability.is_due(admission.version, outcome.queue.journal_bytes):
            await self._save(goes_on=True)

    def _tell(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self._feed.post(report)

    async def _evaluate_if_due(self) -> dict[str, float]:
        """Score the evaluation prompts under the current weights, outside the stream."""
        version, steps = self._control.admission.version, self._config.run.steps
        if not self._eval_prompts or not self._config.evaluation.is_due(version, num_steps=steps):
            return {}
        # A version that could not be published is told of here, not waited for.
        await self._control.publishing.settle()
        self._feed.post(StatusReport(f"evaluating version {version}"))
        evaluation = asyncio.create_task(self._evaluator.run(self._eval_prompts, version))
        stopping = asyncio.create_task(self._control.stopping.wait())
        await asyncio.wait({evaluation, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        self._feed.post(StatusReport(""))
        if not evaluation.done():
            evaluation.cancel()
            return {}
        result = evaluation.result()
        if result.num_unscored:
            fields = {"version": version, "prompts": result.num_unscored}
            self._feed.post(EventReport("unscored", {**fields, "reason": result.problem}))
        return result.metrics()

    @property
    def _kept(self) -> str:
        return Path(self._checkpoint).name if self._checkpoint else "the beginning"

    async def _save(self, *, goes_on: bool = False) -> None:
        """Write a checkpoint of the current version, unless there is one, or no space for it."""
        version = self._control.admission.version
        if self._checkpoint and version == self._saved_version:
            return
        # What is saved is as it was published.
        await self._control.publishing.settle()
        trainers = list(self._trainers.values())
        try:
            path = await self._durability.save(self._control, trainers, self._reported)
        except NoSpaceError as error:
            if not goes_on:
                raise
            text = f"{error}; kept: {self._kept}; the run goes on, and tries again later"
            self._feed.post(EventReport("no_space", {"version": version, "text": text}))
            return
        if path is not None:
            self._checkpoint, self._saved_version = str(path), version
            event = EventReport("checkpoint", {"version": version, "path": self._checkpoint})
            self._feed.post(event)

    async def _save_of_failed(self) -> None:
        """Save what was made, if that can be, and see that the driver has all reports."""
        try:
            if self._control.admission.version > self._saved_version and not self._control.torn:
                await self._save()
            await self._reported()
        except StreamError as error:
            self._feed.post(EventReport("note", {"text": f"the end was not saved: {error}"}))

    async def _reported(self) -> None:
        """The driver has the row of every step: a step that is not made again has no other."""
        await self._reporter.idle()
        await self._feed.delivered(CALL_TIMEOUT_S)

    async def lost(self, name: str) -> None:
        """An actor has died and is started again: what it held is free, and it reads nothing."""
        self._forget(name)
        await self._queue.release(name)

    async def joined(self, role: str, name: str, actor: Any) -> None:
        """A replica has joined: from now on it is asked whatever the others of its role are."""
        self._cast.of(role).join(name, actor)

    async def leaving(self, role: str, name: str) -> None:
        """A replica is about to leave: it is asked nothing any more."""
        self._cast.of(role).leave(name)

    async def left(self, name: str) -> None:
        """A replica has left: what it may still hold is free, and it reads no weights."""
        self._forget(name)
        await self._queue.release(name, died=False)

    def _forget(self, name: str) -> None:
        self._arbiter.forget(name)
        for registry in self._control.publishing.registries.values():
            registry.forget(name)

    async def request_stop(self) -> None:
        """End the stream after the micro-batch under way, or a step that has begun to update."""
        self._control.stop()

    async def reports(self, after: int, wait_s: float) -> list[Report]:
        """See Feed.after."""
        return await self._feed.after(after, wait_s)

    async def newest(
        self, role: str, reader: str, held: ReaderState, wait_s: float
    ) -> WeightManifest | None:
        """See WeightRegistry.newest; `role` is whose weights they are."""
        return await self._control.publishing.registries[role].newest(reader, held, wait_s=wait_s)

    async def lease(self, method: str, *arguments: str) -> Any:
        """Call a method of the arbiter, see ArbiterFace."""
        found = methodcaller(method, *arguments)(self._arbiter)
        return await found if asyncio.iscoroutine(found) else found


def report_skipped(prompts: PromptStream, feed: Feed) -> Mapping[str, int]:
    """Tell of rows that gave no prompt since the last call; their counts, as metrics."""
    skipped = prompts.take_skipped()
    for problem in skipped.problems:
        feed.post(EventReport("bad_row", {"reason": problem}))
    return skipped.metrics


def end_reports(uid: str, how: Ended) -> list[EventReport]:
    """The event of a drop; none of what is no fault, and may happen more often than a step."""
    if how.filtered or how.cause == SURPLUS:
        return []
    return [EventReport("drop", {"uid": uid, "cause": how.cause, "reason": how.reason})]


def stall_reports(found: Sequence[Overdue], action: str) -> list[EventReport]:
    """One event per holder and stage, however many groups it has."""
    by_holder: dict[tuple[str, str], list[Overdue]] = {}
    for one in found:
        by_holder.setdefault((one.stage, one.holder), []).append(one)
    reports = []
    for (stage, holder), group in by_holder.items():
        fields: dict[str, str | int | float] = {"stage": stage, "holder": holder}
        fields |= {"groups": len(group), "age_s": round(max(one.age_s for one in group), 1)}
        fields |= {"uids": " ".join(one.uid for one in group[:8]), "action": action}
        reports.append(EventReport("stall", fields))
    return reports
