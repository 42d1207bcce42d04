"""Cost model of a few lines that tests can check by hand: rooflines and sums of bytes."""

import math
from collections.abc import Mapping

from streamrl.dataflow import CallKind
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.problem.problem import CallMemory, PlacementProblem
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.steady_state.call_durations import (
    GenerationModel,
    choose_cuts,
    score_duration_s,
    train_duration,
)
from streamrl.planner.steady_state.estimator import find_fullest_device

EFFICIENCY = 0.4


def sampler(
    decode_s: float,
    *,
    rollout_s: float = 0.0,
    replicas: int = 1,
    max_running: int = 1000,
    kv_tokens: float = 1e9,
) -> GeneratorTiming:
    """Return the timing of generators without prefill cost and with this cost per decode step."""
    return GeneratorTiming(
        replicas, max_running, kv_tokens, decode_s, 0.0, 0.0, 0.0, rollout_s, prefill_token_s=0.0
    )


class SimpleCosts:
    """Implementation of `PlacementCosts` by simple formulas."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.calls = {call.stage: call for call in problem.dataflow.calls}
        self._call_s: dict[tuple[str, CallAssignment], float] = {}
        self._memory: dict[tuple[str, CallAssignment], CallMemory] = {}
        self._generation = GenerationModel(problem.workload)

    @property
    def approximate_costs(self) -> "SimpleCosts":
        return self

    def rate(self, stage: str, assignment: CallAssignment) -> tuple[float, float]:
        """Return the parameters of a stage's model, and the FLOP/s of a replica."""
        model = self.problem.find_model(stage)
        assert model is not None
        grid = assignment.grid
        device = assignment.mesh.find_slowest_device(self.problem.cluster)
        parallel_efficiency = 0.95 ** (grid.tp_size.bit_length() - 1) * 0.9 ** (grid.pp_size - 1)
        return model.active_matmul_params, (
            grid.ranks_per_replica * device.flops_per_s * EFFICIENCY * parallel_efficiency
        )

    def generator(self, assignment: CallAssignment, free_bytes: float) -> GeneratorTiming:
        model = self.problem.find_model("generate")
        assert model is not None
        grid = assignment.grid
        device = assignment.mesh.find_slowest_device(self.problem.cluster)
        params, flops = self.rate("generate", assignment)
        bandwidth = grid.ranks_per_replica * device.memory_bytes_per_s
        return GeneratorTiming(
            replicas=grid.dp_size,
            max_running=512,
            kv_tokens=max(
                1.0, free_bytes * grid.ranks_per_replica / model.count_kv_bytes_per_token()
            ),
            weights_s=2 * params / bandwidth,
            kv_token_s=model.count_kv_bytes_per_token() / bandwidth,
            compute_rollout_s=2 * params / flops,
            step_s=0.002 + 0.001 * (grid.ranks_per_replica - 1),
            rollout_s=0.00002,
            prefill_token_s=2 * params / flops,
        )

    def score(self, stage: str, assignment: CallAssignment) -> ScoreTiming:
        params, flops = self.rate(stage, assignment)
        return ScoreTiming(assignment.grid.dp_size, 8, 0.01, 0.0, 2 * params / flops)

    def train(self, stage: str, assignment: CallAssignment) -> TrainTiming:
        params, flops = self.rate(stage, assignment)
        update_s = 0.05 + (0.1 if assignment.zero_stage == 3 else 0.0)
        return TrainTiming(assignment.grid.dp_size, 0.01, 6 * params / flops, update_s)

    def predict_timings(self, placement: Placement) -> StageTimings:
        score, train, weights = {}, {}, {}
        for stage, assignment in placement.assignments.items():
            call = self.calls[stage]
            if call.kind is CallKind.TRAIN:
                train[call.role] = self.train(stage, assignment)
            elif call.kind is CallKind.SCORE:
                score[stage] = self.score(stage, assignment)
            if call.followed_role:
                trainer = next(c.stage for c in self.calls.values() if c.role == call.followed_role)
                weights[stage] = self.weights(assignment, placement.assignments[trainer])
        generator = placement.assignments["generate"]
        return StageTimings(self.generator(generator, self.free(placement)), score, train, weights)

    def weights(self, target: CallAssignment, source: CallAssignment) -> WeightsTiming:
        if target.mesh == source.mesh:
            return WeightsTiming(0.0, 0.1, 0.1) if target.grid != source.grid else WeightsTiming()
        return WeightsTiming(0.2, 0.5, 0.1)

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        return {
            stage: self.call_memory(stage, assignment)
            for stage, assignment in placement.assignments.items()
        }

    def call_memory(self, stage: str, assignment: CallAssignment) -> CallMemory:
        key = (stage, assignment)
        if key not in self._memory:
            model = self.problem.find_model(stage)
            assert model is not None
            grid, params = assignment.grid, model.num_params
            shard = params / grid.ranks_per_replica
            if self.calls[stage].kind is CallKind.TRAIN:
                sharded = 18 if assignment.zero_stage == 3 else 12
                resident = (18 - sharded) * shard + sharded * shard / grid.dp_size
                self._memory[key] = CallMemory(resident, 4e9)
            elif self.calls[stage].kind is CallKind.GENERATE:
                self._memory[key] = CallMemory(0.0, 2 * shard + 1e9)
            else:
                self._memory[key] = CallMemory(2 * shard, 1e9)
        return self._memory[key]

    def free(self, placement: Placement) -> float:
        mesh = placement.assignments["generate"].mesh
        overlapping = {s: a for s, a in placement.assignments.items() if a.mesh.overlaps(mesh)}
        memory = self.predict_memory(placement)
        resident = sum(memory[stage].resident_bytes for stage in overlapping)
        capacity = mesh.find_slowest_device(self.problem.cluster).memory_bytes
        return capacity - resident - memory["generate"].peak_bytes

    def explain_infeasible(self, placement: Placement) -> str:
        free_bytes = find_fullest_device(
            self.predict_memory(placement), placement, self.problem.cluster
        )[2]
        return f"{-free_bytes / 1e9:.1f} GB short" if free_bytes < 0 else ""

    def call_duration_s(self, stage: str, assignment: CallAssignment) -> float:
        key = (stage, assignment)
        if key not in self._call_s:
            self._call_s[key] = self._compute_duration_s(stage, assignment)
        return self._call_s[key]

    def estimate_first_rollouts_s(self, assignment: CallAssignment) -> float:
        capacity = assignment.mesh.find_slowest_device(self.problem.cluster).memory_bytes
        timing = self.generator(
            assignment, capacity - self.call_memory("generate", assignment).peak_bytes
        )
        cuts = choose_cuts(self.problem.workload.groups_per_step)
        return self._generation.find_completions_s(timing, cuts)[0]

    def _compute_duration_s(self, stage: str, assignment: CallAssignment) -> float:
        workload, call = self.problem.workload, self.calls[stage]
        capacity = assignment.mesh.find_slowest_device(self.problem.cluster).memory_bytes
        free = capacity - self.call_memory(stage, assignment).peak_bytes
        if free < 0:
            return math.inf
        if call.kind is CallKind.TRAIN:
            return train_duration(self.train(stage, assignment), workload).total_s
        if call.kind is CallKind.SCORE:
            return score_duration_s(self.score(stage, assignment), workload, workload.group_size)
        return self._generation.find_completions_s(self.generator(assignment, free), (1.0,))[-1]
