"""Algorithms 1 and 2: partitions and allocations by the schedule, and the grids of a model."""

import itertools
import math
from dataclasses import replace

import pytest

from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.planner.search.hybridflow import (
    MappingSearch,
    MeshAllocation,
    group_roles_by_model,
    iter_allocations,
    iter_set_partitions,
    list_grids,
    list_placed_roles,
)
from tests.planner.search.problems import LONG_TAILED, choices, grpo, ppo


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


def test_uneven_parts_of_a_node_are_chosen_where_faster_than_halves():
    options = choices(grpo("8xH100", "qwen2.5-1.5b", LONG_TAILED))
    units = [("generator",), ("policy", "reference")]
    best = MappingSearch(options, units).find_best(ahead=1)
    assert best is not None
    assert best.assignments["generate"].mesh == Mesh(0, 6)
    halves = options.fit_on_meshes(
        {role: Mesh(0 if role == "generator" else 4, 4) for role in options.roles}
    )
    assert halves is not None
    seconds = options.estimator.estimate_step_s
    assert seconds(best) < 0.95 * seconds(options.make_placement(halves, 1))


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


def list_allocations(mapping: MappingSearch) -> list[MeshAllocation]:
    return list(mapping._iter_below(0, lambda: math.inf))


def test_best_mapping_is_minimal_over_all_allocations():
    options = choices(ppo("4x8xA100"))
    mapping = MappingSearch(options, group_roles_by_model(options.problem))
    best = mapping.find_best()
    assert best is not None
    allocations = list_allocations(mapping)
    seconds = [
        options.estimator.estimate_step_s(placement)
        for allocation in allocations
        for placement in mapping._iter_placements(allocation, 0, streamed=True)
    ]
    assert options.estimator.estimate_step_s(best) == min(seconds)


@pytest.mark.parametrize("cluster", ["6x4xH100", "8xH100", "2x4xH100,2x4xA100"])
def test_lowest_bounds_are_those_of_all_allocations(cluster: str):
    options = choices(ppo(cluster, "llama-13b"))
    mapping = MappingSearch(options, [(role,) for role in options.roles])
    every = sorted(list_allocations(mapping), key=lambda allocation: allocation.lower_bound_s)
    assert mapping.find_lowest(0, 20) == every[:20]


def test_large_models_get_enough_nodes():
    options = choices(ppo("8x8xA100", "llama-70b"))
    mapping = MappingSearch(options, group_roles_by_model(options.problem))
    for allocation in list_allocations(mapping):
        for roles, mesh in zip(allocation.role_sets, allocation.meshes, strict=True):
            if "policy" in roles:
                assert mesh.size > 8
    best = mapping.find_best()
    assert best is not None
    assert not options.estimator.costs.explain_infeasible(best)


def test_generation_may_use_all_devices():
    options = choices(ppo("4xA100", "qwen2.5-1.5b"))
    mapping = MappingSearch(options, group_roles_by_model(options.problem), everywhere=True)
    best = mapping.find_best()
    assert best is not None
    assert best.assignments["generate"].mesh.size == 4
    for allocation in list_allocations(mapping):
        assert "generator" not in itertools.chain(*allocation.role_sets)


LLAMA = load_model_shape("llama-7b")


def test_grids_divide_devices_with_at_most_one_stage_per_node():
    grids = list_grids(Mesh(0, 16), Cluster.from_text("2x8xA100"), LLAMA)
    expected = {*("1-1-16", "1-2-8", "1-4-4", "1-8-2"), *("2-1-8", "2-2-4", "2-4-2", "2-8-1")}
    assert {str(grid) for grid in grids} == expected


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
