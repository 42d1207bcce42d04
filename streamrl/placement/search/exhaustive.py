"""The best placement there is, by looking at all of them: for small clusters, to measure others by.

Every mesh and parallelism of every role, role by role. What cannot become better than the best one
so far is left: where memory is short already; where the busiest device has too much to do, or all
devices together; and, on policy, where what follows the first rollouts takes too long behind them.
Meshes that differ by a renumbering of devices nobody uses yet are looked at once. Of a model that
only scores and is never published, what is slower on the same devices and holds more is left, too.
"""

import math
from collections.abc import Sequence

from streamrl.dataflow import Kind
from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh, meshes
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.search.hybridflow_mapping import SLACK
from streamrl.placement.search.hybridflow_parallel import Choices
from streamrl.placement.steady_state.jobs import Flow

MOST_DEVICES = 8


class Oracle:
    """Looks at every placement. Raises ConfigError for a cluster that is too large."""

    def __init__(self, choices: Choices, aheads: Sequence[int], streamed: Sequence[bool]) -> None:
        cluster = choices.problem.cluster
        if cluster.size > MOST_DEVICES:
            raise ConfigError(
                f"oracle: {cluster.size} devices: every placement of at most {MOST_DEVICES}"
            )
        self._choices = choices
        self._aheads = list(aheads)
        self._streamed = list(streamed)
        self._leaders = _leaders(choices)
        every = list(meshes(cluster))
        self._options = {
            role: [one for mesh in every for one in self._worthwhile(role, mesh)]
            for role in choices.roles
        }
        self._best: tuple[float, Placement | None] = (math.inf, None)
        self._symmetric = cluster.is_uniform and (cluster.size & (cluster.size - 1)) == 0
        self.looked = 0

    def best(self, known: Placement | None = None) -> tuple[Placement | None, float]:
        """The best, and its step time; a placement that is `known` already spares some work."""
        if known is not None:
            self._best = (self._choices.estimator.step_s(known), known)
        for ahead in self._aheads:
            self._search(ahead)
        return self._best[1], self._best[0]

    def _worthwhile(self, role: str, mesh: Mesh) -> list[Assignment]:
        """What a role may have there: of one whose weights stay, nothing that another beats."""
        found = self._choices.of(role, mesh)
        if role in self._leaders:
            return found
        kept: list[tuple[Assignment, Sequence[float]]] = []
        for each in found:
            prices = self._prices(role, each)
            beaten = (all(a <= b for a, b in zip(other, prices, strict=True)) for _, other in kept)
            if not any(beaten):
                kept.append((each, prices))
        return [each for each, _ in kept]

    def _prices(self, role: str, option: Assignment) -> Sequence[float]:
        """Seconds of each call, and bytes it keeps and takes."""
        choices = self._choices
        memory = choices.estimator.costs.memory(choices.placement({role: option}))
        seconds = [choices.estimator.costs.call_s(s, option) for s in choices.stages[role]]
        return [*seconds, *(b for each in memory.values() for b in (each.kept, each.active))]

    def _search(self, ahead: int) -> None:
        """Under one bound; the generator first, as others wait for it, then who has most to do."""
        choices, size = self._choices, self._choices.problem.cluster.size
        self._ahead = ahead
        self._wants = {
            role: [choices.least_s(role, one, ahead) * SLACK for one in options]
            for role, options in self._options.items()
        }
        self._firsts = {
            one: choices.estimator.costs.first_s(one) * SLACK if not ahead else 0.0
            for one in self._options[choices.generator]
        }
        areas = {
            role: min(
                (w * o.mesh.size for w, o in zip(wants, self._options[role], strict=True)),
                default=math.inf,
            )
            for role, wants in self._wants.items()
        }
        self._order = sorted(areas, key=lambda role: (role != choices.generator, -areas[role]))
        left = [areas[role] for role in self._order]
        self._left = [sum(left[i:]) for i in range(len(left) + 1)]
        self._place({}, [0.0] * size, [0.0] * size)

    def _place(self, roles: dict[str, Assignment], busy: list[float], after: list[float]) -> None:
        """busy, after: by device, seconds of all there and of what follows the first rollouts."""
        depth = len(roles)
        if depth == len(self._order):
            self._look(roles)
            return
        role = self._order[depth]
        used = {each.mesh for each in roles.values()}
        for option, wants in zip(self._options[role], self._wants[role], strict=True):
            if self._symmetric and not self._first_alike(option.mesh, used):
                continue
            found = {**roles, role: option}
            taken, behind = _with(busy, option.mesh, wants), after
            if role != self._choices.generator:
                behind = _with(after, option.mesh, wants)
            first = self._firsts[found[self._choices.generator]]
            least = max(
                max(taken), (sum(taken) + self._left[depth + 1]) / len(taken), first + max(behind)
            )
            if least < self._best[0] and self._fits(found):
                self._place(found, taken, behind)

    def _fits(self, roles: dict[str, Assignment]) -> bool:
        """Whether those fit together of whom it can be told: who follows a model may share it."""
        sure = {
            role: each for role, each in roles.items() if self._leaders.get(role, role) in roles
        }
        return self._choices.fits(sure)

    def _first_alike(self, mesh: Mesh, used: set[Mesh]) -> bool:
        """Whether no mesh further left is the same but for numbers of unused devices."""
        first, size = 0, self._choices.problem.cluster.size
        while size > mesh.size:
            size //= 2
            left, right = Mesh(first, size), Mesh(first + size, size)
            if mesh.overlaps(right):
                within = (u for u in used if u.size <= size)
                if not any(u.overlaps(left) or u.overlaps(right) for u in within):
                    return False
                first += size
        return True

    def _look(self, roles: dict[str, Assignment]) -> None:
        apart = len({each.mesh for each in roles.values()}) > 1
        for streamed in self._streamed if apart else self._streamed[:1]:
            self.looked += 1
            placement = self._choices.placement(roles, self._ahead, streamed=streamed)
            seconds = self._choices.estimator.step_s(placement, self._best[0])
            if seconds < self._best[0]:
                self._best = (seconds, placement)


def _leaders(choices: Choices) -> dict[str, str]:
    """Of each role that is trained, or follows one that is, who that is."""
    flow = Flow.of(choices.problem.dataflow)
    found = {
        call.role: call.role if call.kind is Kind.TRAIN else flow.leader(call)
        for call in flow.calls
        if call.role in choices.roles
    }
    return {role: leader for role, leader in found.items() if leader}


def _with(seconds: list[float], mesh: Mesh, more: float) -> list[float]:
    taken = list(seconds)
    for device in mesh.devices:
        taken[device] += more
    return taken
