"""Algorithm 2: which grids there are, and which is taken."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import load_model_shape
from streamrl.placement.search.hybridflow_parallel import auto_parallel, list_grids
from tests.placement.search.problems import choices, ppo

LLAMA = load_model_shape("llama-7b")


def test_tensor_parallelism_divides_and_stages_are_at_most_as_many_as_nodes() -> None:
    found = list_grids(Mesh(0, 16), Cluster.from_text("2x8xA100"), LLAMA)
    assert {str(each) for each in found} == {
        *("1-1-16", "1-2-8", "1-4-4", "1-8-2"),
        *("2-1-8", "2-2-4", "2-4-2", "2-8-1"),
    }


def test_part_of_a_node_has_one_stage() -> None:
    found = list_grids(Mesh(0, 4), Cluster.from_text("8xA100"), LLAMA)
    assert {str(each) for each in found} == {"1-1-4", "1-2-2", "1-4-1"}


@given(st.integers(1, 16))
def test_every_grid_has_all_ranks(nodes: int) -> None:
    for each in list_grids(Mesh(0, 8 * nodes), Cluster.from_text("16x8xA100"), LLAMA):
        assert each.num_ranks == 8 * nodes
        assert each.tp_size <= 8
        assert each.pp_size <= nodes


def test_the_fastest_that_fits_is_taken() -> None:
    found = choices(ppo("2x8xA100"))
    mesh = Mesh(0, 16)
    best = auto_parallel(found, "policy", mesh)
    assert best is not None
    times = [found.alone_duration_s("policy", each) for each in found.list_options("policy", mesh)]
    assert found.alone_duration_s("policy", best) == min(times)
    assert all(map(math.isfinite, times))


def test_a_model_that_fits_in_nothing_has_no_parallelism() -> None:
    found = choices(ppo("8xV100", "llama-70b"))
    assert auto_parallel(found, "policy", Mesh(0, 1)) is None


def test_models_that_share_devices_give_way_to_one_another() -> None:
    found = choices(ppo("8xA100"))
    roles = ["generator", "policy", "critic", "value", "reference", "reward"]
    alone = {role: found.list_options(role, Mesh(0, 8))[0] for role in roles}
    together = found.fit_on_mesh(roles, Mesh(0, 8))
    assert together is not None
    assert not found.can_fit(alone)
    assert found.can_fit(together)


@pytest.mark.parametrize("size", ["llama-7b", "llama-70b"])
def test_what_is_said_to_fit_does(size: str) -> None:
    found = choices(ppo("4x8xA100", size))
    roles = found.fit_on_mesh(["generator", "policy"], Mesh(0, 32))
    assert roles is not None
    assert found.can_fit(roles)
