"""A run's settings as a placement, and a placement as the settings of a run."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx

from streamrl.config import RunConfig
from streamrl.dataflow import (
    GENERATE,
    GREEDY,
    MOVED,
    POLICY,
    Call,
    Dataflow,
    Kind,
)
from streamrl.errors import ConfigError
from streamrl.placement import (
    STRATEGIES,
    Assignment,
    Mesh,
    Placement,
    PlacementConfig,
    Timings,
    lay_out,
    owner,
)
from streamrl.placement.config import LEAST_PART, MIXED
from streamrl.placement.estimates import CallMemory, Costs
from streamrl.placement.pools import Pool, hosts_actor
from streamrl.placement.search.rules import Rules
from streamrl.planning import CRITICS, JUDGES
from streamrl.resharding import Grid
from streamrl.slots import counts

SHADOWS = ("value", "cost_value")
NO_EXPERTS = "streamrl has no expert parallelism"
NOT_POOLS = "no pools of roles have these devices"


def run_placement(config: RunConfig, roles: Collection[str]) -> Placement:
    """Where the calls of a run are, of those that compute with the model of one of the roles.

    Devices are numbered from 0; placement.mode=auto is taken for disaggregated.
    """
    numbers = {role: count for role, (_, count) in counts(config).items()}
    split = config.generator.tensor_parallel
    if not config.placement.is_hybrid:
        numbers[GENERATE.role] *= split
    slots = lay_out(config.placement.shared, numbers).slots
    calls = {}
    for call in config.dataflow.ordered:
        if owner(call) not in roles:
            continue
        own = slots[call.role]
        mesh = Mesh(own[0], len(own))
        if call.kind is Kind.TRAIN:
            trainer = config.trainer_of(call.role)
            tensor = trainer.tensor_parallel
            grid = Grid(1, tensor, mesh.size // tensor)
            calls[call.stage] = Assignment(mesh, grid, trainer.zero_stage)
        else:
            tensor = split if call.kind is Kind.GENERATE else 1
            calls[call.stage] = Assignment(mesh, Grid(1, tensor, mesh.size // tensor))
    return packed(Placement(calls, config.pipeline.max_staleness))


def packed(placement: Placement) -> Placement:
    """The same with its devices numbered anew: those that nobody has are left out."""
    held = sorted({d for each in placement.calls.values() for d in each.mesh.devices})
    number = {device: i for i, device in enumerate(held)}
    return replace(
        placement,
        calls={
            stage: replace(each, mesh=Mesh(number[each.mesh.first], each.mesh.size))
            for stage, each in placement.calls.items()
        },
    )


def placed_run(config: RunConfig, placement: Placement) -> RunConfig:
    """The same run, placed so; `run_placement` is the inverse, but for the devices' numbers.

    Raises ConfigError naming the call, or the devices, that streamrl cannot run so.
    """
    stages = {call.stage: call for call in config.dataflow.calls if call.stage in placement.calls}
    for stage, call in stages.items():
        _check_runs(call, placement.calls[stage], placement)
    pools = pools_of(config.dataflow, placement)
    if pools is None:
        raise ConfigError(f"placement: {placement}: {NOT_POOLS}")
    roles = {call.role: placement.calls[stage] for stage, call in stages.items()}
    sized = _sized_run(config, roles, placement.max_staleness)
    there = replace(config.placement, mode=pools.mode, pools=pools.pools, memory_mb=None)
    return replace(sized, placement=there)


# What streamrl runs.


def rules_of(config: RunConfig) -> Rules:
    """`run_rules`, for a run's own types.

    Layers that are split are trained by torch, which keeps no master weights for those in bfloat16,
    and no adapters.
    """

    trainers = {role: config.trainer_of(role) for role in config.dataflow.trained}
    whole = {r for r, each in trainers.items() if each.dtype == "bfloat16" or each.lora_rank}

    def rules(call: Call, grid: Grid) -> Sequence[int]:
        is_split = call.kind is Kind.TRAIN and grid.tensor > 1
        return () if is_split and call.role in whole else run_rules(call, grid)

    return rules


def run_rules(call: Call, grid: Grid) -> Sequence[int]:
    """The ZeRO stages under which streamrl can run a call split so; none where it cannot.

    It trains and serves without pipeline stages, and what scores is whole on each device. Layers
    that are split are trained by torch, which shards all of a model over replicas, or nothing.
    """
    if grid.stages > 1 or (call.kind is Kind.SCORE and grid.tensor > 1):
        return ()
    if call.kind is not Kind.TRAIN or grid.size == 1:
        return (1,)
    if grid.tensor > 1:
        return (0, 3) if grid.replicas > 1 else (0,)
    return (1, 3)


class RunCosts:
    """Costs of placements that streamrl itself runs; all others do not fit."""

    def __init__(
        self, costs: Costs, dataflow: Dataflow, *, apart: Callable[[int], str] = lambda _: ""
    ) -> None:
        """`apart` is why trainer and generators cannot share processes under a bound, if so."""
        self._costs, self._dataflow, self._apart = costs, dataflow, apart
        self._pools: dict[tuple[bool, tuple[tuple[str, Mesh], ...]], PlacementConfig | None] = {}

    @property
    def rough(self) -> "RunCosts":
        """The same for a search."""
        return RunCosts(self._costs.rough, self._dataflow, apart=self._apart)

    def timings(self, placement: Placement) -> Timings:
        """How long things take."""
        return self._costs.timings(placement)

    def memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        """Bytes that each call holds of one of its devices."""
        return self._costs.memory(placement)

    def call_s(self, stage: str, assignment: Assignment) -> float:
        """A whole step's work of one call, alone on its devices."""
        if assignment.expert > 1:
            return math.inf
        return self._costs.call_s(stage, assignment)

    def first_s(self, assignment: Assignment) -> float:
        """Until the first rollouts are there, of generation alone on its devices."""
        return self._costs.first_s(assignment)

    def unfit(self, placement: Placement) -> str:
        """Why it cannot be, or why streamrl cannot run it."""
        return self._costs.unfit(placement) or self._unrun(placement)

    def _unrun(self, placement: Placement) -> str:
        for stage, each in placement.calls.items():
            if each.expert > 1:
                return f"{stage} on {each.mesh}: {NO_EXPERTS}"
        generate, train = placement.calls.get(GENERATE.stage), placement.calls.get("train")
        if generate is None or train is None:
            return ""  # a part of a placement, whatever the rest will be
        meshes = tuple((stage, each.mesh) for stage, each in placement.calls.items())
        key = (generate.grid.tensor > 1, meshes)
        if key not in self._pools:
            self._pools[key] = pools_of(self._dataflow, placement)
        pools = self._pools[key]
        if pools is None:
            return f"streamrl does not run it: {NOT_POOLS}"
        return self._apart(placement.max_staleness) if pools.is_hybrid else ""


