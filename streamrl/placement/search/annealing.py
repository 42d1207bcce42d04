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
from streamrl.placement.meshes import Mesh, meshes
from streamrl.placement.placements import Assignment
from streamrl.placement.search.hybridflow_parallel import Choices, Roles
from streamrl.placement.search.moves import rearranged

HOT, COLD = 0.05, 0.002
"""Of the step time: a change for the worse by so much is taken with odds 1 to e."""
HOPELESS = 8.0
"""Temperatures above the current step time, beyond which a bound is enough to refuse."""
FEW_MESHES = 16
"""Of a cluster that has no more, the descent looks at all of them, and at roles in pairs."""
ROUNDS = 3
FASTEST = 4
"""Of a role's parallelisms on new devices, one of so many is proposed."""
NEARLY = 0.1
"""Of the step time: what another way to divide roles may take more before a descent from there."""
REARRANGED = 3
"""Descents from so many."""


@dataclass(frozen=True)
class State:
    """Where the search is: roles, how far ahead generation is, whether calls are streamed."""

    roles: Mapping[str, Assignment]
    ahead: int = 0
    streamed: bool = True


class Annealing:
    """Search for one bound of staleness; `aheads` are how far ahead it may choose to be."""

    def __init__(
        self, choices: Choices, aheads: Sequence[int], *, seed: int, streamed: Sequence[bool]
    ) -> None:
        self._choices = choices
        self._aheads = list(aheads)
        self._streamed = list(streamed)
        self._rng = np.random.default_rng(seed)
        self._meshes = list(meshes(choices.problem.cluster))
        self._neighbours = _Neighbours(choices.problem.cluster, self._meshes)
        self.scheduled = 0

    @property
    def is_small(self) -> bool:
        """Whether a descent looks at all there is for a role, and at roles in pairs."""
        return len(self._meshes) <= FEW_MESHES

    def cost_s(self, state: State, limit_s: float = math.inf) -> float:
        """Its step time; infinite if it cannot be, or is sure to be above the limit."""
        if self.least_s(state) >= limit_s:
            return math.inf
        self.scheduled += 1
        apart = len({each.mesh for each in state.roles.values()}) > 1
        streamed = state.streamed or not apart
        placement = self._choices.placement(state.roles, state.ahead, streamed=streamed)
        return self._choices.estimator.step_s(placement, limit_s)

    def least_s(self, state: State) -> float:
        """What the busiest device has to do."""
        wants = [
            (each.mesh, self._choices.least_s(role, each, state.ahead))
            for role, each in state.roles.items()
        ]
        return max(
            sum(seconds for mesh, seconds in wants if mesh.first <= first < mesh.first + mesh.size)
            for first in {mesh.first for mesh, _ in wants}
        )

    def run(self, start: State, proposals: int) -> tuple[State, float]:
        """The best that so many proposals find, and its step time."""
        moves: list[Callable[[State], State | None]] = [
            self._regrid,
            self._regrid,
            self._remesh,
            self._join,
            self._move_set,
            self._swap,
            self._shift,
        ]
        if len(self._aheads) * len(self._streamed) > 1:
            moves.append(self._pace)
        now, cost = start, self.cost_s(start)
        best, least = now, cost
        for i in range(proposals):
            warmth = HOT * (COLD / HOT) ** (i / max(1, proposals - 1))
            proposed = moves[self._rng.integers(len(moves))](now)
            if proposed is None or proposed == now:
                continue
            reach = cost * (1 + HOPELESS * warmth) if math.isfinite(cost) else math.inf
            found = self.cost_s(proposed, reach)
            if self._takes(cost, found, warmth):
                now, cost = proposed, found
            if found < least:
                best, least = proposed, found
        return best, least

    def _takes(self, cost: float, found: float, warmth: float) -> bool:
        if math.isinf(found):
            return False
        if found <= cost:
            return True
        return bool(self._rng.random() < math.exp((cost - found) / (warmth * cost)))

    def descend(self, state: State, cost: float) -> tuple[State, float]:
        """Role by role on whatever is better for it, then in pairs, until nothing is."""
        groups: list[tuple[str, ...]] = [(role,) for role in state.roles]
        if self.is_small:
            groups += itertools.combinations(state.roles, 2)
        for _ in range(ROUNDS):
            before = cost
            for group in groups:
                options = [self._options(state, role) for role in group]
                for chosen in itertools.product(*options):
                    roles = {**state.roles, **dict(zip(group, chosen, strict=True))}
                    proposed = replace(state, roles=roles)
                    found = self.cost_s(proposed, cost)
                    if found < cost:
                        state, cost = proposed, found
            if cost == before:
                break
        return state, cost

    def _options(self, state: State, role: str) -> list[Assignment]:
        """All of a small cluster.

        Else of where it is, of where others are, and of what is near.
        """
        if self.is_small:
            return [each for mesh in self._meshes for each in self._choices.of(role, mesh)]
        here = state.roles[role].mesh
        near = {each.mesh for each in state.roles.values()} | set(self._neighbours.of(here))
        found = list(self._choices.of(role, here))
        for mesh in sorted(near - {here}):
            # Schedules with generation ahead take longer.
            found += self._choices.of(role, mesh)[: FASTEST if state.ahead else None]
        return found

    def rearrange(self, state: State, cost: float) -> tuple[State, float]:
        """The best of the ways to divide roles among its meshes, after a descent of each."""
        ways = [
            replace(state, roles=roles)
            for roles in rearranged(self._choices, state.roles, state.ahead, cost)
        ]
        timed = sorted((self.cost_s(way, cost * (1 + NEARLY)), i) for i, way in enumerate(ways))
        for found, i in timed[:REARRANGED]:
            if math.isfinite(found):
                other, least = self.descend(ways[i], found)
                if least < cost:
                    state, cost = other, least
        return state, cost

    # Moves: each gives another state, or None where it cannot be made.

    def _role(self, state: State) -> str:
        names = list(state.roles)
        return names[self._rng.integers(len(names))]

    def _on(self, role: str, mesh: Mesh) -> Assignment | None:
        """One of the fastest there, the first as often as not."""
        found = self._choices.of(role, mesh)
        if not found:
            return None
        if self._rng.random() < 0.5:  # noqa: PLR2004
            return found[0]
        return found[self._rng.integers(min(FASTEST, len(found)))]

    def _regrid(self, state: State) -> State | None:
        role = self._role(state)
        found = self._choices.of(role, state.roles[role].mesh)
        option = found[self._rng.integers(len(found))]
        return replace(state, roles={**state.roles, role: option})

    def _placed(self, state: State, moved: Mapping[str, Mesh]) -> State | None:
        roles: dict[str, Assignment] = dict(state.roles)
        for role, mesh in moved.items():
            option = self._on(role, mesh)
            if option is None:
                return None
            roles[role] = option
        return replace(state, roles=roles)

    def _remesh(self, state: State) -> State | None:
        mesh = self._meshes[self._rng.integers(len(self._meshes))]
        return self._placed(state, {self._role(state): mesh})

    def _join(self, state: State) -> State | None:
        role, other = self._role(state), self._role(state)
        return self._placed(state, {role: state.roles[other].mesh})

    def _move_set(self, state: State) -> State | None:
        here = state.roles[self._role(state)].mesh
        near = self._neighbours.of(here)
        mesh = near[self._rng.integers(len(near))]
        return self._refitted(state, {here: mesh})

    def _swap(self, state: State) -> State | None:
        one, other = self._role(state), self._role(state)
        return self._placed(state, {one: state.roles[other].mesh, other: state.roles[one].mesh})

    def _shift(self, state: State) -> State | None:
        """Move the border of two sets: what one loses, the other gets."""
        used = sorted({each.mesh for each in state.roles.values()})
        pairs = [(a, b) for a in used for b in used if a.first + a.size == b.first]
        if not pairs:
            return None
        left, right = pairs[self._rng.integers(len(pairs))]
        borders = self._neighbours.borders(left, right)
        if not borders:
            return None
        at = borders[self._rng.integers(len(borders))]
        new = {
            left: Mesh(left.first, at - left.first),
            right: Mesh(at, right.first + right.size - at),
        }
        return self._refitted(state, new)

    def _refitted(self, state: State, moved: Mapping[Mesh, Mesh]) -> State | None:
        """With all that is on some meshes on others: as fits together, or as it comes."""
        sets = {
            mesh: [role for role, each in state.roles.items() if each.mesh == mesh]
            for mesh in moved
        }
        if self._rng.random() < 0.5:  # noqa: PLR2004
            return self._placed(state, {r: moved[m] for m, roles in sets.items() for r in roles})
        found: dict[str, Assignment] = dict(state.roles)
        for mesh, roles in sets.items():
            fitted = self._choices.together(roles, moved[mesh])
            if fitted is None:
                return None
            found |= fitted
        return replace(state, roles=found)

    def _pace(self, state: State) -> State | None:
        ahead = self._aheads[self._rng.integers(len(self._aheads))]
        streamed = self._streamed[self._rng.integers(len(self._streamed))]
        return replace(state, ahead=ahead, streamed=streamed)


