"""Exhaustive search for small clusters; a reference to measure other searches by.

The search assigns every even mesh and parallelism role by role (branch and bound), and prunes a
branch

- if the roles assigned so far already exceed the memory of a device;
- if the busiest device, or all devices together, have too much work to beat the best placement;
- on policy, if the work after the first rollouts takes too long;
- if the mesh differs from an earlier mesh only by a renumbering of unused devices;
- for a forward-only model with fixed weights, if another option on the same devices is no slower
  and needs no more memory.
"""

import math
from collections.abc import Sequence

from streamrl.dataflow import GENERATE_CALL, CallKind
from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh, iter_meshes
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.call_cost import CallCost
from streamrl.planner.costs.call_durations import choose_cuts
from streamrl.planner.costs.call_timings import estimate_generator_timing
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.search.hybridflow import BOUND_SLACK, ParallelismChoices
from streamrl.planner.steady_state.jobs import CallGraph

MAX_DEVICES = 8


class ExhaustiveSearch:
    """Search that evaluates every placement it cannot prune, for small clusters.

    aheads: how many steps generation may run ahead.

    Raise ConfigError if the cluster is too large.
    """

    def __init__(self, choices: ParallelismChoices, aheads: Sequence[int]) -> None:
        cluster = choices.problem.cluster
        if cluster.num_devices > MAX_DEVICES:
            raise ConfigError(
                f"exhaustive search: {cluster.num_devices} devices: must be at most {MAX_DEVICES}"
            )
        self._choices = choices
        self._allowed_steps_ahead = list(aheads)
        self._leader_by_role = _find_leaders(choices)
        meshes = list(iter_meshes(cluster))
        self._options = {
            role: [option for mesh in meshes for option in self._list_undominated(role, mesh)]
            for role in choices.roles
        }
        self._best: tuple[float, Placement | None] = (math.inf, None)
        self._is_symmetric = (
            cluster.is_uniform and (cluster.num_devices & (cluster.num_devices - 1)) == 0
        )
        self._generation = GenerationModel(choices.problem.workload)
        self.num_scheduled = 0

    def find_best(self, known: Placement | None = None) -> tuple[Placement | None, float]:
        """Return the best placement and its step time; None and inf if no placement fits.

        known: a good placement, so that more branches are pruned.
        """
        if known is not None:
            self._best = (self._choices.estimator.estimate_step_s(known), known)
        for ahead in self._allowed_steps_ahead:
            self._search_steps_ahead(ahead)
        return self._best[1], self._best[0]

    def _list_undominated(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """Return the parallelism options of a role on a mesh.

        For a role with fixed weights, leave out an option if another option is no slower and needs
        no more memory.
        """
        options = self._choices.list_options(role, mesh)
        if role in self._leader_by_role:
            return options
        undominated: list[tuple[CallAssignment, Sequence[float]]] = []
        for option in options:
            costs = self._option_costs(role, option)
            dominated = (
                all(a <= b for a, b in zip(other, costs, strict=True)) for _, other in undominated
            )
            if not any(dominated):
                undominated.append((option, costs))
        return [option for option, _ in undominated]

    def _option_costs(self, role: str, option: CallAssignment) -> Sequence[float]:
        """Return costs of a role's option: seconds of each stage, resident and active bytes."""
        choices = self._choices
        memory = choices.estimator.costs.predict_memory(choices.make_placement({role: option}))
        seconds = [
            choices.estimator.costs.call_duration_s(s, option) for s in choices.stages_by_role[role]
        ]
        return [
            *seconds,
            *(
                b
                for call_memory in memory.values()
                for b in (call_memory.resident_bytes, call_memory.active_bytes)
            ),
        ]

    def _estimate_first_rollouts_s(self, option: CallAssignment) -> float:
        """Return the seconds until a generator alone on its devices completes its first groups."""
        choices, problem = self._choices, self._choices.problem
        costs, shape = choices.estimator.costs, problem.find_model(GENERATE_CALL.stage)
        assert shape is not None
        cost = CallCost(shape, option, problem.workload, problem.cluster, costs.constants)
        alone = choices.make_placement({choices.generator_role: option})
        timing = estimate_generator_timing(cost, costs.compute_kv_capacity_bytes(alone))
        cuts = choose_cuts(problem.workload.groups_per_step)
        return self._generation.find_completions_s(timing, cuts)[0]

    def _search_steps_ahead(self, ahead: int) -> None:
        """Search all placements in which generation runs `ahead` steps ahead.

        The generator is assigned first because other roles wait for it, then roles by decreasing
        work.
        """
        choices, size = self._choices, self._choices.problem.cluster.num_devices
        self._steps_ahead = ahead
        self._busy_s = {
            role: [
                choices.compute_min_busy_s(role, option, ahead) * BOUND_SLACK for option in options
            ]
            for role, options in self._options.items()
        }
        self._first_rollouts_s = {
            option: self._estimate_first_rollouts_s(option) * BOUND_SLACK if not ahead else 0.0
            for option in self._options[choices.generator_role]
        }
        device_s = {
            role: min(
                (w * o.mesh.size for w, o in zip(busy_s, self._options[role], strict=True)),
                default=math.inf,
            )
            for role, busy_s in self._busy_s.items()
        }
        self._role_order = sorted(
            device_s, key=lambda role: (role != choices.generator_role, -device_s[role])
        )
        remaining = [device_s[role] for role in self._role_order]
        self._remaining_device_s = [sum(remaining[i:]) for i in range(len(remaining) + 1)]
        self._place_next_role({}, [0.0] * size, [0.0] * size)

    def _place_next_role(
        self, roles: dict[str, CallAssignment], busy_s: list[float], after_s: list[float]
    ) -> None:
        """Try every option of the next role, and recurse to the role after it.

        roles: assignments so far.
        busy_s: seconds of work per device.
        after_s: the part of busy_s that can start only after the first rollouts.
        """
        depth = len(roles)
        if depth == len(self._role_order):
            self._evaluate_roles(roles)
            return
        role = self._role_order[depth]
        used = {assignment.mesh for assignment in roles.values()}
        for option, option_s in zip(self._options[role], self._busy_s[role], strict=True):
            if self._is_symmetric and not self._is_canonical_mesh(option.mesh, used):
                continue
            extended = {**roles, role: option}
            extended_busy_s, extended_after_s = _add_seconds(busy_s, option.mesh, option_s), after_s
            if role != self._choices.generator_role:
                extended_after_s = _add_seconds(after_s, option.mesh, option_s)
            first = self._first_rollouts_s[extended[self._choices.generator_role]]
            # A step is at least as long as the load of the busiest device, the mean load of all
            # devices, and the first rollouts plus the work that follows them.
            bound_s = max(
                max(extended_busy_s),
                (sum(extended_busy_s) + self._remaining_device_s[depth + 1]) / len(extended_busy_s),
                first + max(extended_after_s),
            )
            if bound_s < self._best[0] and self._can_still_fit(extended):
                self._place_next_role(extended, extended_busy_s, extended_after_s)

    def _can_still_fit(self, roles: dict[str, CallAssignment]) -> bool:
        """Return whether memory suffices for a partial assignment.

        A follower counts only together with its trained role, because it may alias those weights.
        """
        decided = {
            role: assignment
            for role, assignment in roles.items()
            if self._leader_by_role.get(role, role) in roles
        }
        return self._choices.can_fit(decided)

    def _is_canonical_mesh(self, mesh: Mesh, used: set[Mesh]) -> bool:
        """Return whether a mesh is the leftmost of the meshes equivalent to it.

        Meshes are equivalent if renumbering unused devices maps them to each other. The check
        halves the cluster until the halves have the mesh's size. A mesh in a right half has an
        equivalent in the left half unless the used meshes distinguish the halves.
        """
        first, size = 0, self._choices.problem.cluster.num_devices
        while size > mesh.size:
            size //= 2
            left, right = Mesh(first, size), Mesh(first + size, size)
            if mesh.overlaps(right):
                candidates = (u for u in used if u.size <= size)
                if not any(u.overlaps(left) or u.overlaps(right) for u in candidates):
                    return False
                first += size
        return True

    def _evaluate_roles(self, roles: dict[str, CallAssignment]) -> None:
        """Schedule a complete assignment, and keep the best placement."""
        self.num_scheduled += 1
        placement = self._choices.make_placement(roles, self._steps_ahead)
        seconds = self._choices.estimator.estimate_step_s(placement, self._best[0])
        if seconds < self._best[0]:
            self._best = (seconds, placement)


def _find_leaders(choices: ParallelismChoices) -> dict[str, str]:
    """Map each role with changing weights to the role that trains its model.

    Trained roles map to themselves, followers to the trained role; other roles are absent.
    """
    flow = CallGraph.from_dataflow(choices.problem.dataflow)
    leader_by_role = {
        call.role: call.role if call.kind is CallKind.TRAIN else flow.find_leader(call)
        for call in flow.calls
        if call.role in choices.roles
    }
    return {role: leader for role, leader in leader_by_role.items() if leader}


def _add_seconds(seconds: list[float], mesh: Mesh, seconds_more: float) -> list[float]:
    """Return the seconds per device with `seconds_more` added on each device of a mesh."""
    total = list(seconds)
    for device in mesh.devices:
        total[device] += seconds_more
    return total
