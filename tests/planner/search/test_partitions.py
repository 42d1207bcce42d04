"""Numbers of partitions and allocations, against known counts."""

from dataclasses import replace

import pytest

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.planner.search.hybridflow import (
    group_roles_by_model,
    iter_allocations,
    iter_set_partitions,
    list_placed_roles,
)
from tests.planner.search.problems import ppo


@pytest.mark.parametrize(("models", "partitions"), [(3, 5), (4, 15), (5, 52)])
def test_partition_counts_are_bell_numbers(models: int, partitions: int):
    partitions_found = [
        tuple(map(tuple, subsets)) for subsets in iter_set_partitions(range(models))
    ]
    assert len(partitions_found) == len(set(partitions_found)) == partitions
    for subsets in partitions_found:
        assert sorted(item for subset in subsets for item in subset) == list(range(models))


@pytest.mark.parametrize("cluster", ["8xA100", "1x6xA100", "4xA100", "4x8xA100", "2xA100"])
@pytest.mark.parametrize("sets", [1, 2, 3])
def test_allocated_meshes_are_valid_and_disjoint(cluster: str, sets: int):
    cluster_spec = Cluster.from_text(cluster)
    for meshes in iter_allocations(cluster_spec, sets):
        devices = [device for mesh in meshes for device in mesh.devices]
        assert sorted(devices) == list(range(cluster_spec.num_devices))
        for mesh in meshes:
            mesh.check_on_cluster(cluster_spec, "mesh")


@pytest.mark.parametrize("cluster", ["8xA100", "5x8xA100"])
def test_rejected_meshes_are_not_allocated(cluster: str):
    cluster_spec = Cluster.from_text(cluster)

    def accepts(number: int, mesh: Mesh) -> bool:
        return number != 1 or mesh.size >= cluster_spec.num_devices // 2

    allocations = list(iter_allocations(cluster_spec, 3))
    accepted = list(iter_allocations(cluster_spec, 3, accepts))
    assert accepted == [
        meshes for meshes in allocations if meshes[1].size >= cluster_spec.num_devices // 2
    ]
    assert 0 < len(accepted) < len(allocations)


def test_followers_are_grouped_with_their_leader():
    problem = ppo("8xA100")
    assert set(map(frozenset, group_roles_by_model(problem))) == {
        frozenset({"generator", "policy"}),
        frozenset({"value", "critic"}),
        frozenset({"reference"}),
        frozenset({"reward"}),
    }
    models = {role: shape for role, shape in problem.models.items() if role != "reward"}
    assert "reward" not in list_placed_roles(replace(problem, models=models))
