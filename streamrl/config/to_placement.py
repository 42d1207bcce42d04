"""A run's settings as a placement, and a placement as the settings of a run."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx

from streamrl.buffer.admission.staleness_credits import max_group_bytes
from streamrl.config.cross_checks import find_conflict_at_any_size
from streamrl.config.role_counts import count_actors
from streamrl.config.run_config import RunConfig
from streamrl.config.to_planner_problem import CRITIC_ROLES, REWARD_ROLES
from streamrl.dataflow import (
    EMA_REFERENCE,
    GENERATE_CALL,
    GREEDY_CALL,
    POLICY,
    CallKind,
    Dataflow,
    ModelCall,
)
from streamrl.engines.models.tensor_parallel_support import (
    explain_unloadable_split,
    explain_unservable_split,
    explain_untrainable_split,
    get_split_sizes,
)
from streamrl.engines.vllm.model_registry import explain_unshareable_process
from streamrl.errors import ConfigError
from streamrl.messages import COMPONENT_PREFIX, COST_PREFIX
from streamrl.placement import (
    POOL_STRATEGIES,
    CallAssignment,
    Cluster,
    Mesh,
    Placement,
    PlacementConfig,
    PlacementProblem,
    StageTimings,
    find_model_role,
    lay_out_slots,
)
from streamrl.placement.config import MIN_POOL_FRACTION, MIXED
from streamrl.placement.pools import RolePool, has_colocated_actor
from streamrl.placement.problem import CallMemory, PlacementCosts
from streamrl.placement.search.split_rules import SplitRules
from streamrl.resharding import RankGrid
from streamrl.weights.config import SHARED_MEMORY
from streamrl.weights.transport_choice import describe_node_obstacle

VALUE_ROLES = ("value", "cost_value")
EQUALLY_SIZED_ROLES = (REWARD_ROLES, CRITIC_ROLES, VALUE_ROLES)
"""Roles whose numbers of actors, and how their models are split, are one setting."""
RAY_AUTO_ADDRESS = "auto"
"""The address with which Ray finds the cluster that a node belongs to."""
OBJECT_STORE_SLACK = 1.05
"""For columns that a reward adds of its own."""
NO_EXPERT_PARALLELISM = "streamrl has no expert parallelism"
NO_MATCHING_POOLS = "no pools of roles have these devices"


def build_run_placement(config: RunConfig, roles: Collection[str]) -> Placement:
    """Where the calls of a run are, of those that compute with the model of one of the roles.

    Devices are numbered from 0; placement.mode=auto is taken for disaggregated.
    """
    numbers = {role: count for role, (_, count) in count_actors(config).items()}
    split = config.generator.tensor_parallel
    if not config.placement.is_hybrid:
        numbers[GENERATE_CALL.role] *= split
    slots = lay_out_slots(config.placement.shared_pools, numbers).slots
    calls = {}
    for call in config.dataflow.ordered_calls:
        if find_model_role(call) not in roles:
            continue
        own = slots[call.role]
        mesh = Mesh(own[0], len(own))
        if call.kind is CallKind.TRAIN:
            trainer = config.get_trainer_config(call.role)
            tensor = trainer.tensor_parallel
            grid = RankGrid(1, tensor, mesh.size // tensor)
            calls[call.stage] = CallAssignment(mesh, grid, trainer.zero_stage)
        else:
            tensor = split if call.kind is CallKind.GENERATE else 1
            calls[call.stage] = CallAssignment(mesh, RankGrid(1, tensor, mesh.size // tensor))
    return renumber_devices(Placement(calls, config.pipeline.max_staleness))


def renumber_devices(placement: Placement) -> Placement:
    """The same with its devices numbered anew: those that nobody has are left out."""
    held = sorted({d for each in placement.assignments.values() for d in each.mesh.devices})
    number = {device: i for i, device in enumerate(held)}
    return replace(
        placement,
        assignments={
            stage: replace(each, mesh=Mesh(number[each.mesh.first], each.mesh.size))
            for stage, each in placement.assignments.items()
        },
    )


def apply_placement(
    config: RunConfig, placement: Placement, *, kv_cache_bytes: float | None = None
) -> RunConfig:
    """The same run, placed so; `build_run_placement` is the inverse, but for the devices' numbers.

    kv_cache_bytes: for keys and values on each device that samples, where the run says nothing;
    null leaves them what the engine takes. Raises ConfigError naming the call, or the devices, that
    streamrl cannot run so.
    """
    stages = {
        call.stage: call for call in config.dataflow.calls if call.stage in placement.assignments
    }
    for stage, call in stages.items():
        _check_supported(call, placement.assignments[stage], placement)
    pools = find_pools(config.dataflow, placement)
    if pools is None:
        raise ConfigError(f"placement: {placement}: {NO_MATCHING_POOLS}")
    if why := find_size_mismatch(config.dataflow, placement):
        raise ConfigError(f"placement: {placement}: {why}")
    roles = {call.role: placement.assignments[stage] for stage, call in stages.items()}
    # Sizes that go with the new placement may not go with the run's own.
    apart = replace(config.placement, mode="disaggregated", pools=[], memory_mb=None)
    sized = _apply_sizes(replace(config, placement=apart), roles, placement.max_staleness)
    if kv_cache_bytes is not None and config.generator.kv_cache_mb is None:
        given = max(1, int(kv_cache_bytes) >> 20)
        sized = replace(sized, generator=replace(sized.generator, kv_cache_mb=given))
    there = replace(config.placement, mode=pools.mode, pools=pools.pools, memory_mb=None)
    return replace(sized, placement=there)


def configure_for_cluster(config: RunConfig, cluster: Cluster, *, longest_tokens: int) -> RunConfig:
    """The same run with what it needs to start on a cluster.

    Of several nodes it joins the Ray that runs there; on a single one it starts its own, with as
    many CPU slots as it asks for, and an object store with room for a step in any shard.
    longest_tokens: of the longest rollout.
    """
    there = config.placement
    if there.address:
        return config
    if cluster.num_nodes > 1:
        return replace(config, placement=replace(there, address=RAY_AUTO_ADDRESS))
    components = [COMPONENT_PREFIX + judge.component_name for judge in config.rewards]
    components += [COST_PREFIX + judge.component_name for judge in config.costs]
    rollouts = config.algorithm.group_size
    group = max_group_bytes(config.dataflow, components, rollouts=rollouts, tokens=longest_tokens)
    step = config.pipeline.groups_per_step * group * config.queue.shards
    needed_mb = math.ceil(OBJECT_STORE_SLACK * step / config.queue.store_share / (1 << 20))
    return replace(
        config,
        placement=replace(there, cpus=None, object_store_mb=max(there.object_store_mb, needed_mb)),
    )


def has_shared_generator_devices(placement: Placement) -> bool:
    """Whether generators have devices that others compute on, too."""
    others = placement.assignments.keys() - {GENERATE_CALL.stage, GREEDY_CALL.stage}
    return any(placement.overlaps(GENERATE_CALL.stage, other) for other in others)


# What streamrl runs.


def make_split_rules(config: RunConfig, problem: PlacementProblem) -> SplitRules:
    """`list_zero_stages`, for a run's own types and models.

    Layers that are split are trained by torch, which keeps no master weights for those in bfloat16,
    and no adapters; it shards all of a model that is whole, or nothing.
    """
    trainers = {role: config.get_trainer_config(role) for role in config.dataflow.trained_roles}
    whole = {r for r, each in trainers.items() if each.dtype == "bfloat16" or each.lora_rank}
    on_gpu = not problem.cluster.is_cpu

    def rules(call: ModelCall, grid: RankGrid) -> Sequence[int]:
        shape = problem.models.get(call.role) or problem.models[call.followed_role]
        sizes, ranks = get_split_sizes(shape), grid.tp_size
        if call.kind is not CallKind.TRAIN:
            why = explain_unservable_split(sizes, ranks) or explain_unloadable_split(
                ranks, has_experts=bool(shape.experts), on_gpu=on_gpu
            )
            return () if why else list_zero_stages(call, grid)
        if ranks > 1 and (
            call.role in whole or explain_untrainable_split(shape.family, sizes, ranks)
        ):
            return ()
        is_sharded = trainers[call.role].backend == "torch" and grid.num_ranks > 1
        return (0, 3) if is_sharded and ranks == 1 else list_zero_stages(call, grid)

    return rules


def list_zero_stages(call: ModelCall, grid: RankGrid) -> Sequence[int]:
    """The ZeRO stages under which streamrl can run a call split so; none where it cannot.

    It trains and serves without pipeline stages, and what scores is whole on each device. Layers
    that are split are trained by torch, which shards all of a model over replicas, or nothing.
    """
    if grid.pp_size > 1 or (call.kind is CallKind.SCORE and grid.tp_size > 1):
        return ()
    if call.kind is not CallKind.TRAIN or grid.num_ranks == 1:
        return (1,)
    if grid.tp_size > 1:
        return (0, 3) if grid.dp_size > 1 else (0,)
    return (1, 3)


def make_run_costs(
    config: RunConfig, problem: PlacementProblem, costs: PlacementCosts
) -> "RunnablePlacementCosts":
    """Costs of placements of a run that `streamrl train` takes."""
    # Sizes that are no model's are taken for those of one that vLLM has a class for.
    architectures = problem.models[POLICY].architectures
    on_gpu = not problem.cluster.is_cpu
    nodes = describe_node_obstacle(problem.cluster.num_nodes)

    def refused(placement: PlacementConfig, max_staleness: int) -> str:
        if nodes and config.weights.transport == SHARED_MEMORY:
            return f"weights.transport={SHARED_MEMORY}: {nodes}"
        if not placement.is_hybrid:
            return ""
        if architectures is not None and (
            why := explain_unshareable_process(architectures, mode=placement.mode, on_gpu=on_gpu)
        ):
            return why
        return find_conflict_at_any_size(config, max_staleness)

    return RunnablePlacementCosts(costs, config.dataflow, refused=refused)


class RunnablePlacementCosts:
    """Costs of placements that streamrl itself runs; all others do not fit."""

    def __init__(
        self,
        costs: PlacementCosts,
        dataflow: Dataflow,
        *,
        refused: Callable[[PlacementConfig, int], str] = lambda _placement, _bound: "",
    ) -> None:
        """`refused` is why a run does not start so placed and under a bound, if so."""
        self._costs, self._dataflow, self._find_refusal = costs, dataflow, refused
        self._pool_cache: dict[
            tuple[bool, tuple[tuple[str, Mesh], ...]], PlacementConfig | None
        ] = {}

    @property
    def approximate_costs(self) -> "RunnablePlacementCosts":
        """The same for a search."""
        return RunnablePlacementCosts(
            self._costs.approximate_costs, self._dataflow, refused=self._find_refusal
        )

    def predict_timings(self, placement: Placement) -> StageTimings:
        """How long things take."""
        return self._costs.predict_timings(placement)

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        """Bytes that each call holds of one of its devices."""
        return self._costs.predict_memory(placement)

    def call_duration_s(self, stage: str, assignment: CallAssignment) -> float:
        """A whole step's work of one call, alone on its devices."""
        if assignment.ep_size > 1:
            return math.inf
        return self._costs.call_duration_s(stage, assignment)

    def first_rollouts_s(self, assignment: CallAssignment) -> float:
        """Until the first rollouts are there, of generation alone on its devices."""
        return self._costs.first_rollouts_s(assignment)

    def explain_infeasible(self, placement: Placement) -> str:
        """Why it cannot be, or why streamrl cannot run it."""
        return self._costs.explain_infeasible(placement) or self._find_run_problem(placement)

    def _find_run_problem(self, placement: Placement) -> str:
        for stage, each in placement.assignments.items():
            if each.ep_size > 1:
                return f"{stage} on {each.mesh}: {NO_EXPERT_PARALLELISM}"
        generate, train = (
            placement.assignments.get(GENERATE_CALL.stage),
            placement.assignments.get("train"),
        )
        if generate is None or train is None:
            return ""  # a part of a placement, whatever the rest will be
        meshes = tuple((stage, each.mesh) for stage, each in placement.assignments.items())
        key = (generate.grid.tp_size > 1, meshes)
        if key not in self._pool_cache:
            self._pool_cache[key] = find_pools(self._dataflow, placement)
        pools = self._pool_cache[key]
        if pools is None:
            return f"streamrl does not run it: {NO_MATCHING_POOLS}"
        if why := find_size_mismatch(self._dataflow, placement):
            return f"streamrl does not run it: {why}"
        return self._find_refusal(pools, placement.max_staleness)