def _check_runs(call: Call, assignment: Assignment, placement: Placement) -> None:
    place, grid = f"placement.{call.stage}: {assignment}", assignment.grid
    if assignment.expert > 1:
        raise ConfigError(f"{place}: {NO_EXPERTS}")
    if grid.stages > 1:
        raise ConfigError(f"{place}: streamrl trains and serves without pipeline stages")
    if call.kind is Kind.SCORE and grid.tensor > 1:
        raise ConfigError(f"{place}: a model that scores is whole on each of its devices")
    if call == GREEDY and placement.calls[GENERATE.stage] != assignment:
        raise ConfigError(f"{place}: the generators' devices are {placement.calls['generate']}")
    if call.kind is Kind.TRAIN and grid.tensor > 1 and assignment.zero_stage in (1, 2):
        raise ConfigError(
            f"{place}: ZeRO {assignment.zero_stage} does not go with tensor parallelism; 0 and 3 do"
        )


def pools_of(dataflow: Dataflow, placement: Placement) -> PlacementConfig | None:
    """The mode, and pools of roles, in which a run has just these devices; None if there is none.

    A generator that shares devices is split over ranks of the trainer in one process, or whole.
    """
    calls = {call.role: placement.calls.get(call.stage) for call in dataflow.ordered}
    meshes = {role: each.mesh for role, each in calls.items() if each is not None}
    generator = calls[GENERATE.role]
    return _pools_of(meshes, is_split=generator is not None and generator.grid.tensor > 1)


