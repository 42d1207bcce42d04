"""Random search over devices and parallelism of every role, from a placement that is known.

Metropolis-Hastings with a falling temperature, as ReaL's over per-call meshes (arXiv:2406.14088),
then a descent role by role. A proposal whose busiest device alone takes too long is not scheduled.
The same seed gives the same placement; proposals are counted, not timed.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh, iter_meshes
from streamrl.placement.placements import CallAssignment
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices, RoleAssignments
from streamrl.placement.search.moves import iter_rearrangements

INITIAL_TEMPERATURE, FINAL_TEMPERATURE = 0.05, 0.002
"""Of the step time: a change for the worse by so much is taken with odds 1 to e."""
REJECT_TEMPERATURES = 8.0
"""Temperatures above the current step time, beyond which a bound is enough to refuse."""
SMALL_CLUSTER_MESHES = 16
"""Of a cluster that has no more, the descent looks at all of them, and at roles in pairs."""
DESCENT_ROUNDS = 3
FASTEST_OPTIONS = 4
"""Of a role's parallelisms on new devices, one of so many is proposed."""
REARRANGE_TOLERANCE = 0.1
"""Of the step time: what another way to divide roles may take more before a descent from there."""
MAX_REARRANGE_DESCENTS = 3
"""Descents from so many."""


@dataclass(frozen=True)
class SearchState:
    """Where the search is: roles, how far ahead generation is, whether calls are streamed."""

    assignments: Mapping[str, CallAssignment]
    steps_ahead: int = 0
    is_streamed: bool = True


class AnnealingSearch:
    """Search for one bound of staleness; `aheads` are how far ahead it may choose to be."""

    def __init__(
        self,
        choices: ParallelismChoices,
        aheads: Sequence[int],
        *,
        seed: int,
        streamed: Sequence[bool],
    ) -> None:
        self._choices = choices
        self._allowed_steps_ahead = list(aheads)
        self._allowed_streaming = list(streamed)
        self._rng = np.random.default_rng(seed)
        self._meshes = list(iter_meshes(choices.problem.cluster))
        self._mesh_neighbors = _MeshNeighbors(choices.problem.cluster, self._meshes)
        self.num_scheduled = 0

    @property
    def is_small_cluster(self) -> bool:
        """Whether a descent looks at all there is for a role, and at roles in pairs."""
        return len(self._meshes) <= SMALL_CLUSTER_MESHES

    def state_step_s(self, state: SearchState, limit_s: float = math.inf) -> float:
        """Its step time; infinite if it cannot be, or is sure to be above the limit."""
        if self.lower_bound_s(state) >= limit_s:
            return math.inf
        self.num_scheduled += 1
        apart = len({each.mesh for each in state.assignments.values()}) > 1
        streamed = state.is_streamed or not apart
        placement = self._choices.make_placement(
            state.assignments, state.steps_ahead, streamed=streamed
        )
        return self._choices.estimator.step_s(placement, limit_s)

    def lower_bound_s(self, state: SearchState) -> float:
        """What the busiest device has to do."""
        wants = [
            (each.mesh, self._choices.min_busy_s(role, each, state.steps_ahead))
            for role, each in state.assignments.items()
        ]
        return max(
            sum(seconds for mesh, seconds in wants if mesh.first <= first < mesh.first + mesh.size)
            for first in {mesh.first for mesh, _ in wants}
        )

    def run(self, start: SearchState, proposals: int) -> tuple[SearchState, float]:
        """The best that so many proposals find, and its step time."""
        moves: list[Callable[[SearchState], SearchState | None]] = [
            self._change_grid,
            self._change_grid,
            self._change_mesh,
            self._join_role,
            self._move_set,
            self._swap_roles,
            self._shift_border,
        ]
        if len(self._allowed_steps_ahead) * len(self._allowed_streaming) > 1:
            moves.append(self._change_pace)
        now, cost = start, self.state_step_s(start)
        best, least = now, cost
        for i in range(proposals):
            warmth = INITIAL_TEMPERATURE * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** (
                i / max(1, proposals - 1)
            )
            proposed = moves[self._rng.integers(len(moves))](now)
            if proposed is None or proposed == now:
                continue
            reach = cost * (1 + REJECT_TEMPERATURES * warmth) if math.isfinite(cost) else math.inf
            found = self.state_step_s(proposed, reach)
            if self._accept_move(cost, found, warmth):
                now, cost = proposed, found
            if found < least:
                best, least = proposed, found
        return best, least

    def _accept_move(self, cost: float, found: float, warmth: float) -> bool:
        if math.isinf(found):
            return False
        if found <= cost:
            return True
        return bool(self._rng.random() < math.exp((cost - found) / (warmth * cost)))

    def descend_by_role(self, state: SearchState, cost: float) -> tuple[SearchState, float]:
        """Role by role on whatever is better for it, then in pairs, until nothing is."""
        groups: list[tuple[str, ...]] = [(role,) for role in state.assignments]
        if self.is_small_cluster:
            groups += itertools.combinations(state.assignments, 2)
        for _ in range(DESCENT_ROUNDS):
            before = cost
            for group in groups:
                options = [self._list_descent_options(state, role) for role in group]
                for chosen in itertools.product(*options):
                    roles = {**state.assignments, **dict(zip(group, chosen, strict=True))}
                    proposed = replace(state, assignments=roles)
                    found = self.state_step_s(proposed, cost)
                    if found < cost:
                        state, cost = proposed, found
            if cost == before:
                break
        return state, cost

    def _list_descent_options(self, state: SearchState, role: str) -> list[CallAssignment]:
        """All of a small cluster.

        Else of where it is, of where others are, and of what is near.
        """
        if self.is_small_cluster:
            return [
                each for mesh in self._meshes for each in self._choices.list_options(role, mesh)
            ]
        here = state.assignments[role].mesh
        near = {each.mesh for each in state.assignments.values()} | set(
            self._mesh_neighbors.find_neighbors(here)
        )
        found = list(self._choices.list_options(role, here))
        for mesh in sorted(near - {here}):
            # Schedules with generation ahead take longer.
            found += self._choices.list_options(role, mesh)[
                : FASTEST_OPTIONS if state.steps_ahead else None
            ]
        return found

    def rearrange_roles(self, state: SearchState, cost: float) -> tuple[SearchState, float]:
        """The best of the ways to divide roles among its meshes, after a descent of each."""
        ways = [
            replace(state, assignments=roles)
            for roles in iter_rearrangements(
                self._choices, state.assignments, state.steps_ahead, cost
            )
        ]
        timed = sorted(
            (self.state_step_s(way, cost * (1 + REARRANGE_TOLERANCE)), i)
            for i, way in enumerate(ways)
        )
        for found, i in timed[:MAX_REARRANGE_DESCENTS]:
            if math.isfinite(found):
                other, least = self.descend_by_role(ways[i], found)
                if least < cost:
                    state, cost = other, least
        return state, cost

    # Moves: each gives another state, or None where it cannot be made.

    def _draw_role(self, state: SearchState) -> str:
        names = list(state.assignments)
        return names[self._rng.integers(len(names))]

    def _draw_option(self, role: str, mesh: Mesh) -> CallAssignment | None:
        """One of the fastest there, the first as often as not."""
        found = self._choices.list_options(role, mesh)
        if not found:
            return None
        if self._rng.random() < 0.5:  # noqa: PLR2004
            return found[0]
        return found[self._rng.integers(min(FASTEST_OPTIONS, len(found)))]

    def _change_grid(self, state: SearchState) -> SearchState | None:
        role = self._draw_role(state)
        found = self._choices.list_options(role, state.assignments[role].mesh)
        option = found[self._rng.integers(len(found))]
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
        here = state.assignments[self._draw_role(state)].mesh
        near = self._mesh_neighbors.find_neighbors(here)
        mesh = near[self._rng.integers(len(near))]
        return self._refit_sets(state, {here: mesh})

    def _swap_roles(self, state: SearchState) -> SearchState | None:
        one, other = self._draw_role(state), self._draw_role(state)
        return self._place_roles(
            state, {one: state.assignments[other].mesh, other: state.assignments[one].mesh}
        )

    def _shift_border(self, state: SearchState) -> SearchState | None:
        """Move the border of two sets: what one loses, the other gets."""
        used = sorted({each.mesh for each in state.assignments.values()})
        pairs = [(a, b) for a in used for b in used if a.first + a.size == b.first]
        if not pairs:
            return None
        left, right = pairs[self._rng.integers(len(pairs))]
        borders = self._mesh_neighbors.list_borders(left, right)
        if not borders:
            return None
        at = borders[self._rng.integers(len(borders))]
        new = {
            left: Mesh(left.first, at - left.first),
            right: Mesh(at, right.first + right.size - at),
        }
        return self._refit_sets(state, new)

    def _refit_sets(self, state: SearchState, moved: Mapping[Mesh, Mesh]) -> SearchState | None:
        """With all that is on some meshes on others: as fits together, or as it comes."""
        sets = {
            mesh: [role for role, each in state.assignments.items() if each.mesh == mesh]
            for mesh in moved
        }
        if self._rng.random() < 0.5:  # noqa: PLR2004
            return self._place_roles(
                state, {r: moved[m] for m, roles in sets.items() for r in roles}
            )
        found: dict[str, CallAssignment] = dict(state.assignments)
        for mesh, roles in sets.items():
            fitted = self._choices.fit_on_mesh(roles, moved[mesh])
            if fitted is None:
                return None
            found |= fitted
        return replace(state, assignments=found)

    def _change_pace(self, state: SearchState) -> SearchState | None:
        ahead = self._allowed_steps_ahead[self._rng.integers(len(self._allowed_steps_ahead))]
        streamed = self._allowed_streaming[self._rng.integers(len(self._allowed_streaming))]
        return replace(state, steps_ahead=ahead, is_streamed=streamed)