def _check_supported(call: ModelCall, assignment: CallAssignment, placement: Placement) -> None:
    place, grid = f"placement.{call.stage}: {assignment}", assignment.grid
    if assignment.ep_size > 1:
        raise ConfigError(f"{place}: {NO_EXPERT_PARALLELISM}")
    if grid.pp_size > 1:
        raise ConfigError(f"{place}: streamrl trains and serves without pipeline stages")
    if call.kind is CallKind.SCORE and grid.tp_size > 1:
        raise ConfigError(f"{place}: a model that scores is whole on each of its devices")
    if call.stage == GREEDY_CALL.stage and placement.assignments[GENERATE_CALL.stage] != assignment:
        raise ConfigError(
            f"{place}: the generators' devices are {placement.assignments['generate']}"
        )
    if call.kind is CallKind.TRAIN and grid.tp_size > 1 and assignment.zero_stage in (1, 2):
        raise ConfigError(
            f"{place}: ZeRO {assignment.zero_stage} does not go with tensor parallelism; 0 and 3 do"
        )


def find_size_mismatch(dataflow: Dataflow, placement: Placement) -> str:
    """Which roles differ that one setting of a run sizes; empty if none does."""
    calls = {call.role: placement.assignments.get(call.stage) for call in dataflow.calls}
    for roles in EQUALLY_SIZED_ROLES:
        found = [(role, each) for role in roles if (each := calls.get(role)) is not None]
        for (one, this), (other, that) in pairwise(found):
            if (this.mesh.size, this.grid, this.zero_stage) != (
                that.mesh.size,
                that.grid,
                that.zero_stage,
            ):
                return f"{one} and {other} have one setting for their sizes, not {this} and {that}"
    return ""


