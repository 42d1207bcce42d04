"""Algorithm 1: exact over partitions and allocations, by schedule or by the paper's cost."""

import itertools
import math

import pytest

from streamrl.placement.search.hybridflow_mapping import MappingSearch
from streamrl.placement.search.partitions import group_roles_by_model
from streamrl.placement.steady_state.estimator import compute_d_cost
from tests.placement.search.problems import choices, ppo


def test_it_finds_what_looking_at_every_allocation_finds() -> None:
    found = choices(ppo("4x8xA100"))
    mapping = MappingSearch(found, group_roles_by_model(found.problem))
    best, looked = mapping.find_best()
    assert best is not None
    every = list(mapping.iter_allocations(0))
    seconds = [
        found.estimator.step_s(placement)
        for each in every
        for placement in mapping._iter_placements(each, 0, streamed=True)
    ]
    assert found.estimator.step_s(best) == min(seconds)
    assert 0 < looked <= len(every)


@pytest.mark.parametrize("cluster", ["6x8xA100", "2x8xA100,2x8xV100", "8xA100"])
@pytest.mark.parametrize("most", [1, 5, 40])
def test_the_lowest_bounds_are_those_of_all_allocations_in_order(cluster: str, most: int) -> None:
    found = choices(ppo(cluster, "qwen2.5-3b"))
    mapping = MappingSearch(found, [(role,) for role in found.roles])
    every = sorted(mapping.iter_allocations(0), key=lambda each: each.lower_bound_s)
    assert mapping.find_lowest(0, most) == every[:most]


def test_the_papers_cost_is_minimal_over_all_allocations() -> None:
    found = choices(ppo("4x8xA100"))
    mapping = MappingSearch(found, group_roles_by_model(found.problem))
    best = mapping.find_best_by_stages()
    assert best is not None
    costs = found.estimator.costs
    every = itertools.chain.from_iterable(
        mapping._iter_placements(each, 0, streamed=False) for each in mapping.iter_allocations(0)
    )
    least = min(
        compute_d_cost(found.problem, each, costs)
        for each in every
        if not costs.explain_infeasible(each)
    )
    assert compute_d_cost(found.problem, best, costs) == least


def test_large_models_are_not_given_fewer_nodes_than_they_need() -> None:
    found = choices(ppo("8x8xA100", "llama-70b"))
    mapping = MappingSearch(found, group_roles_by_model(found.problem))
    for each in mapping.iter_allocations(0):
        for roles, mesh in zip(each.role_sets, each.meshes, strict=True):
            if "policy" in roles:
                assert mesh.size > 8
    best, _ = mapping.find_best()
    assert best is not None
    assert not found.estimator.costs.explain_infeasible(best)


def test_generation_may_have_all_devices_with_the_others_apart() -> None:
    found = choices(ppo("4xA100", "qwen2.5-1.5b"))
    mapping = MappingSearch(found, group_roles_by_model(found.problem), everywhere=True)
    best, _ = mapping.find_best()
    assert best is not None
    assert best.assignments["generate"].mesh.size == 4
    for each in mapping.iter_allocations(0):
        assert "generator" not in itertools.chain(*each.role_sets)


def test_where_nothing_fits_nothing_is_found() -> None:
    found = choices(ppo("2xV100", "llama-70b"))
    best, looked = MappingSearch(found, group_roles_by_model(found.problem)).find_best()
    assert (best, looked) == (None, 0)
    assert math.isinf(min((s for _, s in found.estimator.iter_estimated()), default=math.inf))
