"""Random search: never worse than its start, the same for the same seed, and sane in its moves."""

import math

from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.meshes import Mesh
from streamrl.placement.search.annealing import AnnealingSearch, SearchState
from tests.placement.search.problems import choices, grpo, ppo

CHOICES = choices(ppo("2x8xA100"))
WHOLE = Mesh(0, 16)


def start() -> SearchState:
    roles = CHOICES.fit_on_mesh(CHOICES.roles, WHOLE)
    assert roles is not None
    return SearchState(roles)


def annealing(seed: int, aheads: tuple[int, ...] = (0, 1)) -> AnnealingSearch:
    return AnnealingSearch(CHOICES, aheads, seed=seed, streamed=(True, False))


@given(st.integers(0, 2**32 - 1))
def test_it_is_never_worse_than_where_it_began_and_its_placements_are_valid(seed: int) -> None:
    begun = start()
    search = annealing(seed)
    found, cost = search.run(begun, 60)
    assert cost <= search.state_step_s(begun)
    placement = CHOICES.make_placement(
        found.assignments, found.steps_ahead, streamed=found.is_streamed
    )
    placement.check_valid(CHOICES.problem.dataflow, CHOICES.problem.cluster)
    assert found.steps_ahead in (0, 1)
    assert not CHOICES.estimator.costs.explain_infeasible(placement)


def test_the_same_seed_finds_the_same() -> None:
    assert annealing(3).run(start(), 80) == annealing(3).run(start(), 80)


def test_a_step_is_never_shorter_than_the_busiest_device_has_to_work() -> None:
    begun = start()
    search = annealing(0, (0,))
    assert search.lower_bound_s(begun) <= search.state_step_s(begun) * 1.001
    assert math.isinf(search.state_step_s(begun, search.lower_bound_s(begun)))


def test_the_descent_ends_where_no_role_alone_can_do_better() -> None:
    found = choices(grpo("4xA100", "qwen2.5-1.5b"))
    roles = found.fit_on_mesh(found.roles, Mesh(0, 4))
    assert roles is not None
    search = AnnealingSearch(found, (0,), seed=0, streamed=(True,))
    state, cost = search.descend_by_role(
        SearchState(roles), search.state_step_s(SearchState(roles))
    )
    for role in state.assignments:
        for mesh in (Mesh(0, 4), Mesh(0, 2), Mesh(2, 2), Mesh(1, 1)):
            for option in found.list_options(role, mesh):
                other = SearchState({**state.assignments, role: option})
                assert search.state_step_s(other) >= cost * (1 - 1e-9)