def find_pools(dataflow: Dataflow, placement: Placement) -> PlacementConfig | None:
    """The mode, and pools of roles, in which a run has just these devices; None if there is none.

    A generator that shares devices is split over ranks of the trainer in one process, or whole.
    """
    calls = {call.role: placement.assignments.get(call.stage) for call in dataflow.ordered_calls}
    meshes = {role: each.mesh for role, each in calls.items() if each is not None}
    generator = calls[GENERATE_CALL.role]
    return _find_mesh_pools(meshes, is_split=generator is not None and generator.grid.tp_size > 1)


def _find_mesh_pools(meshes: Mapping[str, Mesh], *, is_split: bool) -> PlacementConfig | None:
    numbers = {role: mesh.size for role, mesh in meshes.items()}
    wanted = _compute_mesh_offsets(meshes)
    for way in _iter_pool_options(meshes):
        if not _has_all_overlaps(way.shared_pools, wanted):
            continue
        shares = any(GENERATE_CALL.role in pool for pool in way.shared_pools)
        # One process of both for each of their devices.
        together = meshes.get(GENERATE_CALL.role) == meshes.get(POLICY)
        hosts = has_colocated_actor(way.shared_pools)
        runs = together if hosts else not (is_split and shares)
        if not runs:
            continue
        slots = lay_out_slots(way.shared_pools, numbers).slots
        if (
            _compute_mesh_offsets({role: Mesh(own[0], len(own)) for role, own in slots.items()})
            == wanted
        ):
            return way
    return None


