"""The cost model: what a placement takes in seconds and bytes, by shapes, devices and constants."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from streamrl.dataflow import EMA_REFERENCE, POLICY, CallKind, ModelCall
from streamrl.placement.clusters import DeviceSpec
from streamrl.placement.costs.approximate_traffic import ApproximateTraffic
from streamrl.placement.costs.call_cost import CallCost
from streamrl.placement.costs.call_memory import (
    max_score_tokens,
    max_train_tokens,
    rollout_kv_bytes,
    score_active_bytes,
    serving_weight_bytes,
    state_offload_s,
    train_memory,
    usable_bytes,
    weight_load_s,
)
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.device_memory import CallFootprint, DeviceMemory
from streamrl.placement.costs.generate import generator_timing
from streamrl.placement.costs.lora_traffic import LoraTraffic
from streamrl.placement.costs.param_shards import stage_params
from streamrl.placement.costs.score import rule_timing, score_timing
from streamrl.placement.costs.traffic import TransferCost, WeightTraffic
from streamrl.placement.costs.train import train_timing
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import CallMemory, PlacementProblem
from streamrl.placement.stage_timings import ScoreTiming, StageTimings, TrainTiming, WeightsTiming
from streamrl.placement.steady_state.call_durations import (
    GenerationModel,
    choose_cuts,
    score_duration_s,
    train_duration,
)
from streamrl.placement.workload import Workload


class CostModel:
    """Of one problem; keeps what it found for each call on each devices."""

    def __init__(
        self,
        problem: PlacementProblem,
        constants: CostConstants | None = None,
        *,
        traffic: type[WeightTraffic] = WeightTraffic,
    ) -> None:
        self.problem = problem
        self.constants = constants or CostConstants.from_cluster(problem.cluster)
        self.traffic = traffic(problem.cluster, self.constants)
        self._role_constants = {
            role: replace(self.constants, score_tokens=tokens)
            for role, tokens in problem.score_tokens.items()
        }
        self._lora_traffic = LoraTraffic(problem.cluster, self.constants)
        self._call_by_stage = {call.stage: call for call in problem.dataflow.ordered_calls}
        self._generate_stage = problem.dataflow.select_calls(CallKind.GENERATE)[0].stage
        self._train_stage_by_role = {
            call.role: call.stage for call in problem.dataflow.select_calls(CallKind.TRAIN)
        }
        self._model_shapes = {stage: problem.find_model(stage) for stage in self._call_by_stage}
        self._call_costs: dict[tuple[str, CallAssignment], CallCost] = {}
        self._score_timings: dict[tuple[str, CallAssignment, bool], ScoreTiming] = {}
        self._train_timings: dict[tuple[str, CallAssignment, bool], TrainTiming] = {}
        self._call_durations: dict[tuple[str, CallAssignment], float] = {}
        self._generation_models: dict[str, GenerationModel] = {}
        self._footprints: dict[
            tuple[str, CallAssignment, CallAssignment | None, bool], CallFootprint
        ] = {}
        self._weights_timings: dict[tuple[str, CallAssignment, CallAssignment], WeightsTiming] = {}
        self._misfits: dict[tuple[str, CallAssignment], str] = {}

    @cached_property
    def approximate_costs(self) -> "CostModel":
        """The same but for weights on their way, which are worked out by formula."""
        return CostModel(self.problem, self.constants, traffic=ApproximateTraffic)

    def predict_timings(self, placement: Placement) -> StageTimings:
        """How long everything takes. What `unfit` refuses has none: ValueError, or nonsense."""
        score: dict[str, ScoreTiming] = {}
        train: dict[str, TrainTiming] = {}
        for stage, call in self._call_by_stage.items():
            if call.kind is CallKind.SCORE:
                found = placement.assignments.get(stage)
                timing = self._score_timing(
                    stage, found, rests=self._is_offloaded_when_idle(stage, placement)
                )
                score[stage] = timing
            elif call.kind is CallKind.TRAIN:
                train[call.role] = self._train_timing(
                    stage,
                    placement.assignments[stage],
                    rests=self._is_offloaded_when_idle(stage, placement),
                )
        sampling = self._generate_stage
        return StageTimings(
            generator_timing(
                self._call_cost(sampling, placement.assignments[sampling]),
                self.kv_capacity_bytes(placement),
            ),
            score,
            train,
            weights={
                stage: self._weights_timing(call, placement)
                for stage, call in self._call_by_stage.items()
                if stage in placement.assignments and self._source_stage(call)
            },
            hop_s=self._hop_s(),
            step_s=self.constants.between_steps_s,
        )

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        """What each call holds of one of its devices."""
        return self._device_memory(placement).memory_by_stage()

    def explain_infeasible(self, placement: Placement) -> str:
        """Why it cannot be, in one line: what does not divide, or does not fit; empty if it can."""
        for stage, assignment in placement.assignments.items():
            if wrong := self._find_misfit(stage, assignment):
                return wrong
        return self._device_memory(placement).explain_infeasible()

    def call_duration_s(self, stage: str, assignment: CallAssignment) -> float:
        """A whole step's work of a call alone on its devices; infinite if it does not fit."""
        key = (stage, assignment)
        if key not in self._call_durations:
            self._call_durations[key] = self._compute_call_duration(stage, assignment)
        return self._call_durations[key]

    def kv_capacity_bytes(self, placement: Placement) -> float:
        """Bytes for keys and values on each device that samples; of one that need not have all
        calls.
        """
        room = self._device_memory(placement).kv_capacity_bytes(self._generate_stage)
        return min(room, self.problem.kv_cache_bytes or math.inf)

    def kv_cache_bytes(self, placement: Placement) -> float:
        """Of those, the bytes that engines have a use for."""
        return self._device_memory(placement).kv_cache_bytes(self._generate_stage)

    def estimate_transfer(self, stage: str, placement: Placement) -> TransferCost | None:
        """What a version costs on its way to a call; None where it follows nobody."""
        call = self._call_by_stage[stage]
        source = self._source_stage(call)
        if not source:
            return None
        return self._estimate_transfer(
            self._model_shape(stage), placement.assignments[source], placement.assignments[stage]
        )

    def _estimate_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        """By formula where ranks share out experts: no plan has those."""
        if shape.adapter_params:
            return self._lora_traffic.estimate_transfer(shape, source, target)
        is_plain = source.ep_size == 1 and target.ep_size == 1
        return (self.traffic if is_plain else self.approximate_costs.traffic).estimate_transfer(
            shape, source, target
        )

    def first_rollouts_s(self, assignment: CallAssignment) -> float:
        """Of a step's generation alone on its devices, until the first part of it is complete."""
        left = self._free_bytes_alone(self._generate_stage, assignment)
        cuts = choose_cuts(self.problem.workload.groups_per_step)
        return (
            math.inf
            if left is None
            else self._generation_s(self._generate_stage, assignment, left, cuts)
        )

    def _compute_call_duration(self, stage: str, assignment: CallAssignment) -> float:
        left = self._free_bytes_alone(stage, assignment)
        if left is None:
            return math.inf
        call, work = self._call_by_stage[stage], self._call_cost(stage, assignment)
        if call.kind is CallKind.GENERATE:
            return self._generation_s(stage, assignment, left, (1.0,))
        if call.kind is CallKind.SCORE:
            scored = self._score_timing(stage, assignment)
            return score_duration_s(scored, work.workload, work.workload.group_size)
        trained = self._train_timing(stage, assignment)
        return train_duration(trained, work.workload).total_s + trained.step_s

    def _generation_s(
        self, stage: str, assignment: CallAssignment, room: float, cuts: tuple[float, ...]
    ) -> float:
        """Until the first of these parts is complete, with so many bytes for keys and values."""
        work = self._call_cost(stage, assignment)
        if stage not in self._generation_models:
            self._generation_models[stage] = GenerationModel(work.workload.sampled_workload)
        return self._generation_models[stage].find_completions_s(
            generator_timing(work, room), cuts
        )[0]

    def _free_bytes_alone(self, stage: str, assignment: CallAssignment) -> float | None:
        """Bytes left of a device where a call is alone; None where it does not fit."""
        if self._find_misfit(stage, assignment):
            return None
        holder = self._call_footprint(stage, assignment, None, rests=False)
        left = self._min_usable_bytes(assignment) - holder.memory.resident_bytes
        return None if left < max(holder.memory.active_bytes, holder.min_kv_bytes) else left

    def _min_usable_bytes(self, assignment: CallAssignment) -> float:
        devices: list[DeviceSpec] = [
            group.device for group in assignment.mesh.find_node_groups(self.problem.cluster)
        ]
        return usable_bytes(min(device.memory_bytes for device in devices), self.constants)

    def _find_misfit(self, stage: str, assignment: CallAssignment) -> str:
        """What does not divide, or has less work than replicas; empty if all is well."""
        key = (stage, assignment)
        if key not in self._misfits:
            self._misfits[key] = self._compute_misfit(stage, assignment)
        return self._misfits[key]

    def _compute_misfit(self, stage: str, assignment: CallAssignment) -> str:
        grid, workload = assignment.grid, self._call_workload(stage)
        try:
            stage_params(self._model_shape(stage), grid.pp_size, grid.tp_size, assignment.ep_size)
        except ValueError as error:
            return f"{stage} as {grid}: {error}"
        rollouts = workload.num_rollouts
        if self._call_by_stage[stage].kind is CallKind.TRAIN:
            rollouts //= workload.mini_batches
        if grid.dp_size > rollouts:
            return f"{stage} as {grid}: {grid.dp_size} replicas for {rollouts} rollouts"
        return ""

    def _model_shape(self, stage: str) -> ModelShape:
        shape = self._model_shapes[stage]
        assert shape is not None, f"{stage} has devices and no model"
        return shape

    def _call_workload(self, stage: str) -> Workload:
        """A step's work of a call: of what is sampled greedily, one rollout for a prompt."""
        call, workload = self._call_by_stage[stage], self.problem.workload
        if "greedy_ids" in (*call.needs, *call.produces):
            return replace(workload, group_size=1)
        return workload

    def _call_cost(self, stage: str, assignment: CallAssignment) -> CallCost:
        key = (stage, assignment)
        if key not in self._call_costs:
            self._call_costs[key] = CallCost(
                self._model_shape(stage),
                assignment,
                self._call_workload(stage),
                self.problem.cluster,
                self._role_constants.get(self._call_by_stage[stage].role, self.constants),
            )
        return self._call_costs[key]

    def _score_timing(
        self, stage: str, assignment: CallAssignment | None, *, rests: bool = False
    ) -> ScoreTiming:
        if assignment is None:
            return rule_timing(self.constants)
        key = (stage, assignment, rests)
        if key not in self._score_timings:
            work = self._call_cost(stage, assignment)
            # Who follows a trainer gets its weights from there.
            loads = rests and not self._source_stage(self._call_by_stage[stage])
            self._score_timings[key] = score_timing(work, weight_load_s(work) if loads else 0.0)
        return self._score_timings[key]

    def _train_timing(
        self, stage: str, assignment: CallAssignment, *, rests: bool = False
    ) -> TrainTiming:
        key = (stage, assignment, rests)
        if key not in self._train_timings:
            work = self._call_cost(stage, assignment)
            self._train_timings[key] = train_timing(work, state_offload_s(work) if rests else 0.0)
        return self._train_timings[key]

    def _is_offloaded_when_idle(self, stage: str, placement: Placement) -> bool:
        """Whether a call's devices are another role's in turn, and it leaves some of it away."""
        if not (self.constants.offloads_optimizer or self.constants.offloads_weights):
            return False
        role = self._call_by_stage[stage].role
        return any(
            self._call_by_stage[other].role != role and placement.overlaps(stage, other)
            for other in placement.assignments
        )

    def _source_stage(self, call: ModelCall) -> str:
        """The stage that trains what a call follows; empty if it follows nobody."""
        return self._train_stage_by_role.get(
            POLICY if call.followed_role == EMA_REFERENCE else call.followed_role, ""
        )

    def _weights_timing(self, call: ModelCall, placement: Placement) -> WeightsTiming:
        key = (
            call.stage,
            placement.assignments[self._source_stage(call)],
            placement.assignments[call.stage],
        )
        if key not in self._weights_timings:
            self._weights_timings[key] = self._compute_weights_timing(call, placement)
        return self._weights_timings[key]

    def _compute_weights_timing(self, call: ModelCall, placement: Placement) -> WeightsTiming:
        moved, constants = self.estimate_transfer(call.stage, placement), self.constants
        assert moved is not None
        if placement.overlaps(self._source_stage(call), call.stage):
            whole = moved.seconds + constants.switch_s
            return WeightsTiming(0.0, whole, whole)
        pull_s = moved.seconds + constants.pull_s
        return WeightsTiming(constants.publish_s, pull_s, pull_s * constants.pause_fraction)

    def _hop_s(self) -> float:
        """From one stage to the next: a group's columns through a node's network, and the rest."""
        workload, constants = self.problem.workload, self.constants
        num_bytes = workload.group_size * workload.rollout_tokens * constants.column_bytes
        network = min(group.node_bytes_per_s for group in self.problem.cluster.node_groups)
        return constants.hop_s + num_bytes / (network * constants.network_fraction)

    def _device_memory(self, placement: Placement) -> DeviceMemory:
        holders = {}
        for stage, assignment in placement.assignments.items():
            source = placement.assignments.get(self._source_stage(self._call_by_stage[stage]))
            beside = source if source and source.mesh == assignment.mesh else None
            rests = self._is_offloaded_when_idle(stage, placement)
            holders[stage] = self._call_footprint(stage, assignment, beside, rests=rests)
        return DeviceMemory(placement, holders, self.problem.cluster, self.constants)

    def _call_footprint(
        self, stage: str, assignment: CallAssignment, beside: CallAssignment | None, *, rests: bool
    ) -> CallFootprint:
        """A call's; `beside` is who trains what it follows, where it is on the same devices."""
        key = (stage, assignment, beside, rests)
        if key not in self._footprints:
            self._footprints[key] = self._compute_footprint(stage, assignment, beside, rests=rests)
        return self._footprints[key]

    def _compute_footprint(
        self, stage: str, assignment: CallAssignment, beside: CallAssignment | None, *, rests: bool
    ) -> CallFootprint:
        call, work, shape = (
            self._call_by_stage[stage],
            self._call_cost(stage, assignment),
            self._model_shape(stage),
        )
        weights = f"{call.role} {assignment}"
        if call.kind is CallKind.TRAIN:
            tokens = max_train_tokens(work)
            return CallFootprint(
                call.kind, train_memory(work, rests=rests), f"{weights} trained", tokens
            )
        memory = CallMemory(serving_weight_bytes(work), 0.0)
        if beside is not None and self.constants.aliases_served:
            filled = float(self._estimate_transfer(shape, beside, assignment).extra_bytes)
            keeps = self.constants.keeps_served
            memory = CallMemory(filled, 0.0) if keeps else CallMemory(0.0, filled)
        if call.kind is CallKind.SCORE:
            if rests and self.constants.offloads_weights:
                memory = CallMemory(0.0, memory.peak_bytes)
            active = memory.active_bytes + score_active_bytes(work)
            tokens = max_score_tokens(work)
            return CallFootprint(
                call.kind, CallMemory(memory.resident_bytes, active), weights, tokens
            )
        workload, given = work.workload, self.problem.kv_cache_bytes
        least_kv = rollout_kv_bytes(work, workload.max_rollout_tokens)
        here = math.ceil(workload.sampled_workload.num_rollouts / work.dp_size)
        return CallFootprint(
            call.kind,
            memory,
            weights,
            workload.max_rollout_tokens,
            max(given, least_kv),
            given or here * least_kv,
            given or self.constants.max_running * least_kv,
        )
