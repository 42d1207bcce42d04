"""The cost model: what a placement takes in seconds and bytes, by shapes, devices and constants."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from streamrl.dataflow import MOVED, POLICY, Call, Kind
from streamrl.placement.clusters import Device
from streamrl.placement.costs.approximate_traffic import RoughTraffic
from streamrl.placement.costs.call_cost import Work
from streamrl.placement.costs.call_memory import (
    loading_s,
    most_scored_tokens,
    most_trained_tokens,
    moving_s,
    rollout_kv_bytes,
    score_active,
    served_bytes,
    train_memory,
    usable,
)
from streamrl.placement.costs.constants import Constants
from streamrl.placement.costs.device_memory import Holder, Holdings
from streamrl.placement.costs.generate import generator_timing
from streamrl.placement.costs.lora_traffic import AdapterTraffic
from streamrl.placement.costs.param_shards import stage_params
from streamrl.placement.costs.score import rule_timing, score_timing
from streamrl.placement.costs.traffic import Moved, Traffic
from streamrl.placement.costs.train import train_timing
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.problem import CallMemory, Problem
from streamrl.placement.stage_timings import ScoreTiming, Timings, TrainTiming, WeightsTiming
from streamrl.placement.steady_state.call_durations import Generation, cuts_of, score_s, training
from streamrl.placement.workload import Workload


class CostModel:
    """Of one problem; keeps what it found for each call on each devices."""

    def __init__(
        self,
        problem: Problem,
        constants: Constants | None = None,
        *,
        traffic: type[Traffic] = Traffic,
    ) -> None:
        self.problem = problem
        self.constants = constants or Constants.of(problem.cluster)
        self.traffic = traffic(problem.cluster, self.constants)
        self._constants = {
            role: replace(self.constants, score_tokens=tokens)
            for role, tokens in problem.score_tokens.items()
        }
        self._adapters = AdapterTraffic(problem.cluster, self.constants)
        self._calls = {call.stage: call for call in problem.dataflow.ordered}
        self._sampling = problem.dataflow.of_kind(Kind.GENERATE)[0].stage
        self._trainers = {call.role: call.stage for call in problem.dataflow.of_kind(Kind.TRAIN)}
        self._shapes = {stage: problem.model_of(stage) for stage in self._calls}
        self._works: dict[tuple[str, Assignment], Work] = {}
        self._scored: dict[tuple[str, Assignment, bool], ScoreTiming] = {}
        self._trained: dict[tuple[str, Assignment, bool], TrainTiming] = {}
        self._alone: dict[tuple[str, Assignment], float] = {}
        self._generations: dict[str, Generation] = {}
        self._held: dict[tuple[str, Assignment, Assignment | None, bool], Holder] = {}
        self._sent: dict[tuple[str, Assignment, Assignment], WeightsTiming] = {}
        self._wrong: dict[tuple[str, Assignment], str] = {}

    @cached_property
    def rough(self) -> "CostModel":
        """The same but for weights on their way, which are worked out by formula."""
        return CostModel(self.problem, self.constants, traffic=RoughTraffic)

    def timings(self, placement: Placement) -> Timings:
        """How long everything takes. What `unfit` refuses has none: ValueError, or nonsense."""
        score: dict[str, ScoreTiming] = {}
        train: dict[str, TrainTiming] = {}
        for stage, call in self._calls.items():
            if call.kind is Kind.SCORE:
                found = placement.calls.get(stage)
                timing = self._score(stage, found, rests=self._rests(stage, placement))
                score[stage] = timing
            elif call.kind is Kind.TRAIN:
                train[call.role] = self._train(
                    stage, placement.calls[stage], rests=self._rests(stage, placement)
                )
        sampling = self._sampling
        return Timings(
            generator_timing(
                self._work(sampling, placement.calls[sampling]), self.kv_room(placement)
            ),
            score,
            train,
            weights={
                stage: self._weights(call, placement)
                for stage, call in self._calls.items()
                if stage in placement.calls and self._source(call)
            },
            hop_s=self._hop_s(),
            step_s=self.constants.between_steps_s,
        )

    def memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        """What each call holds of one of its devices."""
        return self._holdings(placement).memory()

    def unfit(self, placement: Placement) -> str:
        """Why it cannot be, in one line: what does not divide, or does not fit; empty if it can."""
        for stage, assignment in placement.calls.items():
            if wrong := self._misfit(stage, assignment):
                return wrong
        return self._holdings(placement).unfit()

    def call_s(self, stage: str, assignment: Assignment) -> float:
        """A whole step's work of a call alone on its devices; infinite if it does not fit."""
        key = (stage, assignment)
        if key not in self._alone:
            self._alone[key] = self._call_s(stage, assignment)
        return self._alone[key]

    def kv_room(self, placement: Placement) -> float:
        """Bytes for keys and values on each device that samples; of one that need not have all
        calls.
        """
        room = self._holdings(placement).kv_room(self._sampling)
        return min(room, self.problem.kv_cache_bytes or math.inf)

    def kv_cache(self, placement: Placement) -> float:
        """Of those, the bytes that engines have a use for."""
        return self._holdings(placement).kv_cache(self._sampling)

    def moved(self, stage: str, placement: Placement) -> Moved | None:
        """What a version costs on its way to a call; None where it follows nobody."""
        call = self._calls[stage]
        source = self._source(call)
        if not source:
            return None
        return self._way(self._shape(stage), placement.calls[source], placement.calls[stage])

    def _way(self, shape: ModelShape, source: Assignment, target: Assignment) -> Moved:
        """By formula where ranks share out experts: no plan has those."""
        if shape.trained:
            return self._adapters.moved(shape, source, target)
        is_plain = source.expert == 1 and target.expert == 1
        return (self.traffic if is_plain else self.rough.traffic).moved(shape, source, target)

    def first_s(self, assignment: Assignment) -> float:
        """Of a step's generation alone on its devices, until the first part of it is complete."""
        left = self._left_alone(self._sampling, assignment)
        cuts = cuts_of(self.problem.workload.groups_per_step)
        return math.inf if left is None else self._sampled_s(self._sampling, assignment, left, cuts)

    def _call_s(self, stage: str, assignment: Assignment) -> float:
        left = self._left_alone(stage, assignment)
        if left is None:
            return math.inf
        call, work = self._calls[stage], self._work(stage, assignment)
        if call.kind is Kind.GENERATE:
            return self._sampled_s(stage, assignment, left, (1.0,))
        if call.kind is Kind.SCORE:
            scored = self._score(stage, assignment)
            return score_s(scored, work.workload, work.workload.group_size)
        trained = self._train(stage, assignment)
        return training(trained, work.workload).total_s + trained.step_s

    def _sampled_s(
        self, stage: str, assignment: Assignment, room: float, cuts: tuple[float, ...]
    ) -> float:
        """Until the first of these parts is complete, with so many bytes for keys and values."""
        work = self._work(stage, assignment)
        if stage not in self._generations:
            self._generations[stage] = Generation(work.workload.sampled)
        return self._generations[stage].completion(generator_timing(work, room), cuts)[0]

    def _left_alone(self, stage: str, assignment: Assignment) -> float | None:
        """Bytes left of a device where a call is alone; None where it does not fit."""
        if self._misfit(stage, assignment):
            return None
        holder = self._holder(stage, assignment, None, rests=False)
        left = self._smallest(assignment) - holder.memory.kept
        return None if left < max(holder.memory.active, holder.least_kv) else left

    def _smallest(self, assignment: Assignment) -> float:
        devices: list[Device] = [
            group.device for group in assignment.mesh.groups(self.problem.cluster)
        ]
        return usable(min(device.memory_bytes for device in devices), self.constants)

    def _misfit(self, stage: str, assignment: Assignment) -> str:
        """What does not divide, or has less work than replicas; empty if all is well."""
        key = (stage, assignment)
        if key not in self._wrong:
            self._wrong[key] = self._misfit_of(stage, assignment)
        return self._wrong[key]

    def _misfit_of(self, stage: str, assignment: Assignment) -> str:
        grid, workload = assignment.grid, self._workload(stage)
        try:
            stage_params(self._shape(stage), grid.stages, grid.tensor, assignment.expert)
        except ValueError as error:
            return f"{stage} as {grid}: {error}"
        rollouts = workload.rollouts
        if self._calls[stage].kind is Kind.TRAIN:
            rollouts //= workload.mini_batches
        if grid.replicas > rollouts:
            return f"{stage} as {grid}: {grid.replicas} replicas for {rollouts} rollouts"
        return ""

    def _shape(self, stage: str) -> ModelShape:
        shape = self._shapes[stage]
        assert shape is not None, f"{stage} has devices and no model"
        return shape

    def _workload(self, stage: str) -> Workload:
        """A step's work of a call: of what is sampled greedily, one rollout for a prompt."""
        call, workload = self._calls[stage], self.problem.workload
        if "greedy_ids" in (*call.needs, *call.produces):
            return replace(workload, group_size=1)
        return workload

    def _work(self, stage: str, assignment: Assignment) -> Work:
        key = (stage, assignment)
        if key not in self._works:
            self._works[key] = Work(
                self._shape(stage),
                assignment,
                self._workload(stage),
                self.problem.cluster,
                self._constants.get(self._calls[stage].role, self.constants),
            )
        return self._works[key]

    def _score(
        self, stage: str, assignment: Assignment | None, *, rests: bool = False
    ) -> ScoreTiming:
        if assignment is None:
            return rule_timing(self.constants)
        key = (stage, assignment, rests)
        if key not in self._scored:
            work = self._work(stage, assignment)
            # Who follows a trainer gets its weights from there.
            loads = rests and not self._source(self._calls[stage])
            self._scored[key] = score_timing(work, loading_s(work) if loads else 0.0)
        return self._scored[key]

    def _train(self, stage: str, assignment: Assignment, *, rests: bool = False) -> TrainTiming:
        key = (stage, assignment, rests)
        if key not in self._trained:
            work = self._work(stage, assignment)
            self._trained[key] = train_timing(work, moving_s(work) if rests else 0.0)
        return self._trained[key]

    def _rests(self, stage: str, placement: Placement) -> bool:
        """Whether a call's devices are another role's in turn, and it leaves some of it away."""
        if not (self.constants.offloads_optimizer or self.constants.offloads_weights):
            return False
        role = self._calls[stage].role
        return any(
            self._calls[other].role != role and placement.overlaps(stage, other)
            for other in placement.calls
        )

    def _source(self, call: Call) -> str:
        """The stage that trains what a call follows; empty if it follows nobody."""
        return self._trainers.get(POLICY if call.follows == MOVED else call.follows, "")

    def _weights(self, call: Call, placement: Placement) -> WeightsTiming:
        key = (call.stage, placement.calls[self._source(call)], placement.calls[call.stage])
        if key not in self._sent:
            self._sent[key] = self._weights_of(call, placement)
        return self._sent[key]

    def _weights_of(self, call: Call, placement: Placement) -> WeightsTiming:
        moved, constants = self.moved(call.stage, placement), self.constants
        assert moved is not None
        if placement.overlaps(self._source(call), call.stage):
            whole = moved.seconds + constants.switch_s
            return WeightsTiming(0.0, whole, whole)
        pull_s = moved.seconds + constants.pull_s
        return WeightsTiming(constants.publish_s, pull_s, pull_s * constants.pause_fraction)

    def _hop_s(self) -> float:
        """From one stage to the next: a group's columns through a node's network, and the rest."""
        workload, constants = self.problem.workload, self.constants
        num_bytes = workload.group_size * workload.rollout_tokens * constants.column_bytes
        network = min(group.network for group in self.problem.cluster.groups)
        return constants.hop_s + num_bytes / (network * constants.network_fraction)

    def _holdings(self, placement: Placement) -> Holdings:
        holders = {}
        for stage, assignment in placement.calls.items():
            source = placement.calls.get(self._source(self._calls[stage]))
            beside = source if source and source.mesh == assignment.mesh else None
            rests = self._rests(stage, placement)
            holders[stage] = self._holder(stage, assignment, beside, rests=rests)
        return Holdings(placement, holders, self.problem.cluster, self.constants)

    def _holder(
        self, stage: str, assignment: Assignment, beside: Assignment | None, *, rests: bool
    ) -> Holder:
        """A call's; `beside` is who trains what it follows, where it is on the same devices."""
        key = (stage, assignment, beside, rests)
        if key not in self._held:
            self._held[key] = self._holder_of(stage, assignment, beside, rests=rests)
        return self._held[key]

    def _holder_of(
        self, stage: str, assignment: Assignment, beside: Assignment | None, *, rests: bool
    ) -> Holder:
        call, work, shape = self._calls[stage], self._work(stage, assignment), self._shape(stage)
        weights = f"{call.role} {assignment}"
        if call.kind is Kind.TRAIN:
            tokens = most_trained_tokens(work)
            return Holder(call.kind, train_memory(work, rests=rests), f"{weights} trained", tokens)
        memory = CallMemory(served_bytes(work), 0.0)
        if beside is not None and self.constants.aliases_served:
            filled = float(self._way(shape, beside, assignment).beside_bytes)
            keeps = self.constants.keeps_served
            memory = CallMemory(filled, 0.0) if keeps else CallMemory(0.0, filled)
        if call.kind is Kind.SCORE:
            if rests and self.constants.offloads_weights:
                memory = CallMemory(0.0, memory.most)
            active = memory.active + score_active(work)
            tokens = most_scored_tokens(work)
            return Holder(call.kind, CallMemory(memory.kept, active), weights, tokens)
        workload, given = work.workload, self.problem.kv_cache_bytes
        least_kv = rollout_kv_bytes(work, workload.most_tokens)
        here = math.ceil(workload.sampled.rollouts / work.replicas)
        return Holder(
            call.kind,
            memory,
            weights,
            workload.most_tokens,
            max(given, least_kv),
            given or here * least_kv,
            given or self.constants.max_running * least_kv,
        )
