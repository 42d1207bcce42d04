"""The parallelism of one role on given devices: HybridFlow's Algorithm 2 (arXiv:2409.19256).

Tensor parallelism divides the devices and stays within a node; there are at most as many pipeline
stages as nodes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from streamrl.dataflow import Dataflow, Kind
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import MOST_TENSOR, Assignment, Placement
from streamrl.placement.problem import Problem
from streamrl.placement.search.partitions import placed_roles
from streamrl.placement.search.split_rules import Rules
from streamrl.placement.steady_state.estimator import Estimator, fullest
from streamrl.resharding import Grid

FIXES = 64
"""So many changes are tried to make models fit that share devices."""
EXPERT_RANKS = (8, 16, 32, 64)
"""Of models with experts."""

Roles = Mapping[str, Assignment]
"""Devices and parallelism by role: its calls share them."""


def grids(mesh: Mesh, cluster: Cluster, shape: ModelShape) -> list[Grid]:
    """Every p-t-d of a model on a mesh."""
    within = min(MOST_TENSOR, mesh.per_node(cluster))
    stages = max(1, mesh.size // mesh.per_node(cluster))
    return [
        Grid(p, t, mesh.size // (p * t))
        for t in range(1, within + 1)
        for p in range(1, min(stages, shape.layers) + 1)
        if mesh.size % (p * t) == 0
        and not any(width % t for width in (shape.heads, shape.vocab, shape.intermediate))
    ]


def expert_ranks(shape: ModelShape, grid: Grid) -> list[int]:
    """How many ranks may share out a layer's experts: none, or a node's worth and more."""
    ranks = grid.tensor * grid.replicas
    sizes = (size for size in EXPERT_RANKS if size <= shape.experts)
    return [1, *(size for size in sizes if ranks % size == 0 and shape.experts % size == 0)]


class Choices:
    """What roles may choose of, the fastest alone first; remembered by role and mesh."""

    def __init__(self, estimator: Estimator, *, rules: Rules) -> None:
        self.problem: Problem = estimator.problem
        self.estimator = estimator
        self._rules = rules
        self.roles = placed_roles(self.problem)
        self.stages = {
            role: [call.stage for call in self.problem.dataflow.roles[role]] for role in self.roles
        }
        self._alone: dict[tuple[str, Assignment], float] = {}
        self._holds: dict[tuple[str, Assignment], float] = {}
        self._of: dict[tuple[str, Mesh], list[Assignment]] = {}
        self._together: dict[tuple[tuple[str, ...], Mesh], Roles | None] = {}
        self._uniform = self.problem.cluster.is_uniform

    @cached_property
    def dataflow(self) -> Dataflow:
        """The problem's."""
        return self.problem.dataflow

    @cached_property
    def generator(self) -> str:
        """The role that samples."""
        return self.dataflow.of_kind(Kind.GENERATE)[0].role

    @cached_property
    def trained(self) -> set[str]:
        """The roles that are trained."""
        return set(self.dataflow.trained)

    @cached_property
    def spread(self) -> float:
        """Of the longest rollout of a step to the mean one."""
        workload = self.problem.workload
        longest = workload.lengths.expected_longest(workload.rollouts)
        return max(1.0, longest / workload.lengths.mean)

    def alone_s(self, role: str, assignment: Assignment) -> float:
        """A step's work of all its calls, on devices of their own; infinite if it cannot be."""
        home = self.home(assignment.mesh)
        if home != assignment.mesh:
            assignment = replace(assignment, mesh=home)
        key = (role, assignment)
        if key not in self._alone:
            costs = self.estimator.costs
            self._alone[key] = sum(costs.call_s(s, assignment) for s in self._worked(role))
        return self._alone[key]

    def _worked(self, role: str) -> list[str]:
        """Calls that take time of their own: those that generate are one."""
        stages = self.stages[role]
        return stages[:1] if role == self.generator else stages

    def least_s(self, role: str, assignment: Assignment, ahead: int) -> float:
        """At least so long its devices are busy in a step.

        Ahead, nobody waits for the longest rollout, and as many run at once as steps are under way.
        """
        seconds = self.alone_s(role, assignment)
        if ahead and role == self.generator:
            return seconds / self.spread / (ahead + 1)
        return seconds

    def likely_s(self, role: str, assignment: Assignment, ahead: int) -> float:
        """About so long, where memory bounds how many rollouts run at once."""
        seconds = self.least_s(role, assignment, ahead)
        return seconds * (ahead + 1) if role == self.generator else seconds

    def of(self, role: str, mesh: Mesh) -> list[Assignment]:
        """All that fit by themselves, the fastest first."""
        key = (role, mesh)
        if key not in self._of:
            self._of[key] = self._sorted(role, mesh)
        return self._of[key]

    def any_of(self, role: str, mesh: Mesh) -> Assignment:
        """The one that takes the least memory, whether or not it fits."""
        return min(self._every(role, mesh), key=lambda each: self._held(role, each))

    def _sorted(self, role: str, mesh: Mesh) -> list[Assignment]:
        found = self._every(role, mesh)
        timed = [(self.alone_s(role, each), i) for i, each in enumerate(found)]
        return [found[i] for seconds, i in sorted(timed) if math.isfinite(seconds)]

    def _every(self, role: str, mesh: Mesh) -> list[Assignment]:
        shape = self.problem.model_of(self.stages[role][0])
        assert shape is not None
        call = self.problem.dataflow.roles[role][0]
        return [
            Assignment(mesh, grid, zero, expert)
            for grid in grids(mesh, self.problem.cluster, shape)
            for zero in self._rules(call, grid)
            for expert in expert_ranks(shape, grid)
        ]

    def placement(self, roles: Roles, ahead: int = 0, *, streamed: bool = True) -> Placement:
        """The placement of these roles."""
        calls = {stage: each for role, each in roles.items() for stage in self.stages[role]}
        return Placement(calls, ahead, streamed)

    def fits(self, roles: Roles) -> bool:
        """Whether memory is enough for these."""
        return not self.estimator.costs.unfit(self.placement(roles))

    def home(self, mesh: Mesh) -> Mesh:
        """The first mesh of its size, where nodes are alike: what is true there is true here."""
        return Mesh(0, mesh.size) if self._uniform and mesh.first else mesh

    def together(self, roles: Sequence[str], mesh: Mesh) -> Roles | None:
        """The fastest that fit on one mesh at the same time; None if none were found."""
        home = self.home(mesh)
        key = (tuple(roles), home)
        if key not in self._together:
            self._together[key] = self.fitted(dict.fromkeys(roles, home))
        found = self._together[key]
        if found is None or home == mesh:
            return found
        return {role: replace(each, mesh=mesh) for role, each in found.items()}

    def fitted(self, meshes: Mapping[str, Mesh]) -> Roles | None:
        """The fastest that fit at the same time, each on its mesh; None if none were found.

        Each begins with its fastest; then the one changes, of those on the device that has least
        left, that gives most memory for its time.
        """
        chosen = dict.fromkeys(meshes, 0)
        options = {role: self.of(role, mesh) for role, mesh in meshes.items()}
        if not all(options.values()):
            return None
        for _ in range(FIXES):
            found = {role: options[role][i] for role, i in chosen.items()}
            if self.fits(found):
                return found
            change = self._relief(self._crowded(found), options)
            if change is None:
                return None
            role, i = change
            chosen[role] = i
        return None

    def _crowded(self, roles: Roles) -> Roles:
        """Those on the device that has the least memory left."""
        placement, cluster = self.placement(roles), self.problem.cluster
        device, _, _ = fullest(self.estimator.costs.memory(placement), placement, cluster)
        return {role: each for role, each in roles.items() if device in each.mesh.devices}

    def _relief(
        self, found: Roles, options: Mapping[str, list[Assignment]]
    ) -> tuple[str, int] | None:
        """The change that frees the most for what it costs."""
        best: tuple[float, str, int] | None = None
        for role, assignment in found.items():
            held = self._held(role, assignment)
            seconds = self.alone_s(role, assignment)
            for i, other in enumerate(options[role]):
                freed = held - self._held(role, other)
                if freed <= 0:
                    continue
                slower = max(0.0, self.alone_s(role, other) - seconds)
                price = slower / freed
                if best is None or price < best[0]:
                    best = (price, role, i)
        return None if best is None else best[1:]

    def _held(self, role: str, assignment: Assignment) -> float:
        key = (role, assignment)
        if key not in self._holds:
            self._holds[key] = self._held_by(role, assignment)
        return self._holds[key]

    def _held_by(self, role: str, assignment: Assignment) -> float:
        memory = self.estimator.costs.memory(self.placement({role: assignment}))
        return sum(each.kept for each in memory.values()) + max(
            each.active for each in memory.values()
        )


def auto_parallel(choices: Choices, role: str, mesh: Mesh) -> Assignment | None:
    """The fastest parallelism of a role on these devices; None if its model fits in none."""
    found = choices.of(role, mesh)
    return found[0] if found else None
