"""Random search: never worse than its start, deterministic, valid moves."""

import math

from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.meshes import Mesh
from streamrl.planner.search.annealing import AnnealingSearch, SearchState
from tests.planner.search.problems import choices, grpo, ppo

CHOICES = choices(ppo("2x8xA100"))
WHOLE = Mesh(0, 16)


def make_start_state() -> SearchState:
    roles = CHOICES.fit_on_mesh(CHOICES.roles, WHOLE)
    assert roles is not None
    return SearchState(roles)


def make_search(seed: int, aheads: tuple[int, ...] = (0, 1)) -> AnnealingSearch:
    return AnnealingSearch(CHOICES, aheads, seed=seed)


@given(st.integers(0, 2**32 - 1))
def test_search_is_never_worse_than_its_start_and_valid(seed: int):
    initial = make_start_state()
    search = make_search(seed)
    best, cost = search.run(initial, 60)
    assert cost <= search.estimate_state_step_s(initial)
    placement = CHOICES.make_placement(best.assignments, best.steps_ahead)
    placement.check_on_cluster(CHOICES.problem.cluster)
    assert best.steps_ahead in (0, 1)
    assert not CHOICES.estimator.costs.explain_infeasible(placement)


def test_equal_seeds_find_equal_placements():
    assert make_search(3).run(make_start_state(), 80) == make_search(3).run(make_start_state(), 80)


def test_lower_bound_is_below_the_step_time():
    initial = make_start_state()
    search = make_search(0, (0,))
    assert search.compute_lower_bound_s(initial) <= search.estimate_state_step_s(initial) * 1.001
    assert math.isinf(search.estimate_state_step_s(initial, search.compute_lower_bound_s(initial)))


def test_descent_ends_in_a_local_minimum():
    options = choices(grpo("4xA100", "qwen2.5-1.5b"))
    roles = options.fit_on_mesh(options.roles, Mesh(0, 4))
    assert roles is not None
    search = AnnealingSearch(options, (0,), seed=0)
    state, cost = search.descend_by_role(
        SearchState(roles), search.estimate_state_step_s(SearchState(roles))
    )
    for role in state.assignments:
        for mesh in (Mesh(0, 4), Mesh(0, 2), Mesh(2, 2), Mesh(1, 1)):
            for option in options.list_options(role, mesh):
                neighbor = SearchState({**state.assignments, role: option})
                assert search.estimate_state_step_s(neighbor) >= cost * (1 - 1e-9)
