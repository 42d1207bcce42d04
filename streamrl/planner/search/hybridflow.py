"""HybridFlow's search (arXiv:2409.19256): sets of models on nodes, and their parallelism.

Algorithm 1 enumerates every set partition of the models and every allocation of nodes to the sets,
and caches the fitted parallelism of a set on a mesh. The objective is the step time of the
schedule, where the paper's is the sum over stages of the slowest set. Algorithm 2 chooses the
parallelism: the tensor-parallel size divides the devices and stays within a node; a model has at
most as many pipeline stages as nodes.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TypeVar

from streamrl.dataflow import EMA_REFERENCE, POLICY, CallKind, Dataflow, ModelCall
from streamrl.engines.models.model_shapes import ModelShape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh, list_node_edges, list_part_edges
from streamrl.placement.placements import MAX_TP_SIZE, CallAssignment, Placement
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.steady_state.estimator import PlacementEstimator, find_fullest_device
from streamrl.resharding.grids import RankGrid

T = TypeVar("T")


def group_roles_by_model(problem: PlacementProblem) -> list[tuple[str, ...]]:
    """Group the roles with devices by model: a trained role together with its followers."""
    roles = list_placed_roles(problem)
    leaders = {role: _find_leader(problem.dataflow, role) for role in roles}
    return [
        tuple(role for role in roles if leaders[role] == leader)
        for leader in dict.fromkeys(leaders.values())
    ]


def list_placed_roles(problem: PlacementProblem) -> list[str]:
    """Return the roles with devices of their own; what the policy's ranks compute has none."""
    placed = set(problem.placed_stages)
    return [
        role
        for role, calls in problem.dataflow.calls_by_role.items()
        if any(call.stage in placed for call in calls) and problem.hosts.get(role) != POLICY
    ]


def _find_leader(dataflow: Dataflow, role: str) -> str:
    follows = {call.followed_role for call in dataflow.calls_by_role[role]} - {"", EMA_REFERENCE}
    return min(follows, default=role)


def iter_set_partitions(
    items: Sequence[T], accepts: Callable[[list[list[T]]], bool] = lambda _subsets: True
) -> Iterator[list[list[T]]]:
    """Yield every way to split items into nonempty sets; sets are ordered by their first item.

    Example: [1, 2, 3] gives 5 partitions, from [[1, 2, 3]] to [[1], [2], [3]] (Bell numbers).

    accepts: whether to yield a partition; one of the first items that is not accepted is not
      extended by the next ones either.
    """
    if not items:
        yield []
        return
    *before, last = items
    # The last item joins any set of a partition of the other items, or forms its own set.
    for subsets in iter_set_partitions(before, accepts):
        joined = [[[*s, last] if s is subset else s for s in subsets] for subset in subsets]
        yield from filter(accepts, [*joined, [*subsets, [last]]])


def iter_allocations(
    cluster: Cluster,
    sets: int,
    accepts: Callable[[int, Mesh], bool] = lambda _number, _mesh: True,
) -> Iterator[tuple[Mesh, ...]]:
    """Yield every way to divide the whole cluster into disjoint meshes, one per set of roles.

    Each set gets consecutive whole nodes, or a part of a single node. `accepts(i, mesh)` says
    whether set number i may have the mesh.
    """
    yield from _iter_runs(_list_edges(cluster), sets, accepts, ())


@cache
def _list_edges(cluster: Cluster) -> list[int]:
    return list_node_edges(cluster) if cluster.num_nodes > 1 else list_part_edges(cluster)


def _iter_runs(
    edges: Sequence[int], sets: int, accepts: Callable[[int, Mesh], bool], before: tuple[Mesh, ...]
) -> Iterator[tuple[Mesh, ...]]:
    """Yield `before`, then the meshes between `edges` for `sets` further sets."""
    first, number = edges[0], len(before)
    if sets == 1:
        rest = Mesh(first, edges[-1] - first)
        if accepts(number, rest):
            yield (*before, rest)
        return
    for count in range(1, len(edges) - sets + 1):
        mesh = Mesh(first, edges[count] - first)
        if accepts(number, mesh):
            yield from _iter_runs(edges[count:], sets - 1, accepts, (*before, mesh))


