"""Problems for searches: the same models and work on clusters of different sizes."""

from streamrl.dataflow import dataflow_for
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.model_shapes import shape_of
from streamrl.placement.problem import Problem
from streamrl.placement.search.hybridflow_parallel import Choices
from streamrl.placement.search.split_rules import anything
from streamrl.placement.steady_state.estimator import Estimator
from streamrl.placement.workload import FixedLength, LognormalLengths, Workload
from tests.placement.simple_costs import SimpleCosts

FIXED = FixedLength(512)
LONG_TAILED = LognormalLengths(300, 0.8, 2048)


def ppo(
    cluster: str,
    size: str = "llama-7b",
    lengths: FixedLength | LognormalLengths = FIXED,
    groups: int = 512,
) -> Problem:
    """Policy, critic, reference and reward model of one size."""
    dataflow = dataflow_for((*ROLLOUT_COLUMNS, "scores", "ref_logprobs", "values"))
    shape = shape_of(size)
    models = {"policy": shape, "critic": shape, "reference": shape, "reward": shape}
    workload = Workload(groups, 1, 512, lengths, mini_batches=4)
    return Problem(dataflow, models, workload, Cluster.parse(cluster))


def grpo(cluster: str, size: str, lengths: FixedLength | LognormalLengths = FIXED) -> Problem:
    """Policy and reference; the reward is a rule."""
    dataflow = dataflow_for((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
    shape = shape_of(size)
    workload = Workload(32, 4, 512, lengths)
    return Problem(
        dataflow, {"policy": shape, "reference": shape}, workload, Cluster.parse(cluster)
    )


def choices(problem: Problem) -> Choices:
    """Of the simple costs."""
    return Choices(Estimator(problem, SimpleCosts(problem)), rules=anything)
