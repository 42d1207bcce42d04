"""The best placement of a family: which models share devices is given, sizes and grids are sought.

HybridFlow's way (arXiv:2409.19256): what a set of models does best on so many nodes does not depend
on the other sets, so it is found once, by changing one call's parallelism after the other; then all
allocations of nodes to sets are looked at, and the best few are scheduled.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamrl.dataflow import CallKind
from streamrl.placement.costs.call_cost import CallCost
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.costs.generate import generator_timing
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.search.split_rules import allow_any_split
from streamrl.placement.steady_state.call_durations import GenerationModel
from streamrl.placement.steady_state.estimator import PlacementEstimator
from streamrl.resharding.grids import RankGrid

SCHEDULED = 6
"""So many allocations, with the least sums of stages, are scheduled."""
ROUNDS = 3

Roles = Mapping[str, CallAssignment]
Set = tuple[str, ...]


@dataclass(frozen=True)
class SetPlan:
    """What a set of roles does on its devices: seconds of each kind of call, in turn."""

    roles: Roles
    seconds: Mapping[CallKind, float]

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class FamilyPlan:
    """The best of a family: seconds of a step, infinite where nothing fits."""

    step_s: float
    placement: Placement | None = None
    nodes: Sequence[int] = ()


@dataclass
class Families:
    """Of one problem, on the first nodes of its cluster; what was found is kept.

    nested: whether a generator's grid divides the trainer's, as HybridFlow's groups ask for.
    """

    problem: PlacementProblem
    costs: CostModel
    nested: bool = True
    streamed: bool = False
    zero_stage: int = 1
    _plans: dict[tuple[Set, int], SetPlan | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rough = self.costs.approximate_costs
        self.exact = PlacementEstimator(self.problem, self.costs)
        self.estimator = PlacementEstimator(self.problem, self.rough)
        self.choices = ParallelismChoices(self.estimator, rules=allow_any_split)
        self.generation = GenerationModel(self.problem.workload)
        self.per_node = self.problem.cluster.node_groups[0].devices_per_node

    def best(self, sets: Sequence[Set], devices: int) -> FamilyPlan:
        """The fastest placement of these sets on so many devices, all of them used."""
        found = sorted(self._allocated(sets, devices // self.per_node), key=lambda each: each[0])
        best = FamilyPlan(math.inf)
        for _, nodes, plans in found[:SCHEDULED]:
            placement = self._placement(nodes, plans)
            seconds = self.estimator.step_s(placement)
            if seconds < best.step_s:
                best = FamilyPlan(seconds, placement, nodes)
        if best.placement is None:
            return best
        return replace(best, step_s=self.exact.step_s(best.placement))

    def _allocated(
        self, sets: Sequence[Set], nodes: int
    ) -> Iterator[tuple[float, Sequence[int], Sequence[SetPlan]]]:
        for cuts in itertools.combinations(range(1, nodes), len(sets) - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *cuts, nodes))]
            plans = [self.plan(each, count) for each, count in zip(sets, counts, strict=True)]
            fit = [plan for plan in plans if plan is not None]
            if len(fit) == len(plans):
                slowest = (max(plan.seconds[kind] for plan in fit) for kind in CallKind)
                yield sum(slowest), counts, fit

    def _placement(self, nodes: Sequence[int], plans: Sequence[SetPlan]) -> Placement:
        roles: dict[str, CallAssignment] = {}
        first = 0
        for count, plan in zip(nodes, plans, strict=True):
            mesh = Mesh(first, count * self.per_node)
            roles |= {role: replace(each, mesh=mesh) for role, each in plan.roles.items()}
            first += mesh.size
        return self.choices.make_placement(roles, 0, streamed=self.streamed)

    def plan(self, roles: Set, nodes: int) -> SetPlan | None:
        """What these roles do best on so many nodes together; None where they do not fit."""
        key = (roles, nodes)
        if key not in self._plans:
            starts = [plan for start in self._starts(roles, nodes) if (plan := self._timed(start))]
            best = min(starts, key=lambda plan: plan.total_s, default=None)
            self._plans[key] = self._descend(best) if best else None
        return self._plans[key]

    def _starts(self, roles: Set, nodes: int) -> Iterator[Roles]:
        """All roles alike: every grid of a model of them."""
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
                for option in self._options(role, plan):
                    other = self._timed(_with(plan.roles, role, option))
                    if other and other.total_s < plan.total_s:
                        plan = other
            if plan is before:
                break
        return plan

    def _options(self, role: str, plan: SetPlan) -> Iterator[CallAssignment]:
        for option in self.choices.list_options(role, plan.roles[role].mesh):
            if option.zero_stage <= self.zero_stage:
                yield option

    def _timed(self, roles: Roles) -> SetPlan | None:
        """Seconds of the calls of a set of roles; None where it cannot be."""
        generator, policy = roles.get("generator"), roles.get("policy")
        if self.nested and generator and policy and not _nests(policy.grid, generator.grid):
            return None
        placement = self.choices.make_placement(roles)
        if self.rough.explain_infeasible(placement):
            return None
        seconds = dict.fromkeys(CallKind, 0.0)
        for role, assignment in roles.items():
            kind = self.choices.dataflow.calls_by_role[role][0].kind
            if kind is CallKind.GENERATE:
                seconds[kind] += self._generate_s(placement, assignment)
            else:
                seconds[kind] += self.choices.alone_duration_s(role, assignment)
        return SetPlan(roles, seconds)

    def _generate_s(self, placement: Placement, assignment: CallAssignment) -> float:
        """With the memory that the others leave for keys and values."""
        shape = self.problem.find_model("generate")
        assert shape is not None
        work = CallCost(
            shape, assignment, self.problem.workload, self.problem.cluster, self.costs.constants
        )
        timing = generator_timing(work, self.rough.kv_capacity_bytes(placement))
        return self.generation.find_completions_s(timing, (1.0,))[-1]


def _with(roles: Roles, role: str, option: CallAssignment) -> Roles:
    """A critic computes values as it is split for training: it has its weights once."""
    changed = {**roles, role: option}
    if "critic" in changed:
        changed["value"] = replace(changed["critic"], zero_stage=1)
    return changed


def _nests(train: RankGrid, generate: RankGrid) -> bool:
    return not train.pp_size % generate.pp_size and not train.tp_size % generate.tp_size
