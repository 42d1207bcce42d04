"""Simulation of a placement in virtual time.

It runs the real admission and training loops, the real `RunState` with its admission control,
ledger, step assembly and weight publisher, the real micro-batch schedule and the real device
arbiter. Computation and transfers are replaced by timers.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from streamrl.algorithms import ALGORITHMS, AlgorithmConfig
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import AdmissionController, ExperienceQueue, Ledger, RunLog, StepAssembler
from streamrl.buffer.journal import RecordLog
from streamrl.buffer.micro_batch_schedule import UpdatePlan
from streamrl.buffer.run_log import TrainedStep
from streamrl.buffer.staleness_credits import MAX_FACTOR, OversamplingController
from streamrl.dataflow import EMA_REFERENCE, GENERATE_CALL, POLICY, CallKind, Dataflow
from streamrl.engines.memory.gc_paused import pause_gc
from streamrl.engines.trainer_config import ReferenceConfig
from streamrl.errors import ConfigError
from streamrl.pipeline import admit_prompts, train_policy
from streamrl.placement.placements import MAX_STALENESS, Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.problem.workload import Workload
from streamrl.planner.simulator.replicas import (
    TRAINER_PHASE,
    DeviceLeases,
    GeneratorPool,
    SimulatedGenerator,
    SimulatedScorer,
    SimulatedTrainer,
    SimulatedWeightRegistry,
    SimulationContext,
    publish_reference,
)
from streamrl.planner.simulator.results import SimulationResult, name_processes
from streamrl.planner.simulator.simulated_prompts import CompletionLengths, SimulatedPrompts
from streamrl.planner.simulator.simulated_queue import SimulatedQueue
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import DeviceLease, StageContext, StepResult
from streamrl.stream.run_state import PipelineConfig, RunState
from streamrl.stream.weight_publisher import PublishFunction, WeightPublisher, is_publish_due
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightManifest


@dataclass(frozen=True)
class SimulationScenario:
    """Inputs of a simulation: run, placement, timings, number of steps and seed."""

    dataflow: Dataflow
    placement: Placement
    timings: StageTimings
    workload: Workload
    steps: int
    seed: int
    run_options: RunOptions

    @property
    def pace(self) -> UpdatePlan:
        """When a step's micro-batches may start, and how many updates and epochs the step has.

        A step waits for all its groups if a call needs the whole step or if it has several updates.
        """
        workload = self.workload
        has_several_updates = workload.num_updates > 1
        waits_for_step = has_several_updates or workload.requires_whole_step
        return UpdatePlan(
            waits_for_step, workload.epochs, min(workload.mini_batches, workload.groups_per_step)
        )

    @property
    def pipeline_config(self) -> PipelineConfig:
        """Section `pipeline` of the simulated run's config.

        `stall_s` is infinite because virtual time can jump.
        """
        return PipelineConfig(
            max_staleness=self.placement.max_staleness,
            depth=self.run_options.depth,
            on_stale=self.run_options.on_stale,
            groups_per_step=self.workload.groups_per_step,
            micro_batch_tokens=self.workload.micro_batch_tokens,
            stall_s=math.inf,
        )

    @property
    def reference_config(self) -> ReferenceConfig:
        return ReferenceConfig(every=self.run_options.reference_every)

    @property
    def replica_counts(self) -> dict[str, int]:
        timings = self.timings
        counts = {}
        for role, calls in self.dataflow.calls_by_role.items():
            if calls[0].kind is CallKind.GENERATE:
                counts[role] = timings.generator.replicas
            elif calls[0].kind is CallKind.SCORE:
                counts[role] = timings.score[calls[0].stage].replicas
        return counts

    def estimate_publish_s(self, role: str) -> float:
        followers = [call.stage for call in self.dataflow.calls if call.followed_role == role]
        weights = self.timings.weights
        return max((weights[s].publish_s for s in followers if s in weights), default=0.0)

    def is_publish_due(self, role: str, version: int) -> bool:
        """Return whether a role's version is published; the version of the last step always is."""
        return is_publish_due(
            role,
            version,
            every=self.run_options.publish_every,
            reference=self.reference_config,
            forced=version == self.steps,
        )

    @property
    def is_colocated(self) -> bool:
        calls = self.placement.assignments
        trained = [
            call for call in self.dataflow.select_calls(CallKind.TRAIN) if call.role == POLICY
        ]
        stages = (GENERATE_CALL.stage, *(call.stage for call in trained))
        return len({calls[stage].mesh if stage in calls else None for stage in stages}) == 1


