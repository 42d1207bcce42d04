"""The parallelism of one role on given devices: HybridFlow's Algorithm 2 (arXiv:2409.19256).

Tensor parallelism divides the devices and stays within a node; there are at most as many pipeline
stages as nodes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from streamrl.dataflow import CallKind, Dataflow
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import MAX_TP_SIZE, CallAssignment, Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.search.partitions import list_placed_roles
from streamrl.placement.search.split_rules import SplitRules
from streamrl.placement.steady_state.estimator import PlacementEstimator, find_fullest_device
from streamrl.resharding import RankGrid

MAX_FIXES = 64
"""So many changes are tried to make models fit that share devices."""
EP_SIZES = (8, 16, 32, 64)
"""Of models with experts."""

RoleAssignments = Mapping[str, CallAssignment]
"""Devices and parallelism by role: its calls share them."""


def list_grids(mesh: Mesh, cluster: Cluster, shape: ModelShape) -> list[RankGrid]:
    """Every p-t-d of a model on a mesh."""
    within = min(MAX_TP_SIZE, mesh.count_devices_per_node(cluster))
    stages = max(1, mesh.size // mesh.count_devices_per_node(cluster))
    return [
        RankGrid(p, t, mesh.size // (p * t))
        for t in range(1, within + 1)
        for p in range(1, min(stages, shape.layers) + 1)
        if mesh.size % (p * t) == 0
        and not any(width % t for width in (shape.heads, shape.vocab, shape.intermediate))
    ]


def list_ep_sizes(shape: ModelShape, grid: RankGrid) -> list[int]:
    """How many ranks may share out a layer's experts: none, or a node's worth and more."""
    ranks = grid.tp_size * grid.dp_size
    sizes = (size for size in EP_SIZES if size <= shape.experts)
    return [1, *(size for size in sizes if ranks % size == 0 and shape.experts % size == 0)]


class ParallelismChoices:
    """What roles may choose of, the fastest alone first; remembered by role and mesh."""

    def __init__(self, estimator: PlacementEstimator, *, rules: SplitRules) -> None:
        self.problem: PlacementProblem = estimator.problem
        self.estimator = estimator
        self._split_rules = rules
        self.roles = list_placed_roles(self.problem)
        self.stages_by_role = {
            role: [call.stage for call in self.problem.dataflow.calls_by_role[role]]
            for role in self.roles
        }
        self._alone_durations: dict[tuple[str, CallAssignment], float] = {}
        self._role_bytes: dict[tuple[str, CallAssignment], float] = {}
        self._options: dict[tuple[str, Mesh], list[CallAssignment]] = {}
        self._mesh_options: dict[tuple[tuple[str, ...], Mesh], RoleAssignments | None] = {}
        self._is_uniform = self.problem.cluster.is_uniform

    @cached_property
    def dataflow(self) -> Dataflow:
        """The problem's."""
        return self.problem.dataflow

    @cached_property
    def generator_role(self) -> str:
        """The role that samples."""
        return self.dataflow.select_calls(CallKind.GENERATE)[0].role

    @cached_property
    def trained_roles(self) -> set[str]:
        """The roles that are trained."""
        return set(self.dataflow.trained_roles)

    @cached_property
    def straggler_factor(self) -> float:
        """Of the longest rollout of a step to the mean one."""
        workload = self.problem.workload
        longest = workload.lengths.expected_longest(workload.num_rollouts)
        return max(1.0, longest / workload.lengths.mean)

    def alone_duration_s(self, role: str, assignment: CallAssignment) -> float:
        """A step's work of all its calls, on devices of their own; infinite if it cannot be."""
        home = self.canonical_mesh(assignment.mesh)
        if home != assignment.mesh:
            assignment = replace(assignment, mesh=home)
        key = (role, assignment)
        if key not in self._alone_durations:
            costs = self.estimator.costs
            self._alone_durations[key] = sum(
                costs.call_duration_s(s, assignment) for s in self._list_timed_stages(role)
            )
        return self._alone_durations[key]

    def _list_timed_stages(self, role: str) -> list[str]:
        """Calls that take time of their own: those that generate are one."""
        stages = self.stages_by_role[role]
        return stages[:1] if role == self.generator_role else stages

    def min_busy_s(self, role: str, assignment: CallAssignment, ahead: int) -> float:
        """At least so long its devices are busy in a step.

        Ahead, nobody waits for the longest rollout, and as many run at once as steps are under way.
        """
        seconds = self.alone_duration_s(role, assignment)
        if ahead and role == self.generator_role:
            return seconds / self.straggler_factor / (ahead + 1)
        return seconds

    def likely_busy_s(self, role: str, assignment: CallAssignment, ahead: int) -> float:
        """About so long, where memory bounds how many rollouts run at once."""
        seconds = self.min_busy_s(role, assignment, ahead)
        return seconds * (ahead + 1) if role == self.generator_role else seconds

    def list_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """All that fit by themselves, the fastest first."""
        key = (role, mesh)
        if key not in self._options:
            self._options[key] = self._sort_options(role, mesh)
        return self._options[key]

    def find_smallest(self, role: str, mesh: Mesh) -> CallAssignment:
        """The one that takes the least memory, whether or not it fits."""
        return min(
            self._list_all_options(role, mesh), key=lambda each: self._find_role_bytes(role, each)
        )

    def _sort_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        found = self._list_all_options(role, mesh)
        timed = [(self.alone_duration_s(role, each), i) for i, each in enumerate(found)]
        return [found[i] for seconds, i in sorted(timed) if math.isfinite(seconds)]

    def _list_all_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
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
        """The placement of these roles."""
        calls = {stage: each for role, each in roles.items() for stage in self.stages_by_role[role]}
        return Placement(calls, ahead, streamed)

    def can_fit(self, roles: RoleAssignments) -> bool:
        """Whether memory is enough for these."""
        return not self.estimator.costs.explain_infeasible(self.make_placement(roles))

    def canonical_mesh(self, mesh: Mesh) -> Mesh:
        """The first mesh of its size, where nodes are alike: what is true there is true here."""
        return Mesh(0, mesh.size) if self._is_uniform and mesh.first else mesh

    def fit_on_mesh(self, roles: Sequence[str], mesh: Mesh) -> RoleAssignments | None:
        """The fastest that fit on one mesh at the same time; None if none were found."""
        home = self.canonical_mesh(mesh)
        key = (tuple(roles), home)
        if key not in self._mesh_options:
            self._mesh_options[key] = self.fit_on_meshes(dict.fromkeys(roles, home))
        found = self._mesh_options[key]
        if found is None or home == mesh:
            return found
        return {role: replace(each, mesh=mesh) for role, each in found.items()}

    def fit_on_meshes(self, meshes: Mapping[str, Mesh]) -> RoleAssignments | None:
        """The fastest that fit at the same time, each on its mesh; None if none were found.

        Each begins with its fastest; then the one changes, of those on the device that has least
        left, that gives most memory for its time.
        """
        chosen = dict.fromkeys(meshes, 0)
        options = {role: self.list_options(role, mesh) for role, mesh in meshes.items()}
        if not all(options.values()):
            return None
        for _ in range(MAX_FIXES):
            found = {role: options[role][i] for role, i in chosen.items()}
            if self.can_fit(found):
                return found
            change = self._find_relief(self._find_crowded(found), options)
            if change is None:
                return None
            role, i = change
            chosen[role] = i
        return None

    def _find_crowded(self, roles: RoleAssignments) -> RoleAssignments:
        """Those on the device that has the least memory left."""
        placement, cluster = self.make_placement(roles), self.problem.cluster
        device, _, _ = find_fullest_device(
            self.estimator.costs.predict_memory(placement), placement, cluster
        )
        return {role: each for role, each in roles.items() if device in each.mesh.devices}

    def _find_relief(
        self, found: RoleAssignments, options: Mapping[str, list[CallAssignment]]
    ) -> tuple[str, int] | None:
        """The change that frees the most for what it costs."""
        best: tuple[float, str, int] | None = None
        for role, assignment in found.items():
            held = self._find_role_bytes(role, assignment)
            seconds = self.alone_duration_s(role, assignment)
            for i, other in enumerate(options[role]):
                freed = held - self._find_role_bytes(role, other)
                if freed <= 0:
                    continue
                slower = max(0.0, self.alone_duration_s(role, other) - seconds)
                price = slower / freed
                if best is None or price < best[0]:
                    best = (price, role, i)
        return None if best is None else best[1:]

    def _find_role_bytes(self, role: str, assignment: CallAssignment) -> float:
        key = (role, assignment)
        if key not in self._role_bytes:
            self._role_bytes[key] = self._compute_role_bytes(role, assignment)
        return self._role_bytes[key]

    def _compute_role_bytes(self, role: str, assignment: CallAssignment) -> float:
        memory = self.estimator.costs.predict_memory(self.make_placement({role: assignment}))
        return sum(each.resident_bytes for each in memory.values()) + max(
            each.active_bytes for each in memory.values()
        )


def auto_parallel(choices: ParallelismChoices, role: str, mesh: Mesh) -> CallAssignment | None:
    """The fastest parallelism of a role on these devices; None if its model fits in none."""
    found = choices.list_options(role, mesh)
    return found[0] if found else None