def _has_all_overlaps(pools: Sequence[RolePool], overlaps: Iterable[tuple[str, str]]) -> bool:
    """Whether all roles that share devices with one another are in the same pool."""
    pool_of = {role: i for i, pool in enumerate(pools) for role in pool}
    return all(
        one == other or (one in pool_of and pool_of[one] == pool_of.get(other))
        for one, other in overlaps
    )


def _iter_pool_options(meshes: Mapping[str, Mesh]) -> Iterator[PlacementConfig]:
    """What may say who shares devices: the strategies that have a name, then pools of roles."""
    for mode in ("disaggregated", *POOL_STRATEGIES):
        yield PlacementConfig(mode=mode)
    graph = nx.Graph([(a, b) for a in meshes for b in meshes if meshes[a].overlaps(meshes[b])])
    pools = []
    for roles in nx.connected_components(graph):
        size = len({device for role in roles for device in meshes[role].devices})
        ordered = sorted(roles, key=lambda role: (meshes[role].first, -meshes[role].size, role))
        if len(ordered) > 1:
            pools.append({role: meshes[role].size / size for role in ordered})
    # Of a pool of thousands of devices none can have one or two of them.
    if pools and all(part >= MIN_POOL_FRACTION for pool in pools for part in pool.values()):
        yield PlacementConfig(mode=MIXED, pools=pools)


