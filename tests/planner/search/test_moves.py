"""Rearrangements of roles over the meshes of a placement: complete, and all fit."""

import math

from streamrl.placement.meshes import Mesh
from streamrl.planner.search.annealing import AnnealingSearch, SearchState, iter_rearrangements
from tests.planner.search.problems import choices, grpo, ppo

LEFT, RIGHT, WHOLE = Mesh(0, 16), Mesh(16, 16), Mesh(0, 32)


def test_rearrangements_cover_every_mesh_and_all_devices():
    options = choices(grpo("4x8xA100", "qwen2.5-1.5b"))
    current = {"generator": LEFT, "policy": LEFT, "reference": RIGHT}
    roles = options.fit_on_meshes(current)
    assert roles is not None
    rearranged = list(iter_rearrangements(options, roles, 0, math.inf))
    meshes = {tuple(assignments[role].mesh for role in current) for assignments in rearranged}
    # Three roles on three meshes, except the current assignment.
    assert len(meshes) == len(rearranged) == 3**3 - 1
    assert tuple(current.values()) not in meshes
    assert (WHOLE, LEFT, RIGHT) in meshes


def test_search_moves_several_roles_at_once():
    options = choices(ppo("4x8xA100", "llama-34b"))
    search = AnnealingSearch(options, (0,), seed=0)
    halves = dict.fromkeys(options.roles, LEFT) | {"critic": RIGHT, "value": RIGHT}
    initial = options.fit_on_meshes(halves)
    assert initial is not None
    state = SearchState(initial)
    cost = search.estimate_state_step_s(state)
    rearranged, best_cost = search.rearrange_roles(state, cost)
    assert best_cost == search.estimate_state_step_s(rearranged) < cost
