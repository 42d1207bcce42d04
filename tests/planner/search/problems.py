"""Placement problems for searches: equal models and workloads on clusters of different sizes."""

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import (
    LengthDistribution,
    LognormalLengths,
    Workload,
    make_fixed_lengths,
)
from streamrl.planner.search.hybridflow import ParallelismChoices, allow_any_split
from streamrl.planner.steady_state.estimator import PlacementEstimator

FIXED = make_fixed_lengths(512)
LONG_TAILED = LognormalLengths(300, 0.8, 2048)


def ppo(
    cluster: str,
    size: str = "llama-7b",
    lengths: LengthDistribution = FIXED,
    groups: int = 512,
) -> PlacementProblem:
    """Return a problem with policy, critic, reference and reward model of one size."""
    dataflow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs", "values"))
    shape = load_model_shape(size)
    models = {"policy": shape, "critic": shape, "reference": shape, "reward": shape}
    workload = Workload(groups, 1, 512, lengths, mini_batches=4)
    return PlacementProblem(dataflow, models, workload, Cluster.from_text(cluster))


def grpo(cluster: str, size: str, lengths: LengthDistribution = FIXED) -> PlacementProblem:
    """Return a problem with policy, reference and a rule-based reward."""
    dataflow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
    shape = load_model_shape(size)
    workload = Workload(32, 4, 512, lengths)
    return PlacementProblem(
        dataflow, {"policy": shape, "reference": shape}, workload, Cluster.from_text(cluster)
    )


def choices(problem: PlacementProblem) -> ParallelismChoices:
    """Return the choices of a problem with the cost model."""
    return ParallelismChoices(
        PlacementEstimator(problem, CostModel(problem)), rules=allow_any_split
    )