def _compute_mesh_offsets(meshes: Mapping[str, Mesh]) -> dict[tuple[str, str], int]:
    """How each role lies to those it shares devices with; a role to itself, so that all count."""
    return {
        (one, other): meshes[other].first - meshes[one].first
        for one in meshes
        for other in meshes
        if meshes[one].overlaps(meshes[other])
    }


def _apply_sizes(
    config: RunConfig, roles: Mapping[str, CallAssignment], max_staleness: int
) -> RunConfig:
    """The run with as many actors, and as many devices for each, as the placement has."""

    def trained(role: str, assignment: CallAssignment) -> dict[str, Any]:
        whole = config.get_trainer_config(role).backend
        found: dict[str, Any] = {"world_size": assignment.mesh.size}
        found |= {"tensor_parallel": assignment.grid.tp_size, "zero_stage": assignment.zero_stage}
        return found | {"backend": "torch" if assignment.grid.tp_size > 1 else whole}

    generator, policy = roles[GENERATE_CALL.role], roles[POLICY]
    parts: dict[str, Any] = {
        "pipeline": replace(config.pipeline, max_staleness=max_staleness, depth=None),
        "trainer": replace(config.trainer, **trained(POLICY, policy)),
        "generator": replace(
            config.generator,
            replicas=generator.grid.dp_size,
            tensor_parallel=generator.grid.tp_size,
        ),
    }
    if judges := [roles[role].mesh.size for role in REWARD_ROLES if role in roles]:
        parts["scorer"] = replace(config.scorer, replicas=judges[0])
    if EMA_REFERENCE in roles:
        parts["reference"] = replace(config.reference, replicas=roles[EMA_REFERENCE].mesh.size)
    critic: dict[str, Any] = {}
    if critics := [role for role in CRITIC_ROLES if role in roles]:
        own = trained(critics[0], roles[critics[0]])
        critic["trainer"] = {**config.critic.trainer, **own}
    if shadows := [roles[role].mesh.size for role in VALUE_ROLES if role in roles]:
        critic["replicas"] = shadows[0]
    # At once: sizes of one part may not go with those that another had.
    return replace(config, critic=replace(config.critic, **critic), **parts)
