"""The coordinator: clock, admission, ledger, weight registry. Metadata only; no tensor comes by."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from streamrl.actors.calls import CALL_TIMEOUT_S
from streamrl.actors.evaluator import Evaluator
from streamrl.actors.feed import EventReport, Feed, Report, StatusReport, StepReport
from streamrl.actors.reporting import Reporter, Snapshot, StageActors
from streamrl.actors.trainer import TrainerGroup
from streamrl.actors.wiring import Wiring
from streamrl.buffer import Admission, ExperienceQueue, Ledger, StepAssembler
from streamrl.checkpoint import CheckpointWriter
from streamrl.data import PromptStream
from streamrl.lease import Arbiter, FreeLease, SharedLease
from streamrl.messages import Experience, Prompt
from streamrl.pipeline import Control, Stage, StepOutcome, admit, train
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightManifest
from streamrl.weights.registry import Held, WeightRegistry


@dataclass(frozen=True)
class Cast:
    """The actors of a run, by stage; the trainer's ranks among them."""

    stages: Sequence[StageActors]

    def of(self, stage: str) -> Sequence[Any]:
        """The actors of one stage."""
        return next(s.actors for s in self.stages if s.stage == stage)


@dataclass(frozen=True)
class Start:
    """Where the run starts: prompts, and the state of a checkpoint if it is resumed."""

    prompts: PromptStream
    eval_prompts: Sequence[Prompt]
    state: Mapping[str, Any] | None


@dataclass(frozen=True)
class Finish:
    """How the run ended. `ledger` is the conservation law in words."""

    version: int
    ledger: str
    interrupted: bool
    checkpoint: str


