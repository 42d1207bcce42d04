"""ReaL's weak scaling: gain of its search over its heuristic, beside the gain of streamrl's."""

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
from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.planner.search.annealing import AnnealingSearch, SearchState
from streamrl.planner.search.hybridflow import (
    MappingSearch,
    ParallelismChoices,
    allow_any_split,
    group_roles_by_model,
)
from streamrl.planner.steady_state.estimator import PlacementEstimator
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
"""ReaL's engine, calibrated on the heuristic's column alone: one FLOP/s fraction for all passes,
and host time per layer of a decode step."""
MINI_BATCHES = 4
MAX_TRAINING_RANKS = 8
"""Largest product of tensor and data parallelism of a training call in ReaL's search."""
PROPOSALS = 600


class RealChoices(ParallelismChoices):
    """Parallelism choices of ReaL's search."""

    def _sort_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        options = super()._sort_options(role, mesh)
        return [option for option in options if self._allows(role, option.grid)]

    def _allows(self, role: str, grid: RankGrid) -> bool:
        rollouts, parts = self.problem.workload.num_rollouts, grid.dp_size * grid.pp_size
        if role not in self.trained_roles:
            return rollouts >= parts
        few = grid.tp_size * grid.dp_size <= MAX_TRAINING_RANKS
        return few and rollouts >= 2 * parts * MINI_BATCHES


def build_problem(scale: str, length: int, at: int) -> PlacementProblem:
    """Build PPO with actor, critic or both of the size at `at`, and the other of 7B."""
    small, large = MODEL_SHAPES[REAL_SIZES[0]], MODEL_SHAPES[REAL_SIZES[at]]
    actor = small if scale == "critic" else large
    critic = (small if scale == "actor" else large).to_critic()
    devices = REAL_DEVICES[at] * (2 if scale == "both" else 1)
    workload = Workload(
        LENGTHS[length], 1, 128, make_fixed_lengths(length), mini_batches=MINI_BATCHES
    )
    roles = {"policy": actor, "reference": actor, "critic": critic, "reward": critic}
    return PlacementProblem(PPO, roles, workload, Cluster.from_text(f"{devices}xA100@1600Gb"))


def build_heuristic(problem: PlacementProblem) -> Placement:
    """Place all calls on all devices: 8-way tensor parallel, one pipeline stage per node."""
    devices = problem.cluster.num_devices
    everywhere = CallAssignment(Mesh(0, devices), RankGrid(devices // 8, 8, 1))
    return Placement(dict.fromkeys(problem.placed_stages, everywhere), is_streamed=False)


def search_placement(problem: PlacementProblem, costs: CostModel, *, seed: int = 0) -> Placement:
    """Search on-policy placements by Algorithm 1 and annealing."""
    choices = RealChoices(PlacementEstimator(problem, costs), rules=allow_any_split)
    plain = build_heuristic(problem)
    starts = [plain]
    mapped = MappingSearch(choices, group_roles_by_model(problem)).find_best(streamed=False)
    starts += [mapped] if mapped is not None else []
    annealing = AnnealingSearch(choices, [0], seed=seed, streamed=False)
    for start in starts:
        state = SearchState(
            {role: start.assignments[choices.stages_by_role[role][0]] for role in choices.roles},
        )
        annealing.descend_by_role(*annealing.run(state, PROPOSALS // len(starts)))
    best, _ = min(choices.estimator.iter_estimated(), key=lambda option: option[1])
    return best


def iter_rows() -> Iterator[Row]:
    """Yield the heuristic's rate, which is fitted, and gains over it."""
    weighted, printed_weighted, total = 0.0, 0.0, 0
    for (scale, length), pairs in REAL_PFLOPS.items():
        for at, (slow, fast) in enumerate(pairs):
            problem = build_problem(scale, length, at)
            costs = CostModel(problem, CONSTANTS)
            estimator, devices = PlacementEstimator(problem, costs), problem.cluster.num_devices
            plain_s = estimator.estimate_step_s(build_heuristic(problem))
            gain = plain_s / estimator.estimate_step_s(search_placement(problem, costs))
            setting = f"{scale} of {REAL_SIZES[at]}, {length} tokens, {devices} GPUs"
            # FLOP of a step by ReaL's formula, as in its printed rate.
            petaflop = slow * REAL_HEURISTIC_S[scale, length][at]
            rate = petaflop / plain_s
            yield Row("real", "Fig. vws", setting, "heuristic, PFLOP/s", slow, rate, fitted=True)
            yield Row("real", "Fig. vws", setting, "gain of the search", fast / slow, gain)
            weighted += gain * devices
            printed_weighted += fast / slow * devices
            total += devices
    yield Row("real", "abstract", "all, by GPUs", "mean gain", REAL_MEAN_GAIN, weighted / total)
