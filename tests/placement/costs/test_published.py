"""Published facts that one set of constants has to show: the defaults."""

import math

import pytest

from streamrl.dataflow import dataflow_for
from streamrl.placement.clusters import Cluster
from streamrl.placement.costs import CostModel
from streamrl.placement.costs.alone import generate_s
from streamrl.placement.estimates import Problem
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.shapes import SHAPES
from streamrl.placement.workload import FixedLength, Workload
from streamrl.resharding import Grid

SIZES = (1, 2, 4, 8)


def figure_15(model: str) -> dict[int, float]:
    """Seconds of generation by t_g: PPO, all colocated on 16 A100, trained as 1-8-2."""
    shape = SHAPES[model]
    models = {"policy": shape, "reference": shape}
    models |= {"critic": shape.critic(), "reward": shape.critic()}
    flow = dataflow_for(("scores", "ref_logprobs", "values", "generator_logprobs"))
    workload = Workload(1024, 1, 1024, FixedLength(1024), mini_batches=8)
    problem = Problem(flow, models, workload, Cluster.parse("2x8xA100@200Gb"))
    costs, mesh, found = CostModel(problem), Mesh(0, 16), {}
    for size in SIZES:
        calls = dict.fromkeys(problem.stages, Assignment(mesh, Grid(1, 8, 2)))
        calls["generate"] = Assignment(mesh, Grid(1, size, 16 // size))
        placement = Placement(calls)
        found[size] = math.inf
        if not costs.unfit(placement):
            found[size] = generate_s(costs.timings(placement).generator, workload)
    return found


@pytest.mark.parametrize(
    ("model", "best", "saved"), [("llama-7b", 2, 0.603), ("llama-13b", 4, 0.364)]
)
def test_figure_15_of_hybridflow(model: str, best: int, saved: float) -> None:
    # arXiv:2409.19256: the best t_g, and what it saves of the time with t_g = t = 8.
    seconds = figure_15(model)
    assert min(SIZES, key=seconds.__getitem__) == best
    assert 1 - seconds[best] / seconds[8] == pytest.approx(saved, abs=0.15)
    fitting = [seconds[size] for size in SIZES if math.isfinite(seconds[size])]
    assert max(fitting) == seconds[8]
