"""Other ways to divide roles among the meshes of a placement: they fit, and they are all there."""

import math

from streamrl.placement.meshes import Mesh
from streamrl.placement.search.annealing import AnnealingSearch, SearchState
from streamrl.placement.search.moves import iter_rearrangements
from tests.placement.search.problems import choices, grpo, ppo

LEFT, RIGHT, WHOLE = Mesh(0, 16), Mesh(16, 16), Mesh(0, 32)


def test_each_role_is_on_any_of_the_meshes_or_on_all_devices() -> None:
    found = choices(grpo("4x8xA100", "qwen2.5-1.5b"))
    here = {"generator": LEFT, "policy": LEFT, "reference": RIGHT}
    roles = found.fit_on_meshes(here)
    assert roles is not None
    ways = list(iter_rearrangements(found, roles, 0, math.inf))
    meshes = {tuple(each[role].mesh for role in here) for each in ways}
    # Three roles on three meshes, but for the way they are already.
    assert len(meshes) == len(ways) == 3**3 - 1
    assert tuple(here.values()) not in meshes
    assert (WHOLE, LEFT, RIGHT) in meshes


def test_they_fit_where_memory_is_short() -> None:
    found = choices(ppo("4x8xA100", "llama-34b"))
    roles = found.fit_on_mesh(found.roles, WHOLE)
    assert roles is not None
    halves = {
        role: LEFT if role in ("policy", "generator", "reference") else RIGHT for role in roles
    }
    begun = found.fit_on_meshes(halves)
    assert begun is not None
    ways = list(iter_rearrangements(found, begun, 0, math.inf))
    assert ways
    assert all(found.can_fit(each) for each in ways)


def test_what_is_sure_to_take_too_long_is_left_out() -> None:
    found = choices(ppo("4x8xA100"))
    roles = found.fit_on_mesh(found.roles, WHOLE)
    assert roles is not None
    halves = dict.fromkeys(roles, LEFT) | {"critic": RIGHT, "value": RIGHT}
    begun = found.fit_on_meshes(halves)
    assert begun is not None
    assert not list(iter_rearrangements(found, begun, 0, 0.0))


def test_the_search_goes_where_several_roles_have_to_move_at_once() -> None:
    found = choices(ppo("4x8xA100", "llama-34b"))
    search = AnnealingSearch(found, (0,), seed=0, streamed=(True,))
    halves = dict.fromkeys(found.roles, LEFT) | {"critic": RIGHT, "value": RIGHT}
    begun = found.fit_on_meshes(halves)
    assert begun is not None
    state = SearchState(begun)
    cost = search.state_step_s(state)
    other, least = search.rearrange_roles(state, cost)
    assert least == search.state_step_s(other) < cost
