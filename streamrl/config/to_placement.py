"""A run's settings as a placement, and a placement as the settings of a run."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx

from streamrl.buffer.admission.staleness_credits import most_group_bytes
from streamrl.config.cross_checks import apart_at_any_size
from streamrl.config.role_counts import counts
from streamrl.config.run_config import RunConfig
from streamrl.config.to_planner_problem import CRITICS, JUDGES
from streamrl.dataflow import (
    GENERATE,
    GREEDY,
    MOVED,
    POLICY,
    Call,
    Dataflow,
    Kind,
)
from streamrl.engines.models.tensor_parallel_support import (
    sizes_of,
    unloaded_split,
    unserved_split,
    untrained_split,
)
from streamrl.engines.vllm.model_registry import unshared_process
from streamrl.errors import ConfigError
from streamrl.messages import COMPONENT_PREFIX, COST_PREFIX
from streamrl.placement import (
    STRATEGIES,
    Assignment,
    Cluster,
    Mesh,
    Placement,
    PlacementConfig,
    Problem,
    Timings,
    lay_out,
    owner,
)
from streamrl.placement.config import LEAST_PART, MIXED
from streamrl.placement.pools import Pool, hosts_actor
from streamrl.placement.problem import CallMemory, Costs
from streamrl.placement.search.split_rules import Rules
from streamrl.resharding import Grid
from streamrl.weights.config import SHARED_MEMORY
from streamrl.weights.transport_choice import many_nodes

SHADOWS = ("value", "cost_value")
SIZED_ALIKE = (JUDGES, CRITICS, SHADOWS)
"""Roles whose numbers of actors, and how their models are split, are one setting."""
RAY_THERE = "auto"
"""The address with which Ray finds the cluster that a node belongs to."""
STORE_SLACK = 1.05
"""For columns that a reward adds of its own."""
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


def placed_run(
    config: RunConfig, placement: Placement, *, kv_cache_bytes: float | None = None
) -> RunConfig:
    """The same run, placed so; `run_placement` is the inverse, but for the devices' numbers.

    kv_cache_bytes: for keys and values on each device that samples, where the run says nothing;
    null leaves them what the engine takes. Raises ConfigError naming the call, or the devices, that
    streamrl cannot run so.
    """
    stages = {call.stage: call for call in config.dataflow.calls if call.stage in placement.calls}
    for stage, call in stages.items():
        _check_runs(call, placement.calls[stage], placement)
    pools = pools_of(config.dataflow, placement)
    if pools is None:
        raise ConfigError(f"placement: {placement}: {NOT_POOLS}")
    if why := unlike(config.dataflow, placement):
        raise ConfigError(f"placement: {placement}: {why}")
    roles = {call.role: placement.calls[stage] for stage, call in stages.items()}
    # Sizes that go with the new placement may not go with the run's own.
    apart = replace(config.placement, mode="disaggregated", pools=[], memory_mb=None)
    sized = _sized_run(replace(config, placement=apart), roles, placement.max_staleness)
    if kv_cache_bytes is not None and config.generator.kv_cache_mb is None:
        given = max(1, int(kv_cache_bytes) >> 20)
        sized = replace(sized, generator=replace(sized.generator, kv_cache_mb=given))
    there = replace(config.placement, mode=pools.mode, pools=pools.pools, memory_mb=None)
    return replace(sized, placement=there)


def sited_run(config: RunConfig, cluster: Cluster, *, longest_tokens: int) -> RunConfig:
    """The same run with what it needs to start on a cluster.

    Of several nodes it joins the Ray that runs there; on a single one it starts its own, with as
    many CPU slots as it asks for, and an object store with room for a step in any shard.
    longest_tokens: of the longest rollout.
    """
    there = config.placement
    if there.address:
        return config
    if cluster.num_nodes > 1:
        return replace(config, placement=replace(there, address=RAY_THERE))
    components = [COMPONENT_PREFIX + judge.component for judge in config.rewards]
    components += [COST_PREFIX + judge.component for judge in config.costs]
    rollouts = config.algorithm.group_size
    group = most_group_bytes(config.dataflow, components, rollouts=rollouts, tokens=longest_tokens)
    step = config.pipeline.groups_per_step * group * config.queue.shards
    needed_mb = math.ceil(STORE_SLACK * step / config.queue.store_share / (1 << 20))
    return replace(
        config,
        placement=replace(there, cpus=None, object_store_mb=max(there.object_store_mb, needed_mb)),
    )


def shares_devices(placement: Placement) -> bool:
    """Whether generators have devices that others compute on, too."""
    others = placement.calls.keys() - {GENERATE.stage, GREEDY.stage}
    return any(placement.overlaps(GENERATE.stage, other) for other in others)


# What streamrl runs.


def rules_of(config: RunConfig, problem: Problem) -> Rules:
    """`run_rules`, for a run's own types and models.

    Layers that are split are trained by torch, which keeps no master weights for those in bfloat16,
    and no adapters; it shards all of a model that is whole, or nothing.
    """
    trainers = {role: config.trainer_of(role) for role in config.dataflow.trained}
    whole = {r for r, each in trainers.items() if each.dtype == "bfloat16" or each.lora_rank}
    on_gpu = not problem.cluster.is_cpu

    def rules(call: Call, grid: Grid) -> Sequence[int]:
        shape = problem.models.get(call.role) or problem.models[call.follows]
        sizes, ranks = sizes_of(shape), grid.tensor
        if call.kind is not Kind.TRAIN:
            why = unserved_split(sizes, ranks) or unloaded_split(
                ranks, has_experts=bool(shape.experts), on_gpu=on_gpu
            )
            return () if why else run_rules(call, grid)
        if ranks > 1 and (call.role in whole or untrained_split(shape.family, sizes, ranks)):
            return ()
        is_sharded = trainers[call.role].backend == "torch" and grid.size > 1
        return (0, 3) if is_sharded and ranks == 1 else run_rules(call, grid)

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


def run_costs(config: RunConfig, problem: Problem, costs: Costs) -> "RunCosts":
    """Costs of placements of a run that `streamrl train` takes."""
    # Sizes that are no model's are taken for those of one that vLLM has a class for.
    architectures = problem.models[POLICY].architectures
    on_gpu = not problem.cluster.is_cpu
    nodes = many_nodes(problem.cluster.num_nodes)

    def refused(placement: PlacementConfig, max_staleness: int) -> str:
        if nodes and config.weights.transport == SHARED_MEMORY:
            return f"weights.transport={SHARED_MEMORY}: {nodes}"
        if not placement.is_hybrid:
            return ""
        if architectures is not None and (
            why := unshared_process(architectures, mode=placement.mode, on_gpu=on_gpu)
        ):
            return why
        return apart_at_any_size(config, max_staleness)

    return RunCosts(costs, config.dataflow, refused=refused)


class RunCosts:
    """Costs of placements that streamrl itself runs; all others do not fit."""

    def __init__(
        self,
        costs: Costs,
        dataflow: Dataflow,
        *,
        refused: Callable[[PlacementConfig, int], str] = lambda _placement, _bound: "",
    ) -> None:
        """`refused` is why a run does not start so placed and under a bound, if so."""
        self._costs, self._dataflow, self._refused = costs, dataflow, refused
        self._pools: dict[tuple[bool, tuple[tuple[str, Mesh], ...]], PlacementConfig | None] = {}

    @property
    def rough(self) -> "RunCosts":
        """The same for a search."""
        return RunCosts(self._costs.rough, self._dataflow, refused=self._refused)

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
        if why := unlike(self._dataflow, placement):
            return f"streamrl does not run it: {why}"
        return self._refused(pools, placement.max_staleness)


def _check_runs(call: Call, assignment: Assignment, placement: Placement) -> None:
    place, grid = f"placement.{call.stage}: {assignment}", assignment.grid
    if assignment.expert > 1:
        raise ConfigError(f"{place}: {NO_EXPERTS}")
    if grid.stages > 1:
        raise ConfigError(f"{place}: streamrl trains and serves without pipeline stages")
    if call.kind is Kind.SCORE and grid.tensor > 1:
        raise ConfigError(f"{place}: a model that scores is whole on each of its devices")
    if call.stage == GREEDY.stage and placement.calls[GENERATE.stage] != assignment:
        raise ConfigError(f"{place}: the generators' devices are {placement.calls['generate']}")
    if call.kind is Kind.TRAIN and grid.tensor > 1 and assignment.zero_stage in (1, 2):
        raise ConfigError(
            f"{place}: ZeRO {assignment.zero_stage} does not go with tensor parallelism; 0 and 3 do"
        )


def unlike(dataflow: Dataflow, placement: Placement) -> str:
    """Which roles differ that one setting of a run sizes; empty if none does."""
    calls = {call.role: placement.calls.get(call.stage) for call in dataflow.calls}
    for roles in SIZED_ALIKE:
        found = [(role, each) for role in roles if (each := calls.get(role)) is not None]
        for (one, this), (other, that) in pairwise(found):
            if (this.mesh.size, this.grid, this.zero_stage) != (
                that.mesh.size,
                that.grid,
                that.zero_stage,
            ):
                return f"{one} and {other} have one setting for their sizes, not {this} and {that}"
    return ""


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

    def trained(role: str, assignment: Assignment) -> dict[str, Any]:
        whole = config.trainer_of(role).backend
        found: dict[str, Any] = {"world_size": assignment.mesh.size}
        found |= {"tensor_parallel": assignment.grid.tensor, "zero_stage": assignment.zero_stage}
        return found | {"backend": "torch" if assignment.grid.tensor > 1 else whole}

    generator, policy = roles[GENERATE.role], roles[POLICY]
    parts: dict[str, Any] = {
        "pipeline": replace(config.pipeline, max_staleness=max_staleness, depth=None),
        "trainer": replace(config.trainer, **trained(POLICY, policy)),
        "generator": replace(
            config.generator,
            replicas=generator.grid.replicas,
            tensor_parallel=generator.grid.tensor,
        ),
    }
    if judges := [roles[role].mesh.size for role in JUDGES if role in roles]:
        parts["scorer"] = replace(config.scorer, replicas=judges[0])
    if MOVED in roles:
        parts["reference"] = replace(config.reference, replicas=roles[MOVED].mesh.size)
    critic: dict[str, Any] = {}
    if critics := [role for role in CRITICS if role in roles]:
        own = trained(critics[0], roles[critics[0]])
        critic["trainer"] = {**config.critic.trainer, **own}
    if shadows := [roles[role].mesh.size for role in SHADOWS if role in roles]:
        critic["replicas"] = shadows[0]
    # At once: sizes of one part may not go with those that another had.
    return replace(config, critic=replace(config.critic, **critic), **parts)