class _Neighbours:
    """Meshes that differ little from one another."""

    def __init__(self, cluster: Cluster, every: Sequence[Mesh]) -> None:
        self._every = list(every)
        self._known = set(every)
        self._whole = cluster.size
        self._near: dict[Mesh, list[Mesh]] = {}

    def of(self, mesh: Mesh) -> list[Mesh]:
        """With a common beginning or end, or as large and next to it."""
        if mesh not in self._near:
            self._near[mesh] = [
                other
                for other in self._every
                if other != mesh and (self._common(mesh, other) or self._beside(mesh, other))
            ] or [mesh]
        return self._near[mesh]

    def _common(self, one: Mesh, other: Mesh) -> bool:
        return one.first == other.first or one.first + one.size == other.first + other.size

    def _beside(self, one: Mesh, other: Mesh) -> bool:
        return one.size == other.size and abs(one.first - other.first) == one.size

    def borders(self, left: Mesh, right: Mesh) -> list[int]:
        """Where else the border between two of them may be."""
        end = right.first + right.size
        return [
            at
            for at in range(left.first + 1, end)
            if at != right.first
            and Mesh(left.first, at - left.first) in self._known
            and Mesh(at, end - at) in self._known
        ]


def start_of(roles: Roles, ahead: int, *, streamed: bool = True) -> State:
    """Where a search may begin."""
    return State(dict(roles), ahead, streamed)