class _MeshNeighbors:
    """Meshes that differ little from one another."""

    def __init__(self, cluster: Cluster, every: Sequence[Mesh]) -> None:
        self._meshes = list(every)
        self._mesh_set = set(every)
        self._num_devices = cluster.num_devices
        self._neighbors: dict[Mesh, list[Mesh]] = {}

    def find_neighbors(self, mesh: Mesh) -> list[Mesh]:
        """With a common beginning or end, or as large and next to it."""
        if mesh not in self._neighbors:
            self._neighbors[mesh] = [
                other
                for other in self._meshes
                if other != mesh
                and (self._have_common_edge(mesh, other) or self._are_adjacent(mesh, other))
            ] or [mesh]
        return self._neighbors[mesh]

    def _have_common_edge(self, one: Mesh, other: Mesh) -> bool:
        return one.first == other.first or one.first + one.size == other.first + other.size

    def _are_adjacent(self, one: Mesh, other: Mesh) -> bool:
        return one.size == other.size and abs(one.first - other.first) == one.size

    def list_borders(self, left: Mesh, right: Mesh) -> list[int]:
        """Where else the border between two of them may be."""
        end = right.first + right.size
        return [
            at
            for at in range(left.first + 1, end)
            if at != right.first
            and Mesh(left.first, at - left.first) in self._mesh_set
            and Mesh(at, end - at) in self._mesh_set
        ]


def make_start(roles: RoleAssignments, ahead: int, *, streamed: bool = True) -> SearchState:
    """Where a search may begin."""
    return SearchState(dict(roles), ahead, streamed)
