"""The best placement there is, by looking at all of them: for small clusters, to measure others by.

Every mesh and parallelism of every role, role by role. What cannot become better than the best one
so far is left: where memory is short already; where the busiest device has too much to do, or all
devices together; and, on policy, where what follows the first rollouts takes too long behind them.
Meshes that differ by a renumbering of devices nobody uses yet are looked at once. Of a model that
only scores and is never published, what is slower on the same devices and holds more is left, too.
"""

import math
from collections.abc import Sequence

from streamrl.dataflow import CallKind
from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh, iter_meshes
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.search.hybridflow_mapping import BOUND_SLACK
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.steady_state.jobs import CallGraph

MAX_DEVICES = 8


class ExhaustiveSearch:
    """Looks at every placement. Raises ConfigError for a cluster that is too large."""

    def __init__(
        self, choices: ParallelismChoices, aheads: Sequence[int], streamed: Sequence[bool]
    ) -> None:
        cluster = choices.problem.cluster
        if cluster.num_devices > MAX_DEVICES:
            raise ConfigError(
                f"oracle: {cluster.num_devices} devices: every placement of at most {MAX_DEVICES}"
            )
        self._choices = choices
        self._allowed_steps_ahead = list(aheads)
        self._allowed_streaming = list(streamed)
        self._leader_by_role = _find_leaders(choices)
        every = list(iter_meshes(cluster))
        self._options = {
            role: [one for mesh in every for one in self._list_undominated(role, mesh)]
            for role in choices.roles
        }
        self._best: tuple[float, Placement | None] = (math.inf, None)
        self._is_symmetric = (
            cluster.is_uniform and (cluster.num_devices & (cluster.num_devices - 1)) == 0
        )
        self.num_scheduled = 0

    def find_best(self, known: Placement | None = None) -> tuple[Placement | None, float]:
        """The best, and its step time; a placement that is `known` already spares some work."""
        if known is not None:
            self._best = (self._choices.estimator.step_s(known), known)
        for ahead in self._allowed_steps_ahead:
            self._search_steps_ahead(ahead)
        return self._best[1], self._best[0]

    def _list_undominated(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """What a role may have there: of one whose weights stay, nothing that another beats."""
        found = self._choices.list_options(role, mesh)
        if role in self._leader_by_role:
            return found
        kept: list[tuple[CallAssignment, Sequence[float]]] = []
        for each in found:
            prices = self._option_costs(role, each)
            beaten = (all(a <= b for a, b in zip(other, prices, strict=True)) for _, other in kept)
            if not any(beaten):
                kept.append((each, prices))
        return [each for each, _ in kept]

    def _option_costs(self, role: str, option: CallAssignment) -> Sequence[float]:
        """Seconds of each call, and bytes it keeps and takes."""
        choices = self._choices
        memory = choices.estimator.costs.predict_memory(choices.make_placement({role: option}))
        seconds = [
            choices.estimator.costs.call_duration_s(s, option) for s in choices.stages_by_role[role]
        ]
        return [
            *seconds,
            *(b for each in memory.values() for b in (each.resident_bytes, each.active_bytes)),
        ]

    def _search_steps_ahead(self, ahead: int) -> None:
        """Under one bound; the generator first, as others wait for it, then who has most to do."""
        choices, size = self._choices, self._choices.problem.cluster.num_devices
        self._steps_ahead = ahead
        self._busy_s = {
            role: [choices.min_busy_s(role, one, ahead) * BOUND_SLACK for one in options]
            for role, options in self._options.items()
        }
        self._first_rollouts_s = {
            one: choices.estimator.costs.first_rollouts_s(one) * BOUND_SLACK if not ahead else 0.0
            for one in self._options[choices.generator_role]
        }
        areas = {
            role: min(
                (w * o.mesh.size for w, o in zip(wants, self._options[role], strict=True)),
                default=math.inf,
            )
            for role, wants in self._busy_s.items()
        }
        self._role_order = sorted(
            areas, key=lambda role: (role != choices.generator_role, -areas[role])
        )
        left = [areas[role] for role in self._role_order]
        self._remaining_device_s = [sum(left[i:]) for i in range(len(left) + 1)]
        self._place_next_role({}, [0.0] * size, [0.0] * size)

    def _place_next_role(
        self, roles: dict[str, CallAssignment], busy: list[float], after: list[float]
    ) -> None:
        """busy, after: by device, seconds of all there and of what follows the first rollouts."""
        depth = len(roles)
        if depth == len(self._role_order):
            self._evaluate_roles(roles)
            return
        role = self._role_order[depth]
        used = {each.mesh for each in roles.values()}
        for option, wants in zip(self._options[role], self._busy_s[role], strict=True):
            if self._is_symmetric and not self._is_canonical_mesh(option.mesh, used):
                continue
            found = {**roles, role: option}
            taken, behind = _add_seconds(busy, option.mesh, wants), after
            if role != self._choices.generator_role:
                behind = _add_seconds(after, option.mesh, wants)
            first = self._first_rollouts_s[found[self._choices.generator_role]]
            least = max(
                max(taken),
                (sum(taken) + self._remaining_device_s[depth + 1]) / len(taken),
                first + max(behind),
            )
            if least < self._best[0] and self._can_still_fit(found):
                self._place_next_role(found, taken, behind)

    def _can_still_fit(self, roles: dict[str, CallAssignment]) -> bool:
        """Whether those fit together of whom it can be told: who follows a model may share it."""
        sure = {
            role: each
            for role, each in roles.items()
            if self._leader_by_role.get(role, role) in roles
        }
        return self._choices.can_fit(sure)

    def _is_canonical_mesh(self, mesh: Mesh, used: set[Mesh]) -> bool:
        """Whether no mesh further left is the same but for numbers of unused devices."""
        first, size = 0, self._choices.problem.cluster.num_devices
        while size > mesh.size:
            size //= 2
            left, right = Mesh(first, size), Mesh(first + size, size)
            if mesh.overlaps(right):
                within = (u for u in used if u.size <= size)
                if not any(u.overlaps(left) or u.overlaps(right) for u in within):
                    return False
                first += size
        return True

    def _evaluate_roles(self, roles: dict[str, CallAssignment]) -> None:
        apart = len({each.mesh for each in roles.values()}) > 1
        for streamed in self._allowed_streaming if apart else self._allowed_streaming[:1]:
            self.num_scheduled += 1
            placement = self._choices.make_placement(roles, self._steps_ahead, streamed=streamed)
            seconds = self._choices.estimator.step_s(placement, self._best[0])
            if seconds < self._best[0]:
                self._best = (seconds, placement)


def _find_leaders(choices: ParallelismChoices) -> dict[str, str]:
    """Of each role that is trained, or follows one that is, who that is."""
    flow = CallGraph.from_dataflow(choices.problem.dataflow)
    found = {
        call.role: call.role if call.kind is CallKind.TRAIN else flow.find_leader(call)
        for call in flow.calls
        if call.role in choices.roles
    }
    return {role: leader for role, leader in found.items() if leader}


def _add_seconds(seconds: list[float], mesh: Mesh, more: float) -> list[float]:
    taken = list(seconds)
    for device in mesh.devices:
        taken[device] += more
    return taken
