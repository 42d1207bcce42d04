"""Random search over devices and parallelism of every role, from a given start.

Metropolis-Hastings with a falling temperature, as ReaL's search over per-call meshes
(arXiv:2406.14088), then a descent role by role. A lower bound (the load of the busiest device)
rejects most bad proposals before they are scheduled. The search counts proposals instead of time,
so equal seeds give equal placements.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from streamrl.placement.meshes import Mesh, find_max_load, iter_meshes
from streamrl.placement.placements import CallAssignment
from streamrl.planner.search.hybridflow import ParallelismChoices

INITIAL_TEMPERATURE, FINAL_TEMPERATURE = 0.05, 0.002
"""Temperatures of annealing, as fractions of the step time.

A proposal slower by the current temperature is accepted with probability 1 / e.
"""
REJECT_TEMPERATURES = 8.0
"""A lower bound this many temperatures above the current step time rejects a proposal."""
SMALL_CLUSTER_MESHES = 16
"""On a cluster with at most this many even meshes, a descent tries every mesh, and of pairs of
roles every even one."""
DESCENT_ROUNDS = 3
FASTEST_OPTIONS = 4
"""A moved role draws from this many fastest parallelisms of its mesh."""


@dataclass(frozen=True)
class SearchState:
    """Placement under search: assignment per role, and steps that generation runs ahead."""

    assignments: Mapping[str, CallAssignment]
    steps_ahead: int = 0


class AnnealingSearch:
    """Search for the best placement within a staleness bound.

    `aheads` lists how many steps generation may run ahead. streamed: see `Placement.is_streamed`.
    """

    def __init__(
        self,
        choices: ParallelismChoices,
        aheads: Sequence[int],
        *,
        seed: int,
        streamed: bool = True,
    ) -> None:
        self._choices = choices
        self._allowed_steps_ahead = list(aheads)
        self._is_streamed = streamed
        self._rng = np.random.default_rng(seed)
        self._even_meshes = list(iter_meshes(choices.problem.cluster))
        self._meshes = list(iter_meshes(choices.problem.cluster, has_uneven=True))
        self._find_neighbors = cache(self._list_neighbors)

    @property
    def is_small_cluster(self) -> bool:
        return len(self._even_meshes) <= SMALL_CLUSTER_MESHES

    def estimate_state_step_s(self, state: SearchState, limit_s: float = math.inf) -> float:
        """Return the step time of a state; inf if infeasible or certainly above `limit_s`."""
        if self.compute_lower_bound_s(state) >= limit_s:
            return math.inf
        is_disaggregated = len({assignment.mesh for assignment in state.assignments.values()}) > 1
        streamed = self._is_streamed or not is_disaggregated
        placement = self._choices.make_placement(
            state.assignments, state.steps_ahead, streamed=streamed
        )
        return self._choices.estimator.estimate_step_s(placement, limit_s)

    def compute_lower_bound_s(self, state: SearchState) -> float:
        """Return a lower bound of the step time: seconds of work of the busiest device."""
        return find_max_load(
            [
                (option.mesh, self._choices.compute_min_busy_s(role, option, state.steps_ahead))
                for role, option in state.assignments.items()
            ]
        )

    def run(self, start: SearchState, proposals: int) -> tuple[SearchState, float]:
        """Anneal a start state with this many proposals; return the best state and its step
        time."""
        moves: list[Callable[[SearchState], SearchState | None]] = [
            self._change_grid,
            self._change_grid,
            self._change_mesh,
            self._join_role,
            self._move_set,
            self._swap_roles,
            self._shift_border,
        ]
        if len(self._allowed_steps_ahead) > 1:
            moves.append(self._change_pace)
        current, cost = start, self.estimate_state_step_s(start)
        best, best_cost = current, cost
        for i in range(proposals):
            # Geometric cooling from the initial to the final temperature.
            temperature = INITIAL_TEMPERATURE * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** (
                i / max(1, proposals - 1)
            )
            proposed = moves[self._rng.integers(len(moves))](current)
            if proposed is None or proposed == current:
                continue
            limit_s = (
                cost * (1 + REJECT_TEMPERATURES * temperature) if math.isfinite(cost) else math.inf
            )
            proposed_cost = self.estimate_state_step_s(proposed, limit_s)
            if self._accept_move(cost, proposed_cost, temperature):
                current, cost = proposed, proposed_cost
            if proposed_cost < best_cost:
                best, best_cost = proposed, proposed_cost
        return best, best_cost

    def _accept_move(self, cost: float, proposed_cost: float, temperature: float) -> bool:
        if math.isinf(proposed_cost):
            return False
        if proposed_cost <= cost:
            return True
        return bool(self._rng.random() < math.exp((cost - proposed_cost) / (temperature * cost)))

    def descend_by_role(self, state: SearchState, cost: float) -> tuple[SearchState, float]:
        """Move roles, then pairs of roles, while the step time falls; return state and step time.

        cost: step time of `state`.
        """
        groups: list[tuple[str, ...]] = [(role,) for role in state.assignments]
        if self.is_small_cluster:
            groups += itertools.combinations(state.assignments, 2)
        for _ in range(DESCENT_ROUNDS):
            before = cost
            for group in groups:
                options = [
                    self._list_descent_options(state, role, len(group) > 1) for role in group
                ]
                for chosen in itertools.product(*options):
                    roles = {**state.assignments, **dict(zip(group, chosen, strict=True))}
                    proposed = replace(state, assignments=roles)
                    proposed_cost = self.estimate_state_step_s(proposed, cost)
                    if proposed_cost < cost:
                        state, cost = proposed, proposed_cost
            if cost == before:
                break
        return state, cost

    def _list_descent_options(
        self, state: SearchState, role: str, is_in_pair: bool
    ) -> list[CallAssignment]:
        """List options on a small cluster's meshes, else on used and neighboring meshes.

        A pair, and a role that moves, keeps its savings of memory or has none.
        """
        current = state.assignments[role]
        kept = {(False, False), (current.is_offloaded, current.checkpointing)}

        def list_options(mesh: Mesh) -> list[CallAssignment]:
            options = self._choices.list_options(role, mesh)
            return [o for o in options if (o.is_offloaded, o.checkpointing) in kept]

        if self.is_small_cluster and is_in_pair:
            return [option for mesh in self._even_meshes for option in list_options(mesh)]
        if self.is_small_cluster:
            return [o for mesh in self._meshes for o in self._choices.list_options(role, mesh)]
        current_mesh = state.assignments[role].mesh
        other_meshes = {option.mesh for option in state.assignments.values()} | set(
            self._find_neighbors(current_mesh)
        )
        options = list(self._choices.list_options(role, current_mesh))
        for mesh in sorted(other_meshes - {current_mesh}):
            # Scheduling is slower with generation ahead, so fewer options are tried.
            options += list_options(mesh)[: FASTEST_OPTIONS if state.steps_ahead else None]
        return options

    def _list_neighbors(self, mesh: Mesh) -> list[Mesh]:
        """List meshes with a common edge, and adjacent ones of equal size; else `mesh` itself."""
        neighbors = []
        for other in self._meshes:
            has_same_end = mesh.first + mesh.size == other.first + other.size
            is_adjacent = mesh.size == other.size and abs(mesh.first - other.first) == mesh.size
            if other != mesh and (mesh.first == other.first or has_same_end or is_adjacent):
                neighbors.append(other)
        return neighbors or [mesh]

    def _list_borders(self, left: Mesh, right: Mesh) -> list[int]:
        """Return the devices at which the border of two adjacent meshes may lie instead."""
        end, meshes = right.first + right.size, set(self._meshes)
        return [
            at
            for at in range(left.first + 1, end)
            if at != right.first
            and Mesh(left.first, at - left.first) in meshes
            and Mesh(at, end - at) in meshes
        ]

    # Moves: each returns a new state, or None if the drawn move is impossible.

    def _draw_role(self, state: SearchState) -> str:
        names = list(state.assignments)
        return names[self._rng.integers(len(names))]

    def _draw_option(self, role: str, mesh: Mesh) -> CallAssignment | None:
        """Draw a parallelism of a role on a mesh, half of the time the fastest."""
        options = self._choices.list_options(role, mesh)
        if not options:
            return None
        if self._rng.random() < 0.5:  # noqa: PLR2004
            return options[0]
        return options[self._rng.integers(min(FASTEST_OPTIONS, len(options)))]

    def _change_grid(self, state: SearchState) -> SearchState | None:
        role = self._draw_role(state)
        options = self._choices.list_options(role, state.assignments[role].mesh)
        option = options[self._rng.integers(len(options))]
        return replace(state, assignments={**state.assignments, role: option})

    def _place_roles(self, state: SearchState, moved: Mapping[str, Mesh]) -> SearchState | None:
        roles: dict[str, CallAssignment] = dict(state.assignments)
        for role, mesh in moved.items():
            option = self._draw_option(role, mesh)
            if option is None:
                return None
            roles[role] = option
        return replace(state, assignments=roles)

    def _change_mesh(self, state: SearchState) -> SearchState | None:
        mesh = self._meshes[self._rng.integers(len(self._meshes))]
        return self._place_roles(state, {self._draw_role(state): mesh})

    def _join_role(self, state: SearchState) -> SearchState | None:
        role, other = self._draw_role(state), self._draw_role(state)
        return self._place_roles(state, {role: state.assignments[other].mesh})

    def _move_set(self, state: SearchState) -> SearchState | None:
        current_mesh = state.assignments[self._draw_role(state)].mesh
        neighbors = self._find_neighbors(current_mesh)
        mesh = neighbors[self._rng.integers(len(neighbors))]
        return self._refit_sets(state, {current_mesh: mesh})

    def _swap_roles(self, state: SearchState) -> SearchState | None:
        role, other = self._draw_role(state), self._draw_role(state)
        return self._place_roles(
            state, {role: state.assignments[other].mesh, other: state.assignments[role].mesh}
        )

    def _shift_border(self, state: SearchState) -> SearchState | None:
        """Move the border between two adjacent meshes in use, with all their roles."""
        used = sorted({assignment.mesh for assignment in state.assignments.values()})
        pairs = [(a, b) for a in used for b in used if a.first + a.size == b.first]
        if not pairs:
            return None
        left, right = pairs[self._rng.integers(len(pairs))]
        borders = self._list_borders(left, right)
        if not borders:
            return None
        at = borders[self._rng.integers(len(borders))]
        new = {
            left: Mesh(left.first, at - left.first),
            right: Mesh(at, right.first + right.size - at),
        }
        return self._refit_sets(state, new)

    def _refit_sets(self, state: SearchState, moved: Mapping[Mesh, Mesh]) -> SearchState | None:
        """Move all roles of each mesh; draw each parallelism, or fit a mesh's roles together."""
        sets = {
            mesh: [
                role for role, assignment in state.assignments.items() if assignment.mesh == mesh
            ]
            for mesh in moved
        }
        if self._rng.random() < 0.5:  # noqa: PLR2004
            return self._place_roles(
                state, {r: moved[m] for m, roles in sets.items() for r in roles}
            )
        assignments: dict[str, CallAssignment] = dict(state.assignments)
        for mesh, roles in sets.items():
            fitted = self._choices.fit_on_mesh(roles, moved[mesh])
            if fitted is None:
                return None
            assignments |= fitted
        return replace(state, assignments=assignments)

    def _change_pace(self, state: SearchState) -> SearchState | None:
        ahead = self._allowed_steps_ahead[self._rng.integers(len(self._allowed_steps_ahead))]
        return replace(state, steps_ahead=ahead)