@ray.remote(num_cpus=0)
class CoordinatorActor:
    """Hosts the admitting and the training loop, and answers those who follow the weights."""

    def __init__(self) -> None:
        self._feed = Feed()
        self._loop_spans = SpanRecorder("train-loop")

    async def start(self, wiring: Wiring, cast: Cast, start: Start) -> None:
        """Open the books, put back what was in flight, publish the version the run starts from."""
        config = self._config = wiring.config
        self._run_dir = wiring.run_dir
        self._prompts, state = start.prompts, start.state
        version, ledger = 0, Ledger()
        if state is not None:
            version, ledger = int(state["version"]), Ledger.from_state(state["ledger"])
            self._prompts.load_state_dict(state["prompts"])
        pipeline = config.pipeline
        limits = {
            "max_staleness": pipeline.max_staleness,
            "groups_per_step": pipeline.groups_per_step,
        }
        admission = Admission(
            ledger,
            **limits,
            capacity_groups=config.capacity_groups,
            total_groups=config.run.steps * pipeline.groups_per_step,
            version=version,
        )
        self._registry = WeightRegistry(keep_versions=config.weights.keep_versions)
        self._control = Control(
            admission, StepAssembler(**limits), self._registry, on_drop=self._report_drop
        )
        self._queue = ExperienceQueue(wiring.shards, "coordinator")
        self._arbiter = Arbiter(timeout_s=pipeline.stall_s)
        timeout_s = config.trainer.collective_timeout_s + CALL_TIMEOUT_S
        self._trainer = TrainerGroup(cast.of("train"), timeout_s=timeout_s)
        self._evaluator = Evaluator(config, cast.of("generate"), cast.of("reward"))
        self._eval_prompts = start.eval_prompts
        self._cast = cast
        self._checkpoint = ""
        self._saved_version = version
        await self._readmit(list(ledger.in_flight), version)
        self._registry.offer(await self._trainer.publish(version))

    async def _readmit(self, uids: Sequence[str], version: int) -> None:
        """Prompts that were in flight when the checkpoint was taken are generated again."""
        for uid in uids:
            self._control.assembler.admit(uid, version)
        if uids:
            await self._queue.admit([self._prompts.prompt(uid) for uid in uids], version)

    async def run(self) -> Finish:
        """Evaluate, stream until the last step or until stopped, evaluate, save."""
        control, config = self._control, self._config
        if control.admission.version == 0:
            await self._evaluate_base()
        self._reporter = Reporter(config, self._cast.stages, self._feed, start_s=time.time())
        reporting = asyncio.create_task(self._reporter.run())
        await self._stream(reporting)
        await self._reporter.finish(reporting)
        interrupted = not control.admission.finished
        if config.checkpoint.on_interrupt if interrupted else config.checkpoint.at_end:
            await self._save()
        left = await self._queue.end_step([], control.admission.version)
        counts = control.admission.ledger.check(left.uids)
        return Finish(control.admission.version, str(counts), interrupted, self._checkpoint)

    async def _stream(self, reporting: "asyncio.Task[None]") -> None:
        """Admit and train side by side; the first error of either, or of reporting, ends both."""
        stage = Stage("train", self._queue, self._train_lease(), self._loop_spans)
        training = asyncio.create_task(
            train(stage, self._control, self._trainer, self._config.pipeline, report=self._step)
        )
        admitting = asyncio.create_task(admit(self._control, self._queue, self._prompts))
        loops = {training, admitting, reporting}
        while not training.done():
            done, _ = await asyncio.wait(
                {task for task in loops if not (task is admitting and task.done())},
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                task.result()
        training.result()
        self._control.stopping.set()
        await admitting

    def _train_lease(self) -> Any:
        shared = self._config.placement.one_at_a_time
        return SharedLease(self._arbiter, "trainer") if shared else FreeLease()

    async def _step(self, outcome: StepOutcome) -> None:
        """After each step: evaluate if it is time, note the step, maybe save."""
        admission = self._control.admission
        # The ranks' own spans are reported; those of the loop around them only take memory.
        self._loop_spans.drain()
        evaluation = await self._evaluate_if_due()
        weights = self._registry.drain_metrics()
        self._reporter.note(Snapshot(outcome, weights, evaluation))
        every = self._config.checkpoint.every
        if every and admission.version % every == 0:
            await self._save()

    def _report_drop(self, experience: Experience) -> None:
        fields = {"uid": experience.uid, "cause": str(experience.dropped)}
        self._feed.post(EventReport("drop", {**fields, "reason": experience.reason}))

    async def _evaluate_if_due(self) -> dict[str, float]:
        """Score the evaluation prompts under the current weights, outside the stream."""
        version, steps = self._control.admission.version, self._config.run.steps
        if not self._eval_prompts or not self._config.evaluation.is_due(version, num_steps=steps):
            return {}
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
        return {
            "eval/pass_at_1": result.pass_at_1,
            "eval/pass_at_k": result.pass_at_k,
            "eval/mean_at_k": result.mean_at_k,
        }

    async def _evaluate_base(self) -> None:
        """What the run starts from is reported as step 0."""
        row = await self._evaluate_if_due()
        if row:
            self._feed.post(StepReport(0, row))

    async def _save(self) -> None:
        """Write a checkpoint of the current version, unless it is written already."""
        version = self._control.admission.version
        if self._checkpoint and version == self._saved_version:
            return
        state = {
            "version": version,
            "ledger": self._control.admission.ledger.state_dict(),
            "prompts": self._prompts.state_dict(),
        }
        writer = CheckpointWriter(self._run_dir, version)
        await self._trainer.save(writer)
        path: Path = writer.commit(state, keep=self._config.checkpoint.keep)
        self._checkpoint, self._saved_version = str(path), version
        self._feed.post(EventReport("checkpoint", {"version": version, "path": self._checkpoint}))

    async def request_stop(self) -> None:
        """End the stream after the micro-batch under way."""
        self._control.stopping.set()

    async def reports(self, after: int, wait_s: float) -> list[Report]:
        """See Feed.after."""
        return await self._feed.after(after, wait_s)

    async def newest(self, reader: str, held: Held, wait_s: float) -> WeightManifest | None:
        """See WeightRegistry.newest."""
        return await self._registry.newest(reader, held, wait_s=wait_s)

    async def acquire(self, holder: str) -> None:
        """See Arbiter.acquire."""
        await self._arbiter.acquire(holder)

    async def release(self, holder: str) -> None:
        """See Arbiter.release."""
        await self._arbiter.release(holder)
