"""Published facts that one set of constants has to show: the defaults."""

import math

import pytest

from streamrl.dataflow import dataflow_for
from streamrl.placement.clusters import Cluster
from streamrl.placement.costs import Constants, CostModel
from streamrl.placement.durations import Generation
from streamrl.placement.estimates import Problem
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.shapes import SHAPES
from streamrl.placement.workload import FixedLength, Workload
from streamrl.resharding import Grid

PPO = dataflow_for(("scores", "ref_logprobs", "values", "generator_logprobs"))
SIZES = (1, 2, 4, 8)
REAL = Constants(
    decode_step_s=1e-3,
    decode_layer_s=1e-3,
    decode_rollout_s=20e-6,
    max_running=1024,
    link_hop_s=2e-6,
    memory_reserve_fraction=0.0,
)
"""Of its own engine, whose host begins every layer anew and cares little how many rollouts there
are; fitted to its 7B column. How fast devices compute is as in the defaults."""


def figure_15(model: str) -> dict[int, float]:
    """Seconds of generation by t_g: PPO, all colocated on 16 A100, trained as 1-8-2."""
    shape = SHAPES[model]
    models = {"policy": shape, "reference": shape}
    models |= {"critic": shape.critic(), "reward": shape.critic()}
    workload = Workload(1024, 1, 1024, FixedLength(1024), mini_batches=8)
    problem = Problem(PPO, models, workload, Cluster.parse("2x8xA100@200Gb"))
    costs, mesh, found = CostModel(problem), Mesh(0, 16), {}
    for size in SIZES:
        calls = dict.fromkeys(problem.stages, Assignment(mesh, Grid(1, 8, 2)))
        calls["generate"] = Assignment(mesh, Grid(1, size, 16 // size))
        placement = Placement(calls)
        found[size] = math.inf
        if not costs.unfit(placement):
            timing = costs.timings(placement).generator
            found[size] = Generation(workload).completion(timing, (1.0,))[-1]
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


@pytest.mark.parametrize(
    ("model", "devices", "published_s"),
    [
        ("llama-7b", 8, (31.3, 42.3, 63.4)),
        ("llama-13b", 16, (30.1, 42.6, 69.0)),
        ("llama-34b", 32, (34.0, 50.5, 84.6)),
        ("llama-70b", 64, (43.7, 71.6, 129.0)),
    ],
)
def test_reals_heuristic_takes_what_it_published(
    model: str, devices: int, published_s: tuple[float, ...]
) -> None:
    # arXiv:2406.14088, first version: six calls one after the other on all devices, as p-8-1; the
    # actor grows, the critic is of 7B.
    shape, critic = SHAPES[model], SHAPES["llama-7b"].critic()
    models = {"policy": shape, "reference": shape, "critic": critic, "reward": critic}
    cluster = Cluster.parse(f"{devices}xA100@1600Gb")
    everywhere = Assignment(Mesh(0, devices), Grid(devices // 8, 8, 1))
    for published, length, batch in zip(published_s, (128, 384, 896), (512, 256, 128), strict=True):
        workload = Workload(batch, 1, 128, FixedLength(length), mini_batches=4)
        problem = Problem(PPO, models, workload, cluster)
        costs = CostModel(problem, REAL)
        seconds = sum(costs.call_s(stage, everywhere) for stage in problem.stages)
        assert seconds == pytest.approx(published, rel=0.12)
