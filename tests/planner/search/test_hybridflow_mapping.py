"""Algorithm 1: exact over partitions and allocations, judged by the schedule."""

import itertools
import math

from streamrl.planner.search.hybridflow import MappingSearch, MeshAllocation, group_roles_by_model
from tests.planner.search.problems import choices, ppo


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


def test_infeasible_problem_has_no_mapping():
    options = choices(ppo("2xV100", "llama-70b"))
    assert MappingSearch(options, group_roles_by_model(options.problem)).find_best() is None
    assert math.isinf(min((s for _, s in options.estimator.iter_estimated()), default=math.inf))