MAX_FIXES = 64
"""Maximum changes of parallelism to make models that share devices fit into memory."""

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
        calls, hosts = self.problem.dataflow.calls_by_role, self.problem.hosts
        self._host_roles = {role: host for role, host in hosts.items() if role in self.roles}
        for role in hosts:
            if role in calls and role not in self.roles:
                self.stages_by_role[hosts[role]] += [call.stage for call in calls[role]]
        self._scorer_roles = [
            role
            for role in self.roles
            if self.problem.dataflow.calls_by_role[role][0].kind is CallKind.SCORE
        ]
        self.compute_alone_duration_s = cache(self._compute_alone_duration)
        self.compute_min_busy_s = cache(self._compute_min_busy)
        self._find_min_generation_s = cache(self.estimator.estimate_min_generation_s)
        self._find_role_bytes = cache(self._compute_role_bytes)
        self.list_options = cache(self._sort_options)
        self._find_offloaded = cache(partial(replace, is_offloaded=True))
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

    def _compute_alone_duration(self, role: str, assignment: CallAssignment) -> float:
        """Return seconds of a role's work per step, alone on its devices; inf if infeasible."""
        costs, canonical = self.estimator.costs, self.find_canonical_mesh(assignment.mesh)
        if canonical != assignment.mesh:
            return self.compute_alone_duration_s(role, replace(assignment, mesh=canonical))
        # All generating calls run as the first.
        stages = self.stages_by_role[role][: 1 if role == self.generator_role else None]
        return sum(costs.call_duration_s(stage, assignment) for stage in stages)

    def _compute_min_busy(self, role: str, assignment: CallAssignment, ahead: int) -> float:
        """Return a lower bound of the seconds per step in which a role keeps its devices busy.

        With generation ahead, no step waits for its longest rollout, and rollouts of `ahead + 1`
        steps share each decode step, as many as the generator takes.
        """
        seconds = self.compute_alone_duration_s(role, assignment)
        if ahead and role == self.generator_role and seconds < math.inf:
            mesh = self.find_canonical_mesh(assignment.mesh)
            return self._find_min_generation_s(replace(assignment, mesh=mesh), ahead)
        return seconds

    def estimate_busy_s(self, role: str, assignment: CallAssignment, ahead: int) -> float:
        """Estimate the seconds per step in which a role keeps its devices busy.

        Unlike `compute_min_busy_s`, the estimate assumes that memory limits the concurrent
        rollouts, so that steps ahead do not share decode steps.
        """
        seconds = self.compute_alone_duration_s(role, assignment)
        return seconds / self.straggler_factor if ahead and role == self.generator_role else seconds

    def find_smallest(self, role: str, mesh: Mesh) -> CallAssignment | None:
        """Return the parallelism with the fewest bytes; None if the rules allow none."""
        options = self._list_all_options(role, mesh)
        return min(options, key=lambda option: self._find_role_bytes(role, option), default=None)

    def _sort_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """Return the parallelisms of a role that fit alone on a mesh, fastest first."""
        options = self._list_all_options(role, mesh)
        timed = [
            (self.compute_alone_duration_s(role, option), i) for i, option in enumerate(options)
        ]
        return [options[i] for seconds, i in sorted(timed) if math.isfinite(seconds)]

    def _list_all_options(self, role: str, mesh: Mesh) -> list[CallAssignment]:
        """List what the rules allow, whether or not it fits."""
        shape = self.problem.find_model(self.stages_by_role[role][0])
        assert shape is not None
        call, run = self.problem.dataflow.calls_by_role[role][0], self.problem.run_memory
        if self.problem.cluster.is_cpu:
            run = None
        return [
            CallAssignment(mesh, grid, zero, 1, is_offloaded, checkpointing)
            for grid in list_grids(mesh, self.problem.cluster, shape)
            for zero in self._split_rules(call, grid)
            for is_offloaded, checkpointing in (
                run.list_savings(call, grid, zero) if run else [(False, False)]
            )
        ]

    def make_placement(
        self, roles: RoleAssignments, ahead: int = 0, *, streamed: bool = True
    ) -> Placement:
        """Return a placement; the ranks of a trained model compute calls on its devices."""
        hosted = {
            role: replace(roles[host], is_offloaded=False, checkpointing=False)
            for role, host in self._host_roles.items()
            if role in roles and host in roles and roles[role].mesh == roles[host].mesh
        }
        placed = dict(roles) | hosted
        # scorer.offload is one setting of all models that only score.
        scorers = [role for role in self._scorer_roles if role in roles and role not in hosted]
        if any(roles[role].is_offloaded for role in scorers):
            placed |= {role: self._find_offloaded(roles[role]) for role in scorers}
        calls = {
            stage: assignment
            for role, assignment in placed.items()
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


RoleSet = tuple[str, ...]
BOUND_SLACK = 0.95
"""Factor on lower bounds: the formulas for calls alone and calls in a schedule differ."""
FIRST_ALLOCATIONS = 64
"""Number of allocations in the first batch of a search by increasing lower bound."""


@dataclass(frozen=True)
class MeshAllocation:
    """Sets of roles, the mesh of each set, and a lower bound of the step time in seconds."""

    role_sets: tuple[RoleSet, ...]
    meshes: tuple[Mesh, ...]
    lower_bound_s: float


class MappingSearch:
    """Search over sets of roles and the devices of each set: HybridFlow's Algorithm 1.

    units: roles that stay together, such as a trained model and its followers.
    everywhere: place the generator on all devices instead of in a set, as ReaL does.
    """

    def __init__(
        self, choices: ParallelismChoices, units: Sequence[RoleSet], *, everywhere: bool = False
    ) -> None:
        self._choices = choices
        generator = choices.generator_role
        self._generator_mesh = Mesh(0, choices.problem.cluster.num_devices) if everywhere else None
        remaining_units = [
            tuple(r for r in unit if r != generator or not everywhere) for unit in units
        ]
        self._role_sets = [unit for unit in remaining_units if unit]

    def find_lowest(self, ahead: int, count: int) -> list[MeshAllocation]:
        """Return the `count` allocations with the lowest bounds of the step time, lowest first.

        Branches above the highest of the `count` lowest bounds so far are not enumerated.
        """
        heap: list[tuple[float, int, MeshAllocation]] = []
        allocations = self._iter_below(
            ahead, lambda: -heap[0][0] if len(heap) == count else math.inf
        )
        for i, allocation in enumerate(allocations):
            entry = (-allocation.lower_bound_s, -i, allocation)
            if len(heap) < count:
                heapq.heappush(heap, entry)
            else:
                heapq.heapreplace(heap, entry)
        return [
            allocation
            for _, _, allocation in sorted(heap, key=lambda entry: entry[:2], reverse=True)
        ]

    def _iter_below(self, ahead: int, limit_s: Callable[[], float]) -> Iterator[MeshAllocation]:
        """Yield allocations with a lower bound below the limit, which may fall meanwhile.

        Each role fits alone on the mesh of its set.
        """
        cluster = self._choices.problem.cluster

        @cache
        def find_bound(roles: RoleSet, mesh: Mesh) -> float:
            """Return the seconds of a set's work on a mesh, at least; inf if a role does not fit
            alone."""
            canonical = self._choices.find_canonical_mesh(mesh)
            return sum(self._compute_role_bound(role, canonical, ahead) for role in roles)

        shared = 0.0
        if self._generator_mesh is not None:
            shared = find_bound((self._choices.generator_role,), self._generator_mesh)
        num_devices, pairs = cluster.num_devices, itertools.combinations(_list_edges(cluster), 2)
        meshes_by_size = [Mesh(0, size) for size in sorted({end - first for first, end in pairs})]
        num_tried: Counter[RoleSet] = Counter()

        def find_fewest(units: Sequence[RoleSet]) -> int:
            """Return the fewest devices on which a set may be below the limit, which only falls."""
            if not cluster.is_uniform:
                return 1  # A set may need more devices than on the first nodes.
            roles = tuple(itertools.chain(*units))
            for mesh in meshes_by_size[num_tried[roles] :]:
                if shared + find_bound(roles, mesh) < limit_s():
                    return mesh.size
                num_tried[roles] += 1
            return num_devices + 1

        for parts in iter_set_partitions(
            self._role_sets, lambda parts: sum(map(find_fewest, parts)) <= num_devices
        ):
            sets = tuple(tuple(itertools.chain(*units)) for units in parts)
            ends = [num_devices - sum(map(find_fewest, parts[i:])) for i in range(1, len(sets) + 1)]

            def is_below_limit(
                i: int, mesh: Mesh, sets: Sequence[RoleSet] = sets, ends: Sequence[int] = ends
            ) -> bool:
                """Return whether set number i is below the limit, and the next ones have room."""
                has_room = mesh.first + mesh.size <= ends[i]
                return has_room and shared + find_bound(sets[i], mesh) < limit_s()

            for meshes in iter_allocations(cluster, len(sets), is_below_limit):
                placed_sets = zip(sets, meshes, strict=True)
                yield MeshAllocation(
                    sets,
                    meshes,
                    shared + max(find_bound(*placed_set) for placed_set in placed_sets),
                )

    def _compute_role_bound(self, role: str, mesh: Mesh, ahead: int) -> float:
        options = self._choices.list_options(role, mesh)[:1]
        return self._choices.estimate_busy_s(role, options[0], ahead) if options else math.inf

    def find_best(
        self, ahead: int = 0, *, streamed: bool = True, limit: int | None = None
    ) -> Placement | None:
        """Return the placement with the shortest step; None if none fits.

        An allocation is scheduled only while its lower bound is below the best step time so far.
        `limit` restricts the search to this many allocations, those with the lowest bounds.
        """
        best: tuple[float, Placement | None] = (math.inf, None)
        for allocation in self._iter_by_bound(ahead, limit):
            if allocation.lower_bound_s * BOUND_SLACK >= best[0]:
                break
            for placement in self._iter_placements(allocation, ahead, streamed=streamed):
                seconds = self._choices.estimator.estimate_step_s(placement, best[0])
                if seconds < best[0]:
                    best = (seconds, placement)
        return best[1]

    def _iter_by_bound(self, ahead: int, limit: int | None) -> Iterator[MeshAllocation]:
        if limit is not None:
            yield from self.find_lowest(ahead, limit)
            return
        # The search seldom needs more than a few allocations, so batches grow geometrically.
        count, num_yielded = FIRST_ALLOCATIONS, 0
        while True:
            allocations = self.find_lowest(ahead, count)
            yield from allocations[num_yielded:]
            if len(allocations) < count:
                return
            count, num_yielded = 4 * count, count

    def _iter_placements(
        self, allocation: MeshAllocation, ahead: int, *, streamed: bool
    ) -> Iterator[Placement]:
        """Yield a placement per parallelism of the generator, other roles at their fastest.

        The other roles decide how much memory the KV cache gets, and so which grid is best.
        """
        roles: dict[str, CallAssignment] = {}
        for role_set, mesh in zip(allocation.role_sets, allocation.meshes, strict=True):
            fitted = self._choices.fit_on_mesh(role_set, mesh)
            if fitted is None:
                return
            roles |= fitted
        generator = self._choices.generator_role
        generator_mesh = (
            roles[generator].mesh if self._generator_mesh is None else self._generator_mesh
        )
        for option in self._choices.list_options(generator, generator_mesh):
            yield self._choices.make_placement(
                roles | {generator: option}, ahead, streamed=streamed
            )


def can_fit(choices: ParallelismChoices) -> bool:
    """Return whether a plain placement fits into memory.

    All roles share the devices, or the roles of a model, all trained roles or the generator have
    devices of their own. False does not exclude that a more elaborate placement fits.
    """
    cluster = choices.problem.cluster
    all_devices = Mesh(0, cluster.num_devices)
    if choices.fit_on_meshes(dict.fromkeys(choices.roles, all_devices)) is not None:
        return True
    trained = tuple(role for role in choices.roles if role in choices.trained_roles)
    models = group_roles_by_model(choices.problem)
    for subset in dict.fromkeys([*models, trained, (choices.generator_role,)]):
        if len(subset) < len(choices.roles):
            for first, second in iter_allocations(cluster, 2):
                meshes = {role: first if role in subset else second for role in choices.roles}
                if choices.fit_on_meshes(meshes) is not None:
                    return True
    return False
