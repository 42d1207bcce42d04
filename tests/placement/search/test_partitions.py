"""How many ways there are, against the counts that are known."""

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import load_model_shape
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.search.partitions import (
    count_allocations,
    group_roles_by_model,
    iter_allocations,
    iter_compositions,
    iter_set_partitions,
    list_placed_roles,
)
from streamrl.placement.workload import FixedLength, Workload


@pytest.mark.parametrize(("models", "partitions"), [(3, 5), (4, 15), (5, 52)])
def test_partitions_are_as_many_as_bell_says(models: int, partitions: int) -> None:
    found = [tuple(map(tuple, parts)) for parts in iter_set_partitions(range(models))]
    assert len(found) == len(set(found)) == partitions
    for parts in found:
        assert sorted(item for part in parts for item in part) == list(range(models))


def test_allocations_of_ppo_on_128_devices_are_the_known_ones() -> None:
    assert count_allocations(4, 128) == 382_271
    assert count_allocations(4, 16) == 1_191
    assert comb(127, 3) == 333_375


def test_a_mapping_looks_at_as_many_as_are_counted() -> None:
    cluster = Cluster.from_text("16x8xA100")
    found = sum(
        len(list(iter_allocations(cluster, len(parts)))) for parts in iter_set_partitions(range(4))
    )
    assert found == 1_191


@given(st.integers(1, 12), st.integers(1, 6))
def test_compositions_sum_up(total: int, parts: int) -> None:
    found = list(iter_compositions(total, parts))
    assert len(found) == comb(total - 1, parts - 1)
    assert all(sum(each) == total and min(each) > 0 for each in found)


@pytest.mark.parametrize("cluster", ["8xA100", "1x6xA100", "4xA100", "4x8xA100", "2xA100"])
@pytest.mark.parametrize("sets", [1, 2, 3])
def test_sets_get_meshes_that_are_valid_and_apart(cluster: str, sets: int) -> None:
    parsed = Cluster.from_text(cluster)
    for found in iter_allocations(parsed, sets):
        taken = [device for mesh in found for device in mesh.devices]
        assert sorted(taken) == list(range(parsed.num_devices))
        for mesh in found:
            mesh.check_on_cluster(parsed, "mesh")


@pytest.mark.parametrize("cluster", ["8xA100", "5x8xA100"])
def test_no_set_gets_a_mesh_that_is_not_wanted_for_it(cluster: str) -> None:
    parsed = Cluster.from_text(cluster)

    def wanted(number: int, mesh: Mesh) -> bool:
        return number != 1 or mesh.size >= parsed.num_devices // 2

    every = list(iter_allocations(parsed, 3))
    found = list(iter_allocations(parsed, 3, wanted))
    assert found == [each for each in every if each[1].size >= parsed.num_devices // 2]
    assert 0 < len(found) < len(every)


def test_who_follows_a_trained_model_is_with_it() -> None:
    shape = load_model_shape("llama-7b")
    dataflow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs", "values"))
    roles = {"policy": shape, "critic": shape, "reference": shape, "reward": shape}
    workload = Workload(8, 1, 100, FixedLength(10))
    problem = PlacementProblem(dataflow, roles, workload, Cluster.from_text("8xA100"))
    found = {frozenset(unit) for unit in group_roles_by_model(problem)}
    assert found == {
        frozenset({"generator", "policy"}),
        frozenset({"value", "critic"}),
        frozenset({"reference"}),
        frozenset({"reward"}),
    }
    rule = PlacementProblem(
        dataflow, {k: v for k, v in roles.items() if k != "reward"}, workload, problem.cluster
    )
    assert "reward" not in list_placed_roles(rule)
