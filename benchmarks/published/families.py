"""Find the best placement of a family: given which models share devices, search sizes and grids.

As in HybridFlow (arXiv:2409.19256), the best plan of a set of models on a number of nodes does not
depend on the other sets. Coordinate descent over the calls' parallelism finds it once. All
allocations of nodes to sets are then ranked, and the best few are estimated.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamrl.dataflow import CallKind
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.call_cost import CallCost
from streamrl.planner.costs.call_timings import estimate_generator_timing
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.search.hybridflow import ParallelismChoices, allow_any_split
from streamrl.planner.steady_state.estimator import PlacementEstimator
from streamrl.resharding.grids import RankGrid

NUM_SCHEDULED = 6
"""Number of allocations, by the smallest sum of stages, that are estimated."""
ROUNDS = 3

Roles = Mapping[str, CallAssignment]
RoleSet = tuple[str, ...]


@dataclass(frozen=True)
class SetPlan:
    """Parallelism of a set of roles on its devices, and seconds by kind of call, one at a time."""

    roles: Roles
    seconds: Mapping[CallKind, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class FamilyPlan:
    """Best placement of a family: seconds per step, infinite if none fits."""

    step_s: float
    placement: Placement | None = None
    nodes: Sequence[int] = ()


@dataclass
class Families:
    """Search of one problem's families on the first nodes of its cluster; plans of sets are cached.

    nested: whether the generator's grid must divide the trainer's, as HybridFlow's groups require.
    """

    problem: PlacementProblem
    costs: CostModel
    nested: bool = True
    streamed: bool = False
    zero_stage: int = 1
    _plans: dict[tuple[RoleSet, int], SetPlan | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.estimator = PlacementEstimator(self.problem, self.costs)
        self.choices = ParallelismChoices(self.estimator, rules=allow_any_split)
        self.generation = GenerationModel(self.problem.workload)
        self.per_node = self.problem.cluster.node_groups[0].devices_per_node

    def find_best(self, sets: Sequence[RoleSet], devices: int) -> FamilyPlan:
        """Find the fastest placement of these sets that uses all devices."""
        ranked = sorted(
            self._iter_allocations(sets, devices // self.per_node),
            key=lambda allocation: allocation[0],
        )
        best = FamilyPlan(math.inf)
        for _, nodes, plans in ranked[:NUM_SCHEDULED]:
            placement = self._build_placement(nodes, plans)
            seconds = self.estimator.estimate_step_s(placement)
            if seconds < best.step_s:
                best = FamilyPlan(seconds, placement, nodes)
        return best

    def _iter_allocations(
        self, sets: Sequence[RoleSet], nodes: int
    ) -> Iterator[tuple[float, Sequence[int], Sequence[SetPlan]]]:
        for cuts in itertools.combinations(range(1, nodes), len(sets) - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *cuts, nodes))]
            plans = [self.plan_set(roles, count) for roles, count in zip(sets, counts, strict=True)]
            fit = [plan for plan in plans if plan is not None]
            if len(fit) == len(plans):
                slowest = (max(plan.seconds[kind] for plan in fit) for kind in CallKind)
                yield sum(slowest), counts, fit

    def _build_placement(self, nodes: Sequence[int], plans: Sequence[SetPlan]) -> Placement:
        roles: dict[str, CallAssignment] = {}
        first = 0
        for count, plan in zip(nodes, plans, strict=True):
            mesh = Mesh(first, count * self.per_node)
            roles |= {
                role: replace(assignment, mesh=mesh) for role, assignment in plan.roles.items()
            }
            first += mesh.size
        return self.choices.make_placement(roles, 0, streamed=self.streamed)

    def plan_set(self, roles: RoleSet, nodes: int) -> SetPlan | None:
        """Plan these roles on shared nodes; None if they do not fit."""
        key = (roles, nodes)
        if key not in self._plans:
            starts = [
                plan
                for start in self._iter_starts(roles, nodes)
                if (plan := self._time_calls(start))
            ]
            best = min(starts, key=lambda plan: plan.total_s, default=None)
            self._plans[key] = self._descend(best) if best else None
        return self._plans[key]

    def _iter_starts(self, roles: RoleSet, nodes: int) -> Iterator[Roles]:
        """Yield starts of the descent: one grid for all roles."""
        mesh = Mesh(0, nodes * self.per_node)
        for tensor in (1, 2, 4, 8):
            for stages in (1, 2, 4, 8):
                if mesh.size % (tensor * stages) == 0 and stages <= nodes:
                    grid = RankGrid(stages, tensor, mesh.size // (tensor * stages))
                    yield dict.fromkeys(roles, CallAssignment(mesh, grid))

    def _descend(self, plan: SetPlan) -> SetPlan:
        for _ in range(ROUNDS):
            before = plan
            for role in plan.roles:
                for option in self._iter_options(role, plan):
                    changed = self._time_calls(_assign_role(plan.roles, role, option))
                    if changed and changed.total_s < plan.total_s:
                        plan = changed
            if plan is before:
                break
        return plan

    def _iter_options(self, role: str, plan: SetPlan) -> Iterator[CallAssignment]:
        for option in self.choices.list_options(role, plan.roles[role].mesh):
            if option.zero_stage <= self.zero_stage:
                yield option

    def _time_calls(self, roles: Roles) -> SetPlan | None:
        """Compute seconds of the calls of a set of roles; None if it is infeasible."""
        generator, policy = roles.get("generator"), roles.get("policy")
        if self.nested and generator and policy and not _is_nested(policy.grid, generator.grid):
            return None
        placement = self.choices.make_placement(roles)
        if self.costs.explain_infeasible(placement):
            return None
        seconds = dict.fromkeys(CallKind, 0.0)
        for role, assignment in roles.items():
            kind = self.choices.problem.dataflow.calls_by_role[role][0].kind
            if kind is CallKind.GENERATE:
                seconds[kind] += self._generate_s(placement, assignment)
            else:
                seconds[kind] += self.choices.compute_alone_duration_s(role, assignment)
        return SetPlan(roles, seconds)

    def _generate_s(self, placement: Placement, assignment: CallAssignment) -> float:
        """Compute generation seconds with the KV cache that the colocated models leave."""
        shape = self.problem.find_model("generate")
        assert shape is not None
        work = CallCost(
            shape, assignment, self.problem.workload, self.problem.cluster, self.costs.constants
        )
        timing = estimate_generator_timing(work, self.costs.compute_kv_capacity_bytes(placement))
        return self.generation.find_completions_s(timing, (1.0,))[-1]


def _assign_role(roles: Roles, role: str, option: CallAssignment) -> Roles:
    """Replace a role's assignment; a critic computes values on its training shards."""
    changed = {**roles, role: option}
    if "critic" in changed:
        changed["value"] = replace(changed["critic"], zero_stage=1)
    return changed


def _is_nested(train: RankGrid, generate: RankGrid) -> bool:
    return not train.pp_size % generate.pp_size and not train.tp_size % generate.tp_size
