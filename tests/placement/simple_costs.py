"""A cost model of a few lines, that tests can work out by hand: rooflines and sums of bytes."""

import math
from collections.abc import Mapping

from streamrl.dataflow import Kind
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.problem import CallMemory, Problem
from streamrl.placement.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    Timings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.placement.steady_state.call_durations import Generation, cuts_of, score_s, training
from streamrl.placement.steady_state.estimator import fullest

EFFICIENCY = 0.4


def sampler(
    decode_s: float,
    *,
    rollout_s: float = 0.0,
    replicas: int = 1,
    max_running: int = 1000,
    kv_tokens: float = 1e9,
) -> GeneratorTiming:
    """Generators whose decode step takes so long, and so long for each rollout; prompts nothing."""
    return GeneratorTiming(
        replicas, max_running, kv_tokens, decode_s, 0.0, 0.0, 0.0, rollout_s, prefill_token_s=0.0
    )


class SimpleCosts:
    """Implements Costs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.calls = {call.stage: call for call in problem.dataflow.calls}
        self._call_s: dict[tuple[str, Assignment], float] = {}
        self._memory: dict[tuple[str, Assignment], CallMemory] = {}
        self._generation = Generation(problem.workload)

    @property
    def rough(self) -> "SimpleCosts":
        return self

    def rate(self, stage: str, assignment: Assignment) -> tuple[float, float]:
        """Parameters, and FLOP/s of one replica."""
        model = self.problem.model_of(stage)
        assert model is not None
        grid = assignment.grid
        device = assignment.mesh.slowest(self.problem.cluster)
        within = 0.95 ** (grid.tensor.bit_length() - 1) * 0.9 ** (grid.stages - 1)
        return model.active_matmul_params, (
            grid.model_ranks * device.flops_per_s * EFFICIENCY * within
        )

    def generator(self, assignment: Assignment, free_bytes: float) -> GeneratorTiming:
        model = self.problem.model_of("generate")
        assert model is not None
        grid = assignment.grid
        device = assignment.mesh.slowest(self.problem.cluster)
        params, flops = self.rate("generate", assignment)
        bandwidth = grid.model_ranks * device.memory_bytes_per_s
        return GeneratorTiming(
            replicas=grid.replicas,
            max_running=512,
            kv_tokens=max(1.0, free_bytes * grid.model_ranks / model.kv_bytes_per_token()),
            weights_s=2 * params / bandwidth,
            kv_token_s=model.kv_bytes_per_token() / bandwidth,
            compute_rollout_s=2 * params / flops,
            step_s=0.002 + 0.001 * (grid.model_ranks - 1),
            rollout_s=0.00002,
            prefill_token_s=2 * params / flops,
        )

    def score(self, stage: str, assignment: Assignment) -> ScoreTiming:
        params, flops = self.rate(stage, assignment)
        return ScoreTiming(assignment.grid.replicas, 8, 0.01, 0.0, 2 * params / flops)

    def train(self, stage: str, assignment: Assignment) -> TrainTiming:
        params, flops = self.rate(stage, assignment)
        update_s = 0.05 + (0.1 if assignment.zero_stage == 3 else 0.0)
        return TrainTiming(assignment.grid.replicas, 0.01, 6 * params / flops, update_s)

    def timings(self, placement: Placement) -> Timings:
        score, train, weights = {}, {}, {}
        for stage, assignment in placement.calls.items():
            call = self.calls[stage]
            if call.kind is Kind.TRAIN:
                train[call.role] = self.train(stage, assignment)
            elif call.kind is Kind.SCORE:
                score[stage] = self.score(stage, assignment)
            if call.follows:
                trainer = next(c.stage for c in self.calls.values() if c.role == call.follows)
                weights[stage] = self.weights(assignment, placement.calls[trainer])
        generator = placement.calls["generate"]
        return Timings(self.generator(generator, self.free(placement)), score, train, weights)

    def weights(self, to: Assignment, of: Assignment) -> WeightsTiming:
        if to.mesh == of.mesh:
            return WeightsTiming(0.0, 0.1, 0.1) if to.grid != of.grid else WeightsTiming()
        return WeightsTiming(0.2, 0.5, 0.1)

    def memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        return {stage: self.call_memory(stage, each) for stage, each in placement.calls.items()}

    def call_memory(self, stage: str, assignment: Assignment) -> CallMemory:
        key = (stage, assignment)
        if key not in self._memory:
            model = self.problem.model_of(stage)
            assert model is not None
            grid, params = assignment.grid, model.params
            shard = params / grid.model_ranks
            if self.calls[stage].kind is Kind.TRAIN:
                sharded = 18 if assignment.zero_stage == 3 else 12
                kept = (18 - sharded) * shard + sharded * shard / grid.replicas
                self._memory[key] = CallMemory(kept, 4e9)
            elif self.calls[stage].kind is Kind.GENERATE:
                self._memory[key] = CallMemory(0.0, 2 * shard + 1e9)
            else:
                self._memory[key] = CallMemory(2 * shard, 1e9)
        return self._memory[key]

    def free(self, placement: Placement) -> float:
        mesh = placement.calls["generate"].mesh
        here = {s: a for s, a in placement.calls.items() if a.mesh.overlaps(mesh)}
        memory = self.memory(placement)
        kept = sum(memory[stage].kept for stage in here)
        room = mesh.slowest(self.problem.cluster).memory_bytes
        return room - kept - memory["generate"].most

    def unfit(self, placement: Placement) -> str:
        left = fullest(self.memory(placement), placement, self.problem.cluster)[2]
        return f"{-left / 1e9:.1f} GB too little" if left < 0 else ""

    def call_s(self, stage: str, assignment: Assignment) -> float:
        key = (stage, assignment)
        if key not in self._call_s:
            self._call_s[key] = self._alone(stage, assignment)
        return self._call_s[key]

    def first_s(self, assignment: Assignment) -> float:
        room = assignment.mesh.slowest(self.problem.cluster).memory_bytes
        timing = self.generator(assignment, room - self.call_memory("generate", assignment).most)
        cuts = cuts_of(self.problem.workload.groups_per_step)
        return self._generation.completion(timing, cuts)[0]

    def _alone(self, stage: str, assignment: Assignment) -> float:
        workload, call = self.problem.workload, self.calls[stage]
        room = assignment.mesh.slowest(self.problem.cluster).memory_bytes
        free = room - self.call_memory(stage, assignment).most
        if free < 0:
            return math.inf
        if call.kind is Kind.TRAIN:
            return training(self.train(stage, assignment), workload).total_s
        if call.kind is Kind.SCORE:
            return score_s(self.score(stage, assignment), workload, workload.group_size)
        return self._generation.completion(self.generator(assignment, free), (1.0,))[-1]
