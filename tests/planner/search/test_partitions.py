"""Numbers of partitions and allocations, against known counts."""

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.planner.search.hybridflow import (
    group_roles_by_model,
    iter_allocations,
    iter_set_partitions,
    list_placed_roles,
)


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
    shape = load_model_shape("llama-7b")
    dataflow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs", "values"))
    roles = {"policy": shape, "critic": shape, "reference": shape, "reward": shape}
    workload = Workload(8, 1, 100, make_fixed_lengths(10))
    problem = PlacementProblem(dataflow, roles, workload, Cluster.from_text("8xA100"))
    units = {frozenset(unit) for unit in group_roles_by_model(problem)}
    assert units == {
        frozenset({"generator", "policy"}),
        frozenset({"value", "critic"}),
        frozenset({"reference"}),
        frozenset({"reward"}),
    }
    rule = PlacementProblem(
        dataflow, {k: v for k, v in roles.items() if k != "reward"}, workload, problem.cluster
    )
    assert "reward" not in list_placed_roles(rule)
