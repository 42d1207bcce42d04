"""ReaL's weak scaling: how much its search gains over its heuristic, and what ours does."""

from collections.abc import Iterator

from benchmarks.published.points import (
    LENGTHS,
    REAL_DEVICES,
    REAL_HEURISTIC_S,
    REAL_MEAN_GAIN,
    REAL_PFLOPS,
    REAL_SIZES,
)
from benchmarks.published.rows import Row
from streamrl.dataflow import build_dataflow
from streamrl.placement.clusters import Cluster
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import MODEL_SHAPES
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.search.annealing import AnnealingSearch, SearchState
from streamrl.placement.search.hybridflow_mapping import MappingSearch
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.search.partitions import group_roles_by_model
from streamrl.placement.search.split_rules import allow_any_split
from streamrl.placement.steady_state.estimator import PlacementEstimator
from streamrl.placement.workload import FixedLength, Workload
from streamrl.resharding.grids import RankGrid

PPO = build_dataflow(("generator_logprobs", "scores", "ref_logprobs", "values"))
CONSTANTS = CostConstants(
    train_flops_fraction=0.5,
    forward_flops_fraction=0.5,
    half_width=1.0,
    link_fraction=1.0,
    decode_step_s=1e-3,
    decode_layer_s=0.6e-3,
    decode_rollout_s=20e-6,
    max_running=1024,
    memory_reserve_fraction=0.0,
    gradient_bytes=2,
    optimizer_bytes=20,
)
"""Of ReaL's own engine, calibrated on its heuristic's column alone: one part of the FLOP/s for all
passes, and a host that begins every layer of a decode step anew."""
MINI_BATCHES = 4
MOST_TRAINING_RANKS = 8
"""Tensor-parallel ranks times replicas of a call that trains, as its search has it."""
PROPOSALS = 600


class RealChoices(ParallelismChoices):
    """Those that ReaL's search has."""

    def list_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """Of `ParallelismChoices`, without those that ReaL drops."""
        return [each for each in super().list_options(role, mesh) if self._has(role, each.grid)]

    def _has(self, role: str, grid: RankGrid) -> bool:
        rollouts, parts = self.problem.workload.num_rollouts, grid.dp_size * grid.pp_size
        if role not in self.trained_roles:
            return rollouts >= parts
        few = grid.tp_size * grid.dp_size <= MOST_TRAINING_RANKS
        return few and rollouts >= 2 * parts * MINI_BATCHES


def problem(scale: str, length: int, at: int) -> PlacementProblem:
    """PPO where the actor, the critic or both are of a size, and what is not of 7B."""
    small, large = MODEL_SHAPES[REAL_SIZES[0]], MODEL_SHAPES[REAL_SIZES[at]]
    actor = small if scale == "critic" else large
    critic = (small if scale == "actor" else large).to_critic()
    devices = REAL_DEVICES[at] * (2 if scale == "both" else 1)
    workload = Workload(LENGTHS[length], 1, 128, FixedLength(length), mini_batches=MINI_BATCHES)
    roles = {"policy": actor, "reference": actor, "critic": critic, "reward": critic}
    return PlacementProblem(PPO, roles, workload, Cluster.from_text(f"{devices}xA100@1600Gb"))


def heuristic(asked: PlacementProblem) -> Placement:
    """All calls on all devices, 8-way tensor parallel, as many stages as nodes."""
    devices = asked.cluster.num_devices
    everywhere = CallAssignment(Mesh(0, devices), RankGrid(devices // 8, 8, 1))
    return Placement(dict.fromkeys(asked.placed_stages, everywhere), is_streamed=False)


def searched(asked: PlacementProblem, costs: CostModel, *, seed: int = 0) -> Placement:
    """The best that Algorithm 1 and annealing find, on policy, a call at a time on its devices."""
    choices = RealChoices(PlacementEstimator(asked, costs.approximate_costs), rules=allow_any_split)
    plain = heuristic(asked)
    starts = [plain]
    mapped = MappingSearch(choices, group_roles_by_model(asked)).find_best(streamed=False)[0]
    starts += [mapped] if mapped is not None else []
    annealing = AnnealingSearch(choices, [0], seed=seed, streamed=(False,))
    for start in starts:
        state = SearchState(
            {role: start.assignments[choices.stages_by_role[role][0]] for role in choices.roles},
            0,
            False,
        )
        annealing.descend_by_role(*annealing.run(state, PROPOSALS // len(starts)))
    # What the search worked out by formula has to fit by plan.
    found = sorted(choices.estimator.iter_estimated(), key=lambda each: each[1])
    return next(placement for placement, _ in found if not costs.explain_infeasible(placement))


def rows() -> Iterator[Row]:
    """The heuristic's seconds, which are fitted, and gains over it."""
    weighted, printed_weighted, total = 0.0, 0.0, 0
    for (scale, length), pairs in REAL_PFLOPS.items():
        for at, (slow, fast) in enumerate(pairs):
            asked = problem(scale, length, at)
            costs = CostModel(asked, CONSTANTS)
            estimator, devices = PlacementEstimator(asked, costs), asked.cluster.num_devices
            plain_s = estimator.step_s(heuristic(asked))
            gain = plain_s / estimator.step_s(searched(asked, costs))
            setting = f"{scale} of {REAL_SIZES[at]}, {length} tokens, {devices} GPUs"
            # A step's work by its own formula, which its printed rate is of.
            petaflop = slow * REAL_HEURISTIC_S[scale, length][at]
            rate = petaflop / plain_s
            yield Row("real", "Fig. vws", setting, "heuristic, PFLOP/s", slow, rate, fitted=True)
            yield Row("real", "Fig. vws", setting, "gain of the search", fast / slow, gain)
            weighted += gain * devices
            printed_weighted += fast / slow * devices
            total += devices
    yield Row("real", "abstract", "all, by GPUs", "mean gain", REAL_MEAN_GAIN, weighted / total)