def _pools_of(meshes: Mapping[str, Mesh], *, is_split: bool) -> PlacementConfig | None:
    numbers = {role: mesh.size for role, mesh in meshes.items()}
    wanted = _shifts(meshes)
    for way in _ways(meshes):
        if not _brings_together(way.shared, wanted):
            continue
        shares = any(GENERATE.role in pool for pool in way.shared)
        # One process of both for each of their devices.
        together = meshes.get(GENERATE.role) == meshes.get(POLICY)
        hosts = hosts_actor(way.shared)
        runs = together if hosts else not (is_split and shares)
        if not runs:
            continue
        slots = lay_out(way.shared, numbers).slots
        if _shifts({role: Mesh(own[0], len(own)) for role, own in slots.items()}) == wanted:
            return way
    return None


def _brings_together(pools: Sequence[Pool], overlaps: Iterable[tuple[str, str]]) -> bool:
    """Whether all roles that share devices with one another are in the same pool."""
    pool_of = {role: i for i, pool in enumerate(pools) for role in pool}
    return all(
        one == other or (one in pool_of and pool_of[one] == pool_of.get(other))
        for one, other in overlaps
    )


def _ways(meshes: Mapping[str, Mesh]) -> Iterator[PlacementConfig]:
    """What may say who shares devices: the strategies that have a name, then pools of roles."""
    for mode in ("disaggregated", *STRATEGIES):
        yield PlacementConfig(mode=mode)
    graph = nx.Graph([(a, b) for a in meshes for b in meshes if meshes[a].overlaps(meshes[b])])
    pools = []
    for roles in nx.connected_components(graph):
        size = len({device for role in roles for device in meshes[role].devices})
        ordered = sorted(roles, key=lambda role: (meshes[role].first, -meshes[role].size, role))
        if len(ordered) > 1:
            pools.append({role: meshes[role].size / size for role in ordered})
    # Of a pool of thousands of devices none can have one or two of them.
    if pools and all(part >= LEAST_PART for pool in pools for part in pool.values()):
        yield PlacementConfig(mode=MIXED, pools=pools)


def _shifts(meshes: Mapping[str, Mesh]) -> dict[tuple[str, str], int]:
    """How each role lies to those it shares devices with; a role to itself, so that all count."""
    return {
        (one, other): meshes[other].first - meshes[one].first
        for one in meshes
        for other in meshes
        if meshes[one].overlaps(meshes[other])
    }


def _sized_run(config: RunConfig, roles: Mapping[str, Assignment], max_staleness: int) -> RunConfig:
    """The run with as many actors, and as many devices for each, as the placement has."""

    def trained(assignment: Assignment) -> dict[str, Any]:
        found: dict[str, Any] = {"world_size": assignment.mesh.size}
        found |= {"tensor_parallel": assignment.grid.tensor, "zero_stage": assignment.zero_stage}
        return found | ({"backend": "torch"} if assignment.grid.tensor > 1 else {})

    generator, policy = roles[GENERATE.role], roles[POLICY]
    changed = replace(
        config,
        pipeline=replace(config.pipeline, max_staleness=max_staleness, depth=None),
        trainer=replace(config.trainer, **trained(policy)),
        generator=replace(
            config.generator,
            replicas=generator.grid.replicas,
            tensor_parallel=generator.grid.tensor,
        ),
    )
    judges = [roles[role].mesh.size for role in JUDGES if role in roles]
    if judges:
        changed = replace(changed, scorer=replace(changed.scorer, replicas=judges[0]))
    if MOVED in roles:
        replicas = roles[MOVED].mesh.size
        changed = replace(changed, reference=replace(changed.reference, replicas=replicas))
    critics = [role for role in CRITICS if role in roles]
    if critics:
        trainer = {**config.critic.trainer, **trained(roles[critics[0]])}
        changed = replace(changed, critic=replace(changed.critic, trainer=trainer))
    shadows = [roles[role].mesh.size for role in SHADOWS if role in roles]
    if shadows:
        changed = replace(changed, critic=replace(changed.critic, replicas=shadows[0]))
    return changed
