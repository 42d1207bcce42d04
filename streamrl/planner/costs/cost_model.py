"""Cost model: predicts seconds and bytes of a placement from shapes, devices and cost constants."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from streamrl.dataflow import (
    EMA_REFERENCE,
    GENERATE_CALL,
    POLICY,
    REWARD_ROLES,
    CallKind,
    ModelCall,
)
from streamrl.engines.memory.training_memory import DTYPE_BYTES
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.engines.models.model_shapes import ModelShape
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.call_cost import SHARDS_PARAMETERS, CallCost, count_stage_params
from streamrl.planner.costs.call_durations import score_duration_s, train_duration
from streamrl.planner.costs.call_timings import (
    estimate_generator_timing,
    estimate_score_timing,
    estimate_train_timing,
)
from streamrl.planner.costs.constants import COLUMN_BYTES, CostConstants
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.costs.memory import (
    CallFootprint,
    DeviceMemory,
    compute_rollout_kv_bytes,
    compute_scorer_memory,
    compute_serving_weight_bytes,
    compute_usable_bytes,
    estimate_host_bytes,
    estimate_library_bytes,
    estimate_state_offload_s,
    estimate_trainer_memory,
    estimate_weight_load_s,
    score_active_bytes,
    train_memory,
)
from streamrl.planner.costs.traffic import WeightTraffic
from streamrl.planner.problem.problem import CallMemory, PlacementProblem
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import Workload
from streamrl.weights.config import AUTO, COLLECTIVE, OBJECT_STORE, SHARED_MEMORY


class CostModel:
    """Predicted costs of the calls of a placement problem; caches results per call and assignment.

    `predict_memory` and `explain_infeasible` also accept a placement of some of the calls.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        constants: CostConstants | None = None,
        *,
        explain_refusal: Callable[[Placement], str] = lambda _placement: "",
    ) -> None:
        """Describe the costs of a problem.

        explain_refusal: why a run refuses a placement that fits, in a line, or "".
        """
        self.problem = problem
        self.constants = constants or CostConstants.from_cluster(problem.cluster)
        self.explain_refusal = explain_refusal
        self._role_constants = {
            role: replace(self.constants, score_tokens=tokens)
            for role, tokens in problem.score_tokens.items()
        }
        run = problem.run_memory
        if run is not None and run.generator.dtype != "auto":
            itemsize = DTYPE_BYTES[run.generator.dtype]
            changed = replace(self.constants, served_bytes=itemsize, kv_bytes=itemsize)
            self._role_constants[GENERATE_CALL.role] = changed
        self._traffic = WeightTraffic(problem.cluster, self.constants)
        self._call_by_stage = {call.stage: call for call in problem.dataflow.ordered_calls}
        self._generate_stage = problem.dataflow.select_calls(CallKind.GENERATE)[0].stage
        self._train_stage_by_role = {
            call.role: call.stage for call in problem.dataflow.select_calls(CallKind.TRAIN)
        }
        self._host_roles = {
            call.stage: role
            for call in problem.dataflow.ordered_calls
            if (role := problem.hosts.get(call.role))
        }
        self._model_shapes = {stage: problem.find_model(stage) for stage in self._call_by_stage}
        self._call_cost = cache(self._make_call_cost)
        self._score_timing = cache(self._compute_score_timing)
        self._train_timing = cache(self._compute_train_timing)
        self._weights_timing = cache(self._compute_weights_timing)
        self._generation_model = cache(
            lambda stage: GenerationModel(self._call_workload(stage).sampled_workload)
        )
        self.call_duration_s = cache(self._compute_call_duration)
        self._call_footprint = cache(self._compute_footprint)
        self._find_misfit = cache(self._compute_misfit)

    def predict_timings(self, placement: Placement) -> StageTimings:
        """Return the timings of all stages of a feasible placement.

        For an infeasible placement the result is undefined; ValueError is possible.
        """
        score: dict[str, ScoreTiming] = {}
        train: dict[str, TrainTiming] = {}
        for stage, call in self._call_by_stage.items():
            if call.kind is CallKind.SCORE:
                assignment = placement.assignments.get(stage)
                score[stage] = self._score_timing(
                    stage,
                    assignment,
                    offload_idle=self._is_offloaded_when_idle(stage, placement),
                    is_hosted=self._is_hosted(stage, placement),
                )
            elif call.kind is CallKind.TRAIN:
                train[call.role] = self._train_timing(
                    stage,
                    placement.assignments[stage],
                    offload_idle=self._is_offloaded_when_idle(stage, placement),
                )
        transport = self._choose_transport(placement)
        return StageTimings(
            self.predict_generator_timing(
                placement.assignments[self._generate_stage],
                self.compute_kv_capacity_bytes(placement),
            ),
            score,
            train,
            weights={
                stage: WeightsTiming()
                if self._is_hosted(stage, placement)
                else self._weights_timing(
                    stage, placement.assignments[source], assignment, transport
                )
                for stage, call in self._call_by_stage.items()
                if (assignment := placement.assignments.get(stage))
                and (source := self._find_source_stage(call))
            },
            hop_s=self._estimate_hop_s(),
            step_s=self.constants.between_steps_s,
        )

    def predict_generator_timing(
        self, assignment: CallAssignment, kv_bytes: float
    ) -> GeneratorTiming:
        """Return the timing of a generator with `kv_bytes` of KV cache on each device."""
        return estimate_generator_timing(
            self._call_cost(self._generate_stage, assignment), kv_bytes
        )

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        return self._build_device_memory(placement).compute_memory_by_stage()

    def explain_infeasible(self, placement: Placement) -> str:
        """Return why a placement does not fit or a run refuses it, in a line; empty if feasible."""
        return self.explain_misfit(placement) or self.explain_refusal(placement)

    def explain_misfit(self, placement: Placement) -> str:
        """Return why a placement does not fit, in a line, or "".

        A dimension of a model does not divide, replicas outnumber rollouts, or memory is short.
        """
        for stage, assignment in placement.assignments.items():
            if wrong := self._find_misfit(stage, assignment) or self._find_homeless(
                stage, placement
            ):
                return wrong
        return self._build_device_memory(placement).explain_infeasible()

    def _is_hosted(self, stage: str, placement: Placement) -> bool:
        """Return whether the ranks of a trained model also compute this scoring call."""
        host = placement.assignments.get(
            self._train_stage_by_role.get(self._host_roles.get(stage, ""), "")
        )
        return host is not None and host.mesh == placement.assignments[stage].mesh

    def _find_homeless(self, stage: str, placement: Placement) -> str:
        """Return why a call cannot share devices with the trained model it belongs to, or ""."""
        role, call = self._host_roles.get(stage), placement.assignments[stage]
        host = placement.assignments.get(self._train_stage_by_role.get(role or "", ""))
        if host is None or not host.mesh.overlaps(call.mesh):
            return ""
        layouts = {(item.mesh, item.grid, item.zero_stage) for item in (host, call)}
        return f"{stage} on {call}: the ranks of {role} compute it, {host}" * (len(layouts) > 1)

    def compute_kv_capacity_bytes(self, placement: Placement) -> float:
        """Return the KV cache's bytes on each generating device: as the run sets, or what is free.

        The placement may be partial, as long as it has devices for generation.
        """
        memory = self._build_device_memory(placement)
        set_kv = self.problem.kv_cache_bytes
        return set_kv or memory.compute_kv_capacity_bytes(self._generate_stage)

    def compute_kv_cache_bytes(self, placement: Placement) -> float:
        return self._build_device_memory(placement).compute_kv_cache_bytes(self._generate_stage)

    def _compute_call_duration(self, stage: str, assignment: CallAssignment) -> float:
        """Return the seconds of a stage's work for a step, with no other stage on its devices.

        The result is inf if the call does not fit.
        """
        free_bytes = self._free_bytes_alone(stage, assignment)
        if free_bytes is None:
            return math.inf
        call, cost = self._call_by_stage[stage], self._call_cost(stage, assignment)
        if call.kind is CallKind.GENERATE:
            timing = estimate_generator_timing(cost, free_bytes)
            return self._generation_model(stage).find_completions_s(timing, (1.0,))[0]
        if call.kind is CallKind.SCORE:
            score_timing = self._score_timing(
                stage, assignment, is_hosted=self._host_roles.get(stage) == POLICY
            )
            return score_duration_s(score_timing, cost.workload, cost.workload.group_size)
        train_timing = self._train_timing(stage, assignment)
        return train_duration(train_timing, cost.workload).total_s + train_timing.step_s

    def _free_bytes_alone(self, stage: str, assignment: CallAssignment) -> float | None:
        """Return the bytes left on devices without other calls; None if the call does not fit."""
        if self._find_misfit(stage, assignment):
            return None
        is_hosted = self._host_roles.get(stage) == POLICY
        footprint = self._call_footprint(
            stage, assignment, None, offload_idle=False, is_hosted=is_hosted
        )
        free_bytes = self._find_min_usable_bytes(assignment) - footprint.memory.resident_bytes
        mesh, cluster = assignment.mesh, self.problem.cluster
        host_bytes = cluster.find_node_group(mesh.first).node_host_bytes
        if footprint.host.sum_on_node(mesh, cluster) > host_bytes:
            return None
        return (
            None
            if free_bytes < max(footprint.memory.active_bytes, footprint.min_kv_bytes)
            else free_bytes
        )

    def _find_min_usable_bytes(self, assignment: CallAssignment) -> float:
        groups = assignment.mesh.find_node_groups(self.problem.cluster)
        return compute_usable_bytes(min(g.device.memory_bytes for g in groups), self.constants)

    def _compute_misfit(self, stage: str, assignment: CallAssignment) -> str:
        """Return why a stage cannot run on its rank grid; empty if it can.

        A dimension of the model does not divide, replicas outnumber rollouts, or the settings of
        the run's trainer forbid it.
        """
        grid, workload = assignment.grid, self._call_workload(stage)
        call = self._call_by_stage[stage]
        try:
            count_stage_params(
                self._get_model_shape(stage), grid.pp_size, grid.tp_size, assignment.ep_size
            )
        except ValueError as error:
            return f"{stage} as {grid}: {error}"
        rollouts = workload.num_rollouts
        if call.kind is CallKind.TRAIN:
            rollouts //= workload.mini_batches
        if grid.dp_size > rollouts:
            return f"{stage} as {grid}: {grid.dp_size} replicas for {rollouts} rollouts"
        if (run := self.problem.run_memory) is not None and call.kind is CallKind.TRAIN:
            try:
                _size_trainer(run.trainers[call.role], assignment)
            except ConfigError as error:
                return f"{stage} as {grid}: {error}"
        return ""

    def _get_model_shape(self, stage: str) -> ModelShape:
        shape = self._model_shapes[stage]
        assert shape is not None, f"{stage} has devices and no model"
        return shape

    def _call_workload(self, stage: str) -> Workload:
        """Return the workload of a stage; greedy rollouts are one per prompt."""
        call, workload = self._call_by_stage[stage], self.problem.workload
        if "greedy_ids" in (*call.needs, *call.produces):
            return replace(workload, group_size=1)
        return workload

    def _make_call_cost(
        self, stage: str, assignment: CallAssignment, *, is_hosted: bool = False
    ) -> CallCost:
        run, call = self.problem.run_memory, self._call_by_stage[stage]
        constants, trainer = self._role_constants.get(call.role, self.constants), None
        if run is not None and (is_hosted or call.kind is CallKind.TRAIN):
            role = self._host_roles[stage] if is_hosted else call.role
            trainer = _size_trainer(run.trainers[role], assignment)
            tokens = constants.score_tokens // trainer.sequence_parallel
            recompute = bool(trainer.gradient_checkpointing)
            constants = replace(constants, recompute=recompute, score_tokens=tokens)
        if run and call.role in REWARD_ROLES and assignment.zero_stage >= SHARDS_PARAMETERS:
            # The ranks of a reward model share the rows of a batch; a rank has at least one.
            share = constants.score_tokens * assignment.copies // assignment.grid.dp_size
            longest = self.problem.workload.max_rollout_tokens
            constants = replace(constants, score_tokens=max(share, longest))
        return CallCost(
            self._get_model_shape(stage),
            assignment,
            self._call_workload(stage),
            self.problem.cluster,
            constants,
            run,
            trainer,
            # As `ModelRank.compute_columns`; reward models batch the rows of all groups.
            self.problem.cluster.is_cpu
            and run is not None
            and call.kind is CallKind.SCORE
            and call.role not in REWARD_ROLES,
        )

    def _compute_score_timing(
        self,
        stage: str,
        assignment: CallAssignment | None,
        *,
        offload_idle: bool = False,
        is_hosted: bool = False,
    ) -> ScoreTiming:
        if assignment is None:
            group_s, rollout_s = self.constants.rule_group_s, self.constants.rule_rollout_s
            return ScoreTiming(1, batch=1, batch_s=group_s, rollout_s=rollout_s, token_s=0.0)
        cost = self._call_cost(stage, assignment, is_hosted=is_hosted)
        # A follower gets its weights from the trainer.
        loads_weights = offload_idle and not self._find_source_stage(self._call_by_stage[stage])
        return estimate_score_timing(cost, estimate_weight_load_s(cost) if loads_weights else 0.0)

    def _compute_train_timing(
        self, stage: str, assignment: CallAssignment, *, offload_idle: bool = False
    ) -> TrainTiming:
        cost = self._call_cost(stage, assignment)
        return estimate_train_timing(cost, estimate_state_offload_s(cost) if offload_idle else 0.0)

    def _is_offloaded_when_idle(self, stage: str, placement: Placement) -> bool:
        """Return whether a stage shares devices with another role, and offloading is on."""
        if not (self.constants.offloads_optimizer or self.constants.offloads_weights):
            return False
        role = self._call_by_stage[stage].role
        return any(
            self._call_by_stage[other].role != role and placement.overlaps(stage, other)
            for other in placement.assignments
        )

    def _find_source_stage(self, call: ModelCall) -> str:
        """Return the stage that trains the model a call follows; empty if it is fixed."""
        return self._train_stage_by_role.get(
            POLICY if call.followed_role == EMA_REFERENCE else call.followed_role, ""
        )

    def _choose_transport(self, placement: Placement) -> str:
        """Return the transport between separate GPUs of a run, as a run chooses; else ""."""
        run, cluster = self.problem.run_memory, self.problem.cluster
        if run is None or cluster.is_cpu:
            return ""
        if run.transport != AUTO or cluster.num_nodes == 1:
            return SHARED_MEMORY if run.transport == AUTO else run.transport
        calls = placement.assignments
        own = [stage for stage in calls if not self._is_hosted(stage, placement)]
        meshes = {calls[stage].mesh for stage in own}
        roles = {self._call_by_stage[stage].role for stage in own}
        is_shared = len(meshes) < len(roles) or any(
            a != b and a.overlaps(b) for a in meshes for b in meshes
        )
        return OBJECT_STORE if is_shared else COLLECTIVE

    def _compute_weights_timing(
        self, stage: str, source: CallAssignment, target: CallAssignment, transport: str
    ) -> WeightsTiming:
        constants, shape = self.constants, self._get_model_shape(stage)
        if transport and not shape.adapter_params and not source.mesh.overlaps(target.mesh):
            timing = self._traffic.estimate_run_pull(shape, source, target, transport)
            return WeightsTiming(
                timing.publish_s + constants.publish_s,
                timing.pull_s + constants.pull_s,
                timing.pause_s + constants.pull_s * constants.pause_fraction,
            )
        transfer = self._traffic.estimate_transfer(shape, source, target)
        if source.mesh.overlaps(target.mesh):
            # On shared devices the follower computes nothing during the whole transfer.
            switch_s = transfer.seconds + constants.switch_s
            return WeightsTiming(0.0, switch_s, switch_s)
        pull_s = transfer.seconds + constants.pull_s
        return WeightsTiming(constants.publish_s, pull_s, pull_s * constants.pause_fraction)

    def _estimate_hop_s(self) -> float:
        """Return a fixed latency, and the transfer time of a group's columns over the network."""
        workload, constants = self.problem.workload, self.constants
        num_bytes = workload.group_size * workload.rollout_tokens * COLUMN_BYTES
        network = min(group.node_bytes_per_s for group in self.problem.cluster.node_groups)
        return constants.hop_s + num_bytes / (network * constants.network_fraction)

    def _build_device_memory(self, placement: Placement) -> DeviceMemory:
        footprints = {}
        for stage, assignment in placement.assignments.items():
            source = self._find_source_stage(self._call_by_stage[stage])
            if stage == self._train_stage_by_role[POLICY]:
                source = self._generate_stage
            partner = placement.assignments.get(source)
            partner = partner if partner and partner.mesh == assignment.mesh else None
            offload_idle = self._is_offloaded_when_idle(stage, placement)
            footprints[stage] = self._call_footprint(
                stage,
                assignment,
                partner,
                offload_idle=offload_idle,
                is_hosted=self._is_hosted(stage, placement),
            )
        return DeviceMemory(
            placement,
            footprints,
            self.problem.cluster,
            self.constants,
            keeps_kv=self.problem.run_memory is not None,
        )

    def _estimate_worker(
        self, stage: str, assignment: CallAssignment, served: CallAssignment
    ) -> WorkerMemory:
        """Return the memory of a trainer rank that also generates; stage: the trainer's."""
        cost, run = self._call_cost(stage, assignment), self.problem.run_memory
        assert run is not None and cost.trainer is not None
        generator = replace(run.generator, tensor_parallel=served.grid.tp_size)
        return estimate_trainer_memory(cost, cost.trainer, generator)

    def _compute_footprint(
        self,
        stage: str,
        assignment: CallAssignment,
        partner: CallAssignment | None,
        *,
        offload_idle: bool,
        is_hosted: bool,
    ) -> CallFootprint:
        """Return the memory needs of a call on each of its devices.

        partner: assignment of the trainer that the call follows, or of the generator that follows
        this trainer, if both share a mesh. is_hosted: the trainer's ranks compute the call.
        """
        call = self._call_by_stage[stage]
        cost = self._call_cost(stage, assignment, is_hosted=is_hosted)
        weights, is_run = f"{call.role} {assignment}", cost.run_memory is not None
        is_in_trainer = is_hosted or (call.kind is CallKind.GENERATE and partner is not None)
        host = estimate_host_bytes(cost, call.kind, is_in_trainer=is_in_trainer)
        if call.kind is CallKind.TRAIN:
            memory = train_memory(cost, offload_idle=offload_idle)
            if partner is not None and is_run:
                update = self._estimate_worker(stage, assignment, partner).update_buffers
                memory = replace(memory, active_bytes=max(memory.active_bytes, update))
            return CallFootprint(call.kind, memory, f"{weights} trained", host=host)
        memory = CallMemory(compute_serving_weight_bytes(cost), 0.0)
        if partner is not None and not is_run:
            # The weights alias the trainer's memory where layouts coincide; the rest is filled with
            # each version. Scorers of a run hold a copy.
            transfer = self._traffic.estimate_transfer(cost.shape, partner, assignment)
            memory = CallMemory(0.0, float(transfer.extra_bytes))
        elif partner is not None and call.kind is CallKind.GENERATE:
            worker = self._estimate_worker(self._find_source_stage(call), partner, assignment)
            memory = CallMemory(worker.serving_weights, 0.0)
        libraries = estimate_library_bytes(cost, call.kind, is_in_trainer=is_in_trainer)
        if call.kind is CallKind.SCORE:
            if is_run:
                memory = compute_scorer_memory(cost)
                memory = replace(memory, resident_bytes=0.0) if is_hosted else memory
            elif offload_idle and self.constants.offloads_weights:
                memory = CallMemory(0.0, memory.peak_bytes)
            active = memory.active_bytes + score_active_bytes(cost)
            memory = CallMemory(memory.resident_bytes + libraries, active)
            return CallFootprint(call.kind, memory, weights, host=host)
        memory = replace(memory, resident_bytes=memory.resident_bytes + libraries)
        workload, set_kv = cost.workload, self.problem.kv_cache_bytes
        least_kv = compute_rollout_kv_bytes(cost, workload.max_rollout_tokens)
        replica_rollouts = math.ceil(workload.sampled_workload.num_rollouts / cost.dp_size)
        return CallFootprint(
            call.kind,
            memory,
            weights,
            max(set_kv, least_kv),
            set_kv or replica_rollouts * least_kv,
            set_kv or self.constants.max_running * least_kv,
            host,
        )


def _size_trainer(trainer: TrainerConfig, assignment: CallAssignment) -> TrainerConfig:
    """Return the settings of a trainer for an assignment, or raise ConfigError."""
    return replace(trainer, **make_trainer_sizes(trainer, assignment))


def make_trainer_sizes(trainer: TrainerConfig, assignment: CallAssignment) -> dict[str, Any]:
    """Return the changed settings of a trainer with an assignment's devices and parallelism."""
    tp_size = assignment.grid.tp_size
    return {
        "world_size": assignment.mesh.size,
        "tensor_parallel": tp_size,
        "zero_stage": assignment.zero_stage,
        "backend": "torch" if tp_size > 1 else trainer.backend,
        "offload_optimizer": trainer.offload_optimizer or assignment.is_offloaded,
        "gradient_checkpointing": assignment.checkpointing or trainer.gradient_checkpointing,
    }