class SimulatedRunLog(RunLog):
    """Run log with a real ledger and no journal; recording a step takes `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        super().__init__(Ledger(), RecordLog())
        self._step_s = step_s

    async def record_step(self, step: TrainedStep) -> None:
        """Count a trained step in the ledger, after `step_s`."""
        await asyncio.sleep(self._step_s)
        for group in step.groups:
            self.ledger.mark_trained(group.uid)


class SimulatedRun:
    """A simulated run of a scenario.

    on_step: called when a step has ended.
    """

    def __init__(self, scenario: SimulationScenario, on_step: Callable[[], None]) -> None:
        """Prepare the run; requires a running event loop."""
        self.scenario = scenario
        self._on_step = on_step
        self.outcomes: list[StepResult] = []
        self.step_ends: list[float] = []
        dataflow, timings = scenario.dataflow, scenario.timings
        self.process_names = name_processes(dataflow, scenario.replica_counts)
        self.queue = SimulatedQueue(
            dataflow,
            hop_s=timings.hop_s,
        )
        self.context = SimulationContext(
            timings,
            self.queue,
            DeviceLeases(dataflow, scenario.placement, slice_s=scenario.run_options.slice_s),
            CompletionLengths(scenario.workload, scenario.seed),
            {},
            scenario.reference_config,
            {},
        )
        self._clock = asyncio.get_running_loop()

    async def run(self) -> None:
        """Start trainers, replicas and control loops; return once the last step has ended."""
        scenario = self.scenario
        lease = self.context.leases.make_lease(POLICY, TRAINER_PHASE) or DedicatedDeviceLease()
        trainers = self._make_trainers()
        sources: dict[str, PublishFunction] = {
            role: trainer.publish_weights for role, trainer in trainers.items()
        }
        if any(call.followed_role == EMA_REFERENCE for call in scenario.dataflow.calls):
            publish_s = scenario.estimate_publish_s(EMA_REFERENCE)
            sources[EMA_REFERENCE] = partial(publish_reference, publish_s)
        registries = {role: SimulatedWeightRegistry() for role in sources}
        self.context.registries = registries
        # Colocated generators read weights in the trainer's process: publishing needs no lease.
        lease_to_read = None if scenario.is_colocated else lease
        control = self._make_control(
            WeightPublisher(sources, registries, due=scenario.is_publish_due, lease=lease_to_read)
        )
        for registry in registries.values():
            registry.add_manifest(WeightManifest(0, (), ()))
        self._start_replicas(trainers)
        await self._train(control, trainers, lease)

    def _start_replicas(self, trainers: Mapping[str, SimulatedTrainer]) -> None:
        pool = GeneratorPool(GENERATE_CALL.role, self.context)
        for role, names in self.process_names.items():
            calls = self.scenario.dataflow.calls_by_role[role]
            for name in names if role not in trainers else ():
                if calls[0].kind is CallKind.GENERATE:
                    SimulatedGenerator(name, calls, self.context, pool).start()
                else:
                    SimulatedScorer(name, calls, self.context).start()

    def _make_control(self, publisher: WeightPublisher) -> RunState:
        scenario, run_log = self.scenario, SimulatedRunLog(self.scenario.timings.step_s)
        config, per_step = scenario.pipeline_config, scenario.workload.groups_per_step
        factor = scenario.run_options.oversample
        oversampling = OversamplingController(factor, groups_per_step=per_step)
        max_oversampling = MAX_FACTOR if factor is None else factor
        admission = AdmissionController(
            run_log.ledger,
            depth=config.max_steps_ahead,
            groups_per_step=per_step,
            capacity_groups=math.ceil(max_oversampling * (config.max_steps_ahead + 1) * per_step),
            total_groups=scenario.steps * per_step,
            version=0,
            oversampling=oversampling,
        )
        assembler = StepAssembler(
            max_staleness=config.max_staleness,
            groups_per_step=per_step,
            drops_stale=config.on_stale == "drop",
            oversampling=oversampling,
        )
        settings = AlgorithmConfig().to_settings(max_length=1, reward_weights={})
        adaptive_params = AdaptiveParams(ALGORITHMS["grpo"], settings)
        return RunState(
            admission, assembler, run_log, publisher, adaptive_params, SimulatedPrompts()
        )

    def _make_trainers(self) -> dict[str, SimulatedTrainer]:
        scenario, context = self.scenario, self.context
        locks = self._make_device_locks()
        return {
            call.role: SimulatedTrainer(
                scenario.timings.train[call.role],
                scenario.pace,
                publish_s=scenario.estimate_publish_s(call.role),
                completions=context.completions,
                recorder=context.get_recorder(call.role),
                devices=locks.get(call.role),
            )
            for call in scenario.dataflow.select_calls(CallKind.TRAIN)
        }

    def _make_device_locks(self) -> Mapping[str, asyncio.Lock]:
        """Return a lock by trained role; trained models whose devices overlap share a lock."""
        calls = self.scenario.dataflow.select_calls(CallKind.TRAIN)
        placement = self.scenario.placement
        locks: dict[str, asyncio.Lock] = {}
        for i, call in enumerate(calls):
            lock = locks.setdefault(call.role, asyncio.Lock())
            for other in calls[:i]:
                if placement.overlaps(call.stage, other.stage):
                    other_lock = locks[other.role]
                    locks = {
                        role: lock if held_lock is other_lock else held_lock
                        for role, held_lock in locks.items()
                    }
        return locks

    async def _train(
        self, control: RunState, trainers: Mapping[str, SimulatedTrainer], lease: DeviceLease
    ) -> None:
        queue = cast(ExperienceQueue, self.queue)
        stage = next(
            c.stage for c in self.scenario.dataflow.queue_calls if c.kind is CallKind.TRAIN
        )
        recorder = SpanRecorder("train-loop", self._clock.time)
        admission = asyncio.create_task(admit_prompts(control, queue, wait_s=math.inf))
        try:
            await train_policy(
                StageContext(stage, queue, lease, recorder),
                control,
                trainers,
                self.scenario.pipeline_config,
                report=self._record_outcome,
            )
        finally:
            admission.cancel()

    async def _record_outcome(self, outcome: StepResult) -> None:
        self.outcomes.append(outcome)
        self.step_ends.append(self._clock.time())
        self._on_step()


def run_simulation(  # noqa: PLR0913
    dataflow: Dataflow,
    placement: Placement,
    timings: StageTimings,
    workload: Workload,
    *,
    steps: int,
    seed: int,
    run_options: RunOptions | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> SimulationResult:
    """Simulate a run of `steps` training steps under a placement. Equal seeds give equal results.

    on_step: called when a step has ended. Raises ConfigError if the longest
    completion fits neither a micro-batch nor the KV cache of a generator.
    """
    run_options = run_options or RunOptions()
    check_workload(workload, timings)
    if not placement.is_streamed:
        raise ConfigError("placement.streamed=false: a run streams the groups of a step")
    lead = run_options.get_max_steps_ahead(placement.max_staleness)
    if lead > MAX_STALENESS:
        raise ConfigError(f"depth={lead}: must be at most {MAX_STALENESS} steps ahead")
    if run_options.publish_every > lead + 1:
        raise ConfigError(
            f"publish_every={run_options.publish_every}: must be at most {lead + 1}: generation"
            f" runs {lead} steps ahead and would wait forever for an unpublished version"
        )
    scenario = SimulationScenario(dataflow, placement, timings, workload, steps, seed, run_options)
    with pause_gc():
        return run_virtual(_simulate_scenario(scenario, on_step), polls=False)


def check_workload(workload: Workload, timings: StageTimings) -> None:
    """Raise ConfigError if the longest rollout exceeds a micro-batch or the KV cache."""
    workload.check_micro_batch_tokens()
    longest = workload.rounded_prompt_tokens + workload.lengths.max_tokens
    if timings.generator.kv_tokens < longest:
        raise ConfigError(
            f"timings.generator.kv_tokens={timings.generator.kv_tokens:g}: must be at least"
            f" {longest}, the tokens of a prompt and its longest completion"
        )


async def _simulate_scenario(
    scenario: SimulationScenario, on_step: Callable[[], None]
) -> SimulationResult:
    """Run a scenario on this event loop; exclude the first and last steps from the means."""
    run = SimulatedRun(scenario, on_step)
    await run.run()
    lead = scenario.pipeline_config.max_steps_ahead
    result = SimulationResult(
        dataflow=scenario.dataflow,
        outcomes=run.outcomes,
        step_ends=run.step_ends,
        spans_by_process={
            process: recorder.list_spans() for process, recorder in run.context.recorders.items()
        },
        process_names=run.process_names,
        warm_up_steps=0,
    )
    warm_up = lead + 1 + scenario.steps // 10
    counted_steps = scenario.steps - warm_up - lead
    return result.exclude_steps(
        scenario.steps - lead - scenario.run_options.round_to_publish_every(counted_steps), lead
    )
