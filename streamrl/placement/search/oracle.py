"""The best placement there is, by looking at all of them: for small clusters, to measure others by.

Every mesh and parallelism of every role, role by role. What cannot become better than the best one
so far is left: the busiest device has to do what is placed on it, and all devices together what
there is. Meshes that differ by a renumbering of devices nobody uses yet are looked at once.
"""

import math
from collections.abc import Sequence

from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh, meshes
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.search.mapping import SLACK
from streamrl.placement.search.parallel import Choices

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
        self._paces = [(ahead, flows) for ahead in aheads for flows in streamed]
        self._ahead = max(aheads)
        options = {
            role: [each for mesh in meshes(cluster) for each in choices.of(role, mesh)]
            for role in choices.roles
        }
        least = {role: self._area(role, options[role]) for role in options}
        # Those that matter most first: then most is left early.
        self._order = sorted(options, key=lambda role: -least[role])
        self._options = [options[role] for role in self._order]
        areas = [least[role] for role in self._order]
        self._left = [sum(areas[i:]) for i in range(len(areas) + 1)]
        self._best: tuple[float, Placement | None] = (math.inf, None)
        self._symmetric = cluster.is_uniform and (cluster.size & (cluster.size - 1)) == 0
        self.looked = 0

    def _wants(self, role: str, option: Assignment) -> float:
        return self._choices.least_s(role, option, self._ahead) * SLACK

    def _area(self, role: str, options: Sequence[Assignment]) -> float:
        """The fewest device seconds."""
        return min((self._wants(role, o) * o.mesh.size for o in options), default=math.inf)

    def best(self, known: Placement | None = None) -> tuple[Placement | None, float]:
        """The best, and its step time; a placement that is `known` already spares some work."""
        if known is not None:
            self._best = (self._choices.estimator.step_s(known), known)
        self._place({}, [0.0] * self._choices.problem.cluster.size)
        return self._best[1], self._best[0]

    def _place(self, roles: dict[str, Assignment], busy: list[float]) -> None:
        depth = len(roles)
        if depth == len(self._order):
            self._look(roles)
            return
        role = self._order[depth]
        used = {each.mesh for each in roles.values()}
        for option in self._options[depth]:
            if self._symmetric and not self._first_alike(option.mesh, used):
                continue
            wants = self._wants(role, option)
            taken = list(busy)
            for device in option.mesh.devices:
                taken[device] += wants
            least = max(
                *taken, (sum(taken) + self._left[depth + 1]) / len(taken), self._chain(roles)
            )
            if least < self._best[0]:
                self._place({**roles, role: option}, taken)

    def _chain(self, roles: dict[str, Assignment]) -> float:
        """On policy, generation and the rest of a step follow one another."""
        generator = self._choices.generator
        if self._ahead or generator not in roles:
            return 0.0
        return self._wants(generator, roles[generator])

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
        if not self._choices.fits(roles):
            return
        for ahead, streamed in self._paces:
            self.looked += 1
            placement = self._choices.placement(roles, ahead, streamed=streamed)
            seconds = self._choices.estimator.step_s(placement)
            if seconds < self._best[0]:
                self._best = (seconds, placement)
