"""Parallelism of a role on given devices: HybridFlow's Algorithm 2 (arXiv:2409.19256).

The tensor-parallel size divides the devices and stays within a node; a model has at most as many
pipeline stages as nodes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

from streamrl.dataflow import CallKind, ModelCall
from streamrl.engines.models.model_shapes import ModelShape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import MAX_TP_SIZE, CallAssignment, Placement
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.search.partitions import list_placed_roles
from streamrl.planner.steady_state.estimator import PlacementEstimator, find_fullest_device
from streamrl.resharding.grids import RankGrid

MAX_FIXES = 64
"""Maximum changes of parallelism to make models that share devices fit into memory."""
EP_SIZES = (8, 16, 32, 64)
"""Sizes of expert-parallel groups that the search tries."""

RoleAssignments = Mapping[str, CallAssignment]
"""Devices and parallelism by role; all calls of a role share them."""

SplitRules = Callable[[ModelCall, RankGrid], Sequence[int]]
"""ZeRO stages allowed for a call on a grid, plainest first; empty if the grid is not allowed."""

UNSHARDED_ZERO_STAGES = (1,)
"""ZeRO stages for a call that is not trained, or has no data-parallel ranks to shard over."""
SHARDED_ZERO_STAGES = (1, 3)
"""ZeRO stages for data-parallel training: shard the optimizer state (1), or all state (3)."""


def allow_any_split(call: ModelCall, grid: RankGrid) -> Sequence[int]:
    return (
        SHARDED_ZERO_STAGES
        if call.kind is CallKind.TRAIN and grid.dp_size > 1
        else UNSHARDED_ZERO_STAGES
    )


def list_grids(mesh: Mesh, cluster: Cluster, shape: ModelShape) -> list[RankGrid]:
    max_tp_size = min(MAX_TP_SIZE, mesh.count_devices_per_node(cluster))
    stages = max(1, mesh.size // mesh.count_devices_per_node(cluster))
    return [
        RankGrid(p, t, mesh.size // (p * t))
        for t in range(1, max_tp_size + 1)
        for p in range(1, min(stages, shape.layers) + 1)
        if mesh.size % (p * t) == 0
        and not any(width % t for width in (shape.heads, shape.vocab, shape.intermediate))
    ]


def list_ep_sizes(shape: ModelShape, grid: RankGrid) -> list[int]:
    """Return the possible expert-parallel sizes of a model: 1 (none), and sizes from EP_SIZES."""
    ranks = grid.tp_size * grid.dp_size
    sizes = (size for size in EP_SIZES if size <= shape.experts)
    return [1, *(size for size in sizes if ranks % size == 0 and shape.experts % size == 0)]


class ParallelismChoices:
    """Parallelism options of every role on every mesh, fastest first; caches results.

    rules: ZeRO stages that a call may use on a grid.
    """

    def __init__(self, estimator: PlacementEstimator, *, rules: SplitRules) -> None:
        self.problem: PlacementProblem = estimator.problem
        self.estimator = estimator
        self._split_rules = rules
        self.roles = list_placed_roles(self.problem)
        self.stages_by_role = {
            role: [call.stage for call in self.problem.dataflow.calls_by_role[role]]
            for role in self.roles
        }
        self._find_alone_duration_s = cache(self._compute_alone_duration)
        self._find_role_bytes = cache(self._compute_role_bytes)
        self._sorted_options = cache(self._sort_options)
        self._fit_on_canonical = cache(self._fit_on_one_mesh)
        self._is_uniform = self.problem.cluster.is_uniform

    @cached_property
    def generator_role(self) -> str:
        return self.problem.dataflow.select_calls(CallKind.GENERATE)[0].role

    @cached_property
    def trained_roles(self) -> set[str]:
        return set(self.problem.dataflow.trained_roles)

    @cached_property
    def straggler_factor(self) -> float:
        """Expected longest rollout of a step over the mean rollout."""
        workload = self.problem.workload
        longest = workload.lengths.expected_longest(workload.num_rollouts)
        return max(1.0, longest / workload.lengths.mean)

    def compute_alone_duration_s(self, role: str, assignment: CallAssignment) -> float:
        """Return seconds of a role's work per step, alone on its devices; inf if infeasible."""
        canonical = self.find_canonical_mesh(assignment.mesh)
        if canonical != assignment.mesh:
            assignment = replace(assignment, mesh=canonical)
        return self._find_alone_duration_s(role, assignment)

    def _compute_alone_duration(self, role: str, assignment: CallAssignment) -> float:
        costs = self.estimator.costs
        return sum(costs.call_duration_s(s, assignment) for s in self._list_timed_stages(role))

    def _list_timed_stages(self, role: str) -> list[str]:
        """Return the stages of a role whose times add up; all generating calls run as the first."""
        stages = self.stages_by_role[role]
        return stages[:1] if role == self.generator_role else stages

    def compute_min_busy_s(self, role: str, assignment: CallAssignment, ahead: int) -> float:
        """Return a lower bound of the seconds per step in which a role keeps its devices busy.

        With generation ahead, no step waits for its longest rollout, and rollouts of `ahead + 1`
        steps share each decode step.
        """
        seconds = self.compute_alone_duration_s(role, assignment)
        if ahead and role == self.generator_role:
            return seconds / self.straggler_factor / (ahead + 1)
        return seconds

    def estimate_busy_s(self, role: str, assignment: CallAssignment, ahead: int) -> float:
        """Estimate the seconds per step in which a role keeps its devices busy.

        Unlike `compute_min_busy_s`, the estimate assumes that memory limits the concurrent
        rollouts, so that steps ahead do not share decode steps.
        """
        seconds = self.compute_min_busy_s(role, assignment, ahead)
        return seconds * (ahead + 1) if role == self.generator_role else seconds

    def list_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """Return the parallelisms of a role that fit alone on a mesh, fastest first."""
        return self._sorted_options(role, mesh)

    def find_smallest(self, role: str, mesh: Mesh) -> CallAssignment:
        return min(
            self._list_all_options(role, mesh),
            key=lambda option: self._find_role_bytes(role, option),
        )

    def _sort_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        options = self._list_all_options(role, mesh)
        timed = [
            (self.compute_alone_duration_s(role, option), i) for i, option in enumerate(options)
        ]
        return [options[i] for seconds, i in sorted(timed) if math.isfinite(seconds)]

    def _list_all_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """List what the rules allow, whether or not it fits."""
        shape = self.problem.find_model(self.stages_by_role[role][0])
        assert shape is not None
        call = self.problem.dataflow.calls_by_role[role][0]
        return [
            CallAssignment(mesh, grid, zero, expert)
            for grid in list_grids(mesh, self.problem.cluster, shape)
            for zero in self._split_rules(call, grid)
            for expert in list_ep_sizes(shape, grid)
        ]

    def make_placement(
        self, roles: RoleAssignments, ahead: int = 0, *, streamed: bool = True
    ) -> Placement:
        calls = {
            stage: assignment
            for role, assignment in roles.items()
            for stage in self.stages_by_role[role]
        }
        return Placement(calls, ahead, streamed)

    def can_fit(self, roles: RoleAssignments) -> bool:
        return not self.estimator.costs.explain_infeasible(self.make_placement(roles))

    def find_canonical_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh of the same size that starts at device 0, if the cluster is uniform.

        Both meshes are then equivalent, so results are cached for the first only.
        """
        return Mesh(0, mesh.size) if self._is_uniform and mesh.first else mesh

    def fit_on_mesh(self, roles: Sequence[str], mesh: Mesh) -> RoleAssignments | None:
        """Return the fastest parallelisms of roles that fit together on a mesh; None if not
        found."""
        canonical = self.find_canonical_mesh(mesh)
        options = self._fit_on_canonical(tuple(roles), canonical)
        if options is None or canonical == mesh:
            return options
        return {role: replace(option, mesh=mesh) for role, option in options.items()}

    def _fit_on_one_mesh(self, roles: tuple[str, ...], mesh: Mesh) -> RoleAssignments | None:
        return self.fit_on_meshes(dict.fromkeys(roles, mesh))

    def fit_on_meshes(self, meshes: Mapping[str, Mesh]) -> RoleAssignments | None:
        """Return fast parallelisms of roles on their meshes that fit together; None if not found.

        Each role starts with its fastest option. While memory is short, a role on the fullest
        device changes to another option: the change that frees the most memory per second of
        slowdown.
        """
        choice_by_role = dict.fromkeys(meshes, 0)
        options = {role: self.list_options(role, mesh) for role, mesh in meshes.items()}
        if not all(options.values()):
            return None
        for _ in range(MAX_FIXES):
            candidate = {role: options[role][i] for role, i in choice_by_role.items()}
            if self.can_fit(candidate):
                return candidate
            change = self._find_relief(self._find_crowded(candidate), options)
            if change is None:
                return None
            role, i = change
            choice_by_role[role] = i
        return None

    def _find_crowded(self, roles: RoleAssignments) -> RoleAssignments:
        placement, cluster = self.make_placement(roles), self.problem.cluster
        device, _, _ = find_fullest_device(
            self.estimator.costs.predict_memory(placement), placement, cluster
        )
        return {
            role: assignment
            for role, assignment in roles.items()
            if device in assignment.mesh.devices
        }

    def _find_relief(
        self, roles: RoleAssignments, options: Mapping[str, list[CallAssignment]]
    ) -> tuple[str, int] | None:
        """Return the role and option that free the most bytes per second of slowdown."""
        best: tuple[float, str, int] | None = None
        for role, assignment in roles.items():
            num_bytes = self._find_role_bytes(role, assignment)
            seconds = self.compute_alone_duration_s(role, assignment)
            for i, other in enumerate(options[role]):
                freed = num_bytes - self._find_role_bytes(role, other)
                if freed <= 0:
                    continue
                slower = max(0.0, self.compute_alone_duration_s(role, other) - seconds)
                slowdown_per_byte = slower / freed
                if best is None or slowdown_per_byte < best[0]:
                    best = (slowdown_per_byte, role, i)
        return None if best is None else best[1:]

    def _compute_role_bytes(self, role: str, assignment: CallAssignment) -> float:
        memory = self.estimator.costs.predict_memory(self.make_placement({role: assignment}))
        return sum(call_memory.resident_bytes for call_memory in memory.values()) + max(
            call_memory.active_bytes for call_memory in memory.values()
        )
