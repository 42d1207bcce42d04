"""Algorithm 2: the grids of a model, and the fastest that fits."""

import math

from hypothesis import given
from hypothesis import strategies as st

from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.planner.search.hybridflow import list_grids
from tests.planner.search.problems import choices, ppo

LLAMA = load_model_shape("llama-7b")


def test_grids_divide_devices_with_at_most_one_stage_per_node():
    grids = list_grids(Mesh(0, 16), Cluster.from_text("2x8xA100"), LLAMA)
    expected = {*("1-1-16", "1-2-8", "1-4-4", "1-8-2"), *("2-1-8", "2-2-4", "2-4-2", "2-8-1")}
    assert {str(grid) for grid in grids} == expected


@given(st.integers(1, 16))
def test_every_grid_uses_all_ranks(nodes: int):
    for grid in list_grids(Mesh(0, 8 * nodes), Cluster.from_text("16x8xA100"), LLAMA):
        assert grid.num_ranks == 8 * nodes
        assert grid.tp_size <= 8
        assert grid.pp_size <= nodes


def test_options_are_sorted_fastest_first():
    options = choices(ppo("2x8xA100"))
    times = [
        options.compute_alone_duration_s("policy", option)
        for option in options.list_options("policy", Mesh(0, 16))
    ]
    assert times == sorted(times)
    assert times and all(map(math.isfinite, times))


def test_models_on_shared_devices_trade_speed_for_memory():
    options = choices(ppo("8xA100"))
    roles = ["generator", "policy", "critic", "value", "reference", "reward"]
    fastest = {role: options.list_options(role, Mesh(0, 8))[0] for role in roles}
    fitted = options.fit_on_mesh(roles, Mesh(0, 8))
    assert fitted is not None
    assert not options.can_fit(fastest)
    assert options.can_fit(fitted)
