"""Simulation of a placement in virtual time.

It runs the real admission and training loops, the real `RunState` with its admission control,
ledger, step assembly and weight publisher, the real micro-batch schedule and the real device
arbiter. Computation and transfers are replaced by timers.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulated_prompts import CompletionLengths, SimulatedPrompts
from streamrl.planner.simulator.simulated_queue import SimulatedQueue
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import DeviceLease, StageContext, StepResult
from streamrl.stream.run_state import PipelineConfig, RunState
from streamrl.stream.weight_publisher import PublishFunction, WeightPublisher, is_publish_due
from streamrl.weights import WeightManifest


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


@dataclass
class SimulatedRun:
    """A simulated run of `steps` steps.

    on_step: called when a step has ended.
    """

    dataflow: Dataflow
    placement: Placement
    timings: StageTimings
    workload: Workload
    steps: int
    seed: int
    run_options: RunOptions
    on_step: Callable[[], None]
    outcomes: list[StepResult] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reference = ReferenceConfig(every=self.run_options.reference_every)
        # `stall_s` is infinite because virtual time can jump.
        self._config = PipelineConfig(
            max_staleness=self.placement.max_staleness,
            depth=self.run_options.depth,
            on_stale=self.run_options.on_stale,
            groups_per_step=self.workload.groups_per_step,
            micro_batch_tokens=self.workload.micro_batch_tokens,
            stall_s=math.inf,
        )
        trained = self.dataflow.select_calls(CallKind.TRAIN)
        self._train_stage = next(call.stage for call in trained if call.role == POLICY)

    async def play(self) -> SimulationResult:
        """Start trainers, replicas and control loops; return the result after the last step.

        The first and the last steps are left out of the means.
        """
        context = SimulationContext(
            self.timings,
            SimulatedQueue(self.dataflow, hop_s=self.timings.hop_s),
            DeviceLeases(self.dataflow, self.placement, slice_s=self.run_options.slice_s),
            CompletionLengths(self.workload, self.seed),
            {},
            self._reference,
            {},
        )
        process_names = self._name_processes()
        lease = context.leases.make_lease(POLICY, TRAINER_PHASE) or DedicatedDeviceLease()
        trainers = self._make_trainers(context)
        sources: dict[str, PublishFunction] = {
            role: trainer.publish_weights for role, trainer in trainers.items()
        }
        if any(call.followed_role == EMA_REFERENCE for call in self.dataflow.calls):
            publish_s = self._estimate_publish_s(EMA_REFERENCE)
            sources[EMA_REFERENCE] = partial(publish_reference, publish_s)
        registries = {role: SimulatedWeightRegistry() for role in sources}
        context.registries = registries
        # Colocated generators read weights in the trainer's process: publishing needs no lease.
        lease_to_read = None if self._is_colocated else lease
        publisher = WeightPublisher(
            sources, registries, due=self._is_publish_due, lease=lease_to_read
        )
        for registry in registries.values():
            registry.add_manifest(WeightManifest(0, (), ()))
        self._start_replicas(context, process_names)
        await self._train(self._make_control(publisher), trainers, context.queue, lease)
        result = SimulationResult(
            dataflow=self.dataflow,
            outcomes=self.outcomes,
            step_ends=self.step_ends,
            recorders=context.recorders,
            process_names=process_names,
            warm_up_steps=0,
        )
        lead = self._config.max_steps_ahead
        counted_steps = self.steps - (lead + 1 + self.steps // 10) - lead
        return result.exclude_steps(
            self.steps - lead - self.run_options.round_to_publish_every(counted_steps), lead
        )

    def _name_processes(self) -> dict[str, list[str]]:
        """Return process names by role: one per replica, and a single one of a trained model."""
        names = {}
        for role, calls in self.dataflow.calls_by_role.items():
            match calls[0].kind:
                case CallKind.TRAIN:
                    names[role] = [role]
                    continue
                case CallKind.GENERATE:
                    replicas = self.timings.generator.replicas
                case CallKind.SCORE:
                    replicas = self.timings.score[calls[0].stage].replicas
            names[role] = [f"{role}-{i}" for i in range(replicas)]
        return names

    def _estimate_publish_s(self, role: str) -> float:
        followers = [call.stage for call in self.dataflow.calls if call.followed_role == role]
        weights = self.timings.weights
        return max((weights[s].publish_s for s in followers if s in weights), default=0.0)

    def _is_publish_due(self, role: str, version: int) -> bool:
        """Return whether a role's version is published; the version of the last step always is."""
        return is_publish_due(
            role,
            version,
            every=self.run_options.publish_every,
            reference=self._reference,
            forced=version == self.steps,
        )

    @property
    def _is_colocated(self) -> bool:
        calls, stages = self.placement.assignments, (GENERATE_CALL.stage, self._train_stage)
        return len({calls[stage].mesh if stage in calls else None for stage in stages}) == 1

    def _start_replicas(
        self, context: SimulationContext, process_names: Mapping[str, Sequence[str]]
    ) -> None:
        pool = GeneratorPool(GENERATE_CALL.role, context)
        for role, calls in self.dataflow.calls_by_role.items():
            for name in process_names[role]:
                if calls[0].kind is CallKind.GENERATE:
                    SimulatedGenerator(name, calls, context, pool).start()
                elif calls[0].kind is CallKind.SCORE:
                    SimulatedScorer(name, calls, context).start()

    def _make_control(self, publisher: WeightPublisher) -> RunState:
        run_log, config = SimulatedRunLog(self.timings.step_s), self._config
        per_step, factor = config.groups_per_step, self.run_options.oversample
        oversampling = OversamplingController(factor, groups_per_step=per_step)
        max_oversampling = MAX_FACTOR if factor is None else factor
        admission = AdmissionController(
            run_log.ledger,
            depth=config.max_steps_ahead,
            groups_per_step=per_step,
            capacity_groups=math.ceil(max_oversampling * (config.max_steps_ahead + 1) * per_step),
            total_groups=self.steps * per_step,
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

    def _make_trainers(self, context: SimulationContext) -> dict[str, SimulatedTrainer]:
        workload, locks = self.workload, self._make_device_locks()
        # A step waits for all its groups if a call needs the whole step or if it has several
        # updates.
        update_plan = UpdatePlan(
            workload.num_updates > 1 or workload.requires_whole_step,
            workload.epochs,
            min(workload.mini_batches, workload.groups_per_step),
        )
        return {
            call.role: SimulatedTrainer(
                self.timings.train[call.role],
                update_plan,
                publish_s=self._estimate_publish_s(call.role),
                completions=context.completions,
                recorder=context.get_recorder(call.role),
                devices=locks.get(call.role),
            )
            for call in self.dataflow.select_calls(CallKind.TRAIN)
        }

    def _make_device_locks(self) -> Mapping[str, asyncio.Lock]:
        """Return a lock by trained role; trained models whose devices overlap share a lock."""
        calls = self.dataflow.select_calls(CallKind.TRAIN)
        locks: dict[str, asyncio.Lock] = {}
        for i, call in enumerate(calls):
            lock = locks.setdefault(call.role, asyncio.Lock())
            for other in calls[:i]:
                if self.placement.overlaps(call.stage, other.stage):
                    other_lock = locks[other.role]
                    locks = {
                        role: lock if held_lock is other_lock else held_lock
                        for role, held_lock in locks.items()
                    }
        return locks

    async def _train(
        self,
        control: RunState,
        trainers: Mapping[str, SimulatedTrainer],
        simulated_queue: SimulatedQueue,
        lease: DeviceLease,
    ) -> None:
        queue, clock = cast(ExperienceQueue, simulated_queue), asyncio.get_running_loop().time

        async def record_outcome(outcome: StepResult) -> None:
            self.outcomes.append(outcome)
            self.step_ends.append(clock())
            self.on_step()

        admission = asyncio.create_task(admit_prompts(control, queue, wait_s=math.inf))
        try:
            await train_policy(
                StageContext(self._train_stage, queue, lease),
                control,
                trainers,
                self._config,
                report=record_outcome,
            )
        finally:
            admission.cancel()


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
    run = SimulatedRun(dataflow, placement, timings, workload, steps, seed, run_options, on_step)
    with pause_gc():
        return run_virtual(run.play(), polls=False)


def check_workload(workload: Workload, timings: StageTimings) -> None:
    """Raise ConfigError if the longest rollout exceeds a micro-batch or the KV cache."""
    workload.check_micro_batch_tokens()
    longest = workload.rounded_prompt_tokens + workload.lengths.max_tokens
    if timings.generator.kv_tokens < longest:
        raise ConfigError(
            f"timings.generator.kv_tokens={timings.generator.kv_tokens:g}: must be at least"
            f" {longest}, the tokens of a prompt and its longest completion"
        )
