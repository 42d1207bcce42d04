"""Conversion between a run's settings and a placement, and the rules of runnable placements."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

from streamrl.config.role_counts import count_actors, count_ranks_per_replica
from streamrl.config.run_config import RunConfig, find_conflict_at_any_size
from streamrl.dataflow import (
    COST_VALUE_CALL,
    CRITIC_ROLES,
    GENERATE_CALL,
    GREEDY_CALL,
    POLICY,
    REWARD_ROLES,
    SERVING_ROLES,
    VALUE_CALL,
    CallKind,
    Dataflow,
    ModelCall,
)
from streamrl.engines.models.tensor_parallel_support import (
    check_rank_split,
    explain_unservable_split,
    find_family_config,
    get_split_sizes,
)
from streamrl.engines.trainer_config import (
    PARAMETER_SHARDING_STAGE,
    RankLayout,
    ShadowConfig,
    TrainerConfig,
)
from streamrl.engines.vllm.model_registry import explain_unshareable_process
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.config import MIN_POOL_FRACTION, MIXED, PlacementConfig
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.pools import POOL_STRATEGIES, has_colocated_actor, lay_out_slots
from streamrl.planner.costs.cost_model import make_trainer_sizes
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.search.hybridflow import SplitRules
from streamrl.resharding.grids import RankGrid
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.reward_set import SCORE_SPECS
from streamrl.weights.config import SHARED_MEMORY

RAY_AUTO_ADDRESS = "auto"
"""Ray address that joins the cluster running on the node."""
OBJECT_STORE_SLACK = 1.05
"""Reserve for extra columns that rewards add."""
HOSTED_VALUES = ((VALUE_CALL, "train_critic"), (COST_VALUE_CALL, "train_cost_critic"))
"""Calls that compute values, and the stage that trains their critic."""
NO_MATCHING_POOLS = "no placement mode or pools of roles give these devices"


def build_run_placement(config: RunConfig, roles: Collection[str]) -> Placement:
    """Build the placement that a run's config describes: devices and rank grid of each model call.

    roles: roles with a model; calls of other roles are left out. Devices count from 0;
    placement.mode=auto is read as disaggregated.
    """
    counts = {role: count for role, (_, count) in count_actors(config).items()}
    tp_size = config.generator.tensor_parallel
    if not config.placement.is_hybrid:
        counts[GENERATE_CALL.role] *= tp_size
    slots = lay_out_slots(config.placement.shared_pools, counts).slots
    calls = {}
    for call in config.dataflow.ordered_calls:
        if call.model_role not in roles:
            continue
        devices = slots[call.role]
        mesh = Mesh(devices[0], len(devices))
        is_trained = call.role in config.dataflow.trained_roles
        split, stage, copies = 1, 1, 1
        if is_trained or count_ranks_per_replica(config, call.role) > 1:
            ranks = config.get_ranks_config(call)
            split = ranks.tensor_parallel
            if is_trained or ranks.world_size > split:
                stage, copies = ranks.zero_stage, mesh.size // ranks.world_size
        elif call.kind is CallKind.GENERATE:
            split = tp_size
        grid = RankGrid(1, split, mesh.size // split)
        calls[call.stage] = CallAssignment(mesh, grid, stage, copies=copies)
    return renumber_devices(Placement(calls, config.pipeline.max_staleness))


def renumber_devices(placement: Placement) -> Placement:
    """Renumber the devices of a placement from 0 without gaps, skipping unused devices."""
    used = sorted({d for a in placement.assignments.values() for d in a.mesh.devices})
    number = {device: i for i, device in enumerate(used)}
    return placement.move_meshes(number.__getitem__)


def apply_placement(
    config: RunConfig, placement: Placement, *, kv_cache_bytes: float | None = None
) -> RunConfig:
    """Return the config with its settings changed so that the run uses this placement.

    Inverse of `build_run_placement`, except for the numbers of the devices. kv_cache_bytes: KV
    cache per generator device, unless the config sets a size; by default vLLM decides. The
    parallelism of the placement must be one that `make_split_rules` allows. Raises ConfigError if
    no pools of roles give its devices.
    """
    config = _choose_hosts(config, placement)
    stages = {
        call.stage: call
        for call in config.dataflow.ordered_calls
        if call.stage in placement.assignments
    }
    pools = find_pools(config.dataflow, placement)
    if pools is None:
        raise ConfigError(f"placement: {placement}: {NO_MATCHING_POOLS}")
    if why := find_size_mismatch(config.dataflow, placement):
        raise ConfigError(f"placement: {placement}: {why}")
    roles = {call.role: placement.assignments[stage] for stage, call in stages.items()}
    # Check the new sizes without the run's current placement, which may contradict them.
    disaggregated = replace(config.placement, mode="disaggregated", pools=[], memory_mb=None)
    sized = _apply_sizes(replace(config, placement=disaggregated), roles, placement.max_staleness)
    if kv_cache_bytes is not None and config.generator.kv_cache_mb is None:
        kv_cache_mb = max(1, int(kv_cache_bytes) >> 20)
        sized = replace(sized, generator=replace(sized.generator, kv_cache_mb=kv_cache_mb))
    placed = replace(config.placement, mode=pools.mode, pools=pools.pools, memory_mb=None)
    return replace(sized, placement=placed)


def _choose_hosts(config: RunConfig, placement: Placement) -> RunConfig:
    """Return the config with shadow critics where the placement has them, else without."""
    changes: dict[str, Any] = {"replicas": 1}
    if not _has_shadow_critics(placement):
        changes = {"replicas": 0, "shadow": ShadowConfig()}
    return replace(config, critic=replace(config.critic, **changes))


def _has_shadow_critics(placement: Placement) -> bool:
    """Return whether values have devices apart from their critic."""
    calls = placement.assignments
    return any(
        value.stage in calls and train in calls and calls[value.stage].mesh != calls[train].mesh
        for value, train in HOSTED_VALUES
    )


def configure_for_cluster(config: RunConfig, cluster: Cluster, *, longest_tokens: int) -> RunConfig:
    """Return the config with the Ray settings that a start on a cluster needs.

    A config that names a Ray address stays unchanged. On several nodes the run joins the running
    Ray cluster. On a single node the run starts Ray itself, with as many CPU slots as its actors
    need and an object store in which any shard fits a step.

    longest_tokens: tokens of the longest rollout.
    """
    placement = config.placement
    if placement.address:
        return config
    if cluster.num_nodes > 1:
        return replace(config, placement=replace(placement, address=RAY_AUTO_ADDRESS))
    group_bytes = config.bound_group_bytes(longest_tokens)
    step_bytes = config.pipeline.groups_per_step * group_bytes * config.queue.shards
    needed_mb = math.ceil(OBJECT_STORE_SLACK * step_bytes / config.queue.store_share / (1 << 20))
    return replace(
        config,
        placement=replace(
            placement, cpus=None, object_store_mb=max(placement.object_store_mb, needed_mb)
        ),
    )


def has_shared_generator_devices(placement: Placement) -> bool:
    """Return whether other stages compute on devices of the generators."""
    others = placement.assignments.keys() - {GENERATE_CALL.stage, GREEDY_CALL.stage}
    return any(placement.overlaps(GENERATE_CALL.stage, other) for other in others)


# Placements that `streamrl train` can run.


def check_run_splits(config: RunConfig, problem: PlacementProblem) -> None:
    """Raise ConfigError if the ranks of a run's config cannot share one of the models."""
    for role, (call, *_) in config.dataflow.calls_by_role.items():
        shape = problem.models.get(role) or problem.models.get(call.followed_role)
        is_trained = role in config.dataflow.trained_roles
        if shape is None or not (is_trained or count_ranks_per_replica(config, role) > 1):
            continue
        sizes = get_split_sizes(shape, is_trained=call.kind is not CallKind.GENERATE)
        if call.kind is CallKind.GENERATE:
            ranks = config.generator.tensor_parallel
            if reason := explain_unservable_split(sizes, ranks):
                raise ConfigError(f"generator.tensor_parallel={ranks}: {reason}")
            continue
        family = find_family_config(shape.family) if shape.architectures else None
        check_rank_split(family, sizes, config.get_ranks_config(call))


def make_split_rules(config: RunConfig, problem: PlacementProblem) -> SplitRules:
    """Return a function that lists the ZeRO stages a run can use for a model call on a rank grid.

    The function restricts `list_zero_stages` by the run's settings and models.
    """
    # Only the sole model of a list of rewards can be split: a process is in one group of ranks.
    whole_roles = {role for role in REWARD_ROLES if len(config.list_model_rewards(role)) != 1}
    get_ranks_config = cache(config.get_ranks_config)

    def rules(call: ModelCall, grid: RankGrid) -> Sequence[int]:
        if call.role in whole_roles:
            return (1,) if grid.tp_size == grid.pp_size == 1 else ()
        shape = problem.models.get(call.role) or problem.models[call.followed_role]
        stages = list_zero_stages(call, grid)
        if call.kind is CallKind.GENERATE:
            sizes = get_split_sizes(shape, is_trained=False)
            return () if explain_unservable_split(sizes, grid.tp_size) else stages
        ranks, sizes = get_ranks_config(call), get_split_sizes(shape, is_trained=True)
        if call.kind is CallKind.TRAIN and ranks.backend == "torch" and len(stages) > 1:
            stages = (0, PARAMETER_SHARDING_STAGE)
        # Shapes by name are of families whose plans are known; transformers imports slowly.
        family = find_family_config(shape.family) if shape.architectures else None
        allowed = []
        for stage in stages:
            with suppress(ConfigError):
                sized = _size_ranks(ranks, call, grid, stage)
                check_rank_split(family, sizes, sized)
                allowed.append(stage)
        return tuple(allowed)

    return rules


def _size_ranks(ranks: TrainerConfig, call: ModelCall, grid: RankGrid, stage: int) -> TrainerConfig:
    """Return the settings of a model's ranks on a grid; raise ConfigError if they do not allow it.

    The ranks of a model that only scores are those of a copy: of all its replicas if it is sharded.
    """
    if call.kind is CallKind.TRAIN:
        placed = CallAssignment(Mesh(0, grid.num_ranks), grid, stage)
        return replace(ranks, **make_trainer_sizes(ranks, placed))
    is_sharded = stage == PARAMETER_SHARDING_STAGE
    num_ranks = grid.num_ranks if is_sharded else grid.tp_size
    return replace(ranks, world_size=num_ranks, tensor_parallel=grid.tp_size)


def list_zero_stages(call: ModelCall, grid: RankGrid) -> Sequence[int]:
    """Return the ZeRO stages under which streamrl can run a model call on a rank grid.

    Empty if streamrl cannot run the call there: pipeline parallelism is unsupported. Models that
    only score are whole (1) or, as one copy, sharded over all replicas (3). The torch backend
    trains tensor-parallel layers, and shards over replicas fully (3) or not at all (0).
    """
    if grid.pp_size > 1:
        return ()
    if call.kind is CallKind.SCORE and grid.dp_size > 1:
        return (1, PARAMETER_SHARDING_STAGE)
    if call.kind is not CallKind.TRAIN or grid.num_ranks == 1:
        return (1,)
    if grid.tp_size > 1:
        return (0, 3) if grid.dp_size > 1 else (0,)
    return (1, 3)


def make_run_refusal(config: RunConfig, problem: PlacementProblem) -> Callable[[Placement], str]:
    """Return a function of a placement: why `streamrl train` refuses it, or "".

    It depends on the config and the cluster of the problem. A placement without generation or
    training of the policy is not refused.
    """
    pool_cache: dict[tuple[bool, tuple[tuple[str, Mesh], ...]], PlacementConfig | None] = {}

    @cache
    def build_dataflow(has_shadow: bool) -> Dataflow:
        critic = replace(config.critic, replicas=int(has_shadow))
        return replace(config, critic=critic).dataflow

    def refuse(placement: Placement) -> str:
        calls = placement.assignments
        if not {GENERATE_CALL.stage, "train"} <= calls.keys():
            return ""
        dataflow = build_dataflow(_has_shadow_critics(placement))
        if why := find_size_mismatch(dataflow, placement):
            return f"streamrl cannot run it: {why}"
        meshes = tuple((stage, assignment.mesh) for stage, assignment in calls.items())
        key = calls[GENERATE_CALL.stage].grid.tp_size > 1, meshes
        if key not in pool_cache:
            pool_cache[key] = find_pools(dataflow, placement)
        pools = pool_cache[key]
        if pools is None:
            return f"streamrl cannot run it: {NO_MATCHING_POOLS}"
        return _explain_refused_mode(config, problem, pools)

    return refuse


def _explain_refused_mode(
    config: RunConfig, problem: PlacementProblem, pools: PlacementConfig
) -> str:
    """Return why a run refuses a placement mode on the cluster of the problem, or ""."""
    if (nodes := problem.cluster.num_nodes) > 1 and config.weights.transport == SHARED_MEMORY:
        return f"weights.transport={SHARED_MEMORY}: needs one node; the cluster has {nodes}"
    if not pools.is_hybrid:
        return ""
    # Without a model directory (a size by name) assume an architecture that vLLM supports.
    why, architectures = "", problem.models[POLICY].architectures
    if architectures is not None:
        on_gpu = not problem.cluster.is_cpu
        why = explain_unshareable_process(architectures, mode=pools.mode, on_gpu=on_gpu)
    return why or find_conflict_at_any_size(config)


def find_size_mismatch(dataflow: Dataflow, placement: Placement) -> str:
    """Return a text on two roles that a placement sizes differently, or "".

    Checks only roles that take their number of actors and split from the same setting; models of
    rewards and costs have splits of their own, and the same number of copies.
    """
    calls = {call.role: placement.assignments.get(call.stage) for call in dataflow.calls}
    sized = dict.fromkeys(CRITIC_ROLES, "critic.trainer")
    sized |= {role: facts.replicas for role, facts in SERVING_ROLES.items()}
    for setting in dict.fromkeys(sized.values()):
        roles = (role for role in sized if sized[role] == setting)
        present = [(role, call) for role in roles if (call := calls.get(role)) is not None]
        for (first, a), (second, b) in pairwise(present):
            is_equal = a.mesh.size == b.mesh.size and replace(a, mesh=b.mesh) == b
            if first in REWARD_ROLES:
                is_equal = count_copies(a) == count_copies(b)
            if not is_equal:
                return f"one setting sizes both {first} and {second}, which differ: {a} and {b}"
    return ""


def count_copies(placed: CallAssignment) -> int:
    """Return the copies of a serving role's model, each on as many devices."""
    is_sharded = placed.zero_stage == PARAMETER_SHARDING_STAGE
    return placed.copies if is_sharded else placed.grid.dp_size


def find_pools(dataflow: Dataflow, placement: Placement) -> PlacementConfig | None:
    """Return the placement mode, with pools if mixed, that gives exactly a placement's devices.

    None if no mode does. A generator on shared devices either runs inside the trainer's ranks,
    split like these ranks, or unsplit in a process of its own.
    """
    calls = {call.role: placement.assignments.get(call.stage) for call in dataflow.ordered_calls}
    meshes = {role: assignment.mesh for role, assignment in calls.items() if assignment is not None}
    generator = calls[GENERATE_CALL.role]
    is_split = generator is not None and generator.grid.tp_size > 1
    counts = {role: mesh.size for role, mesh in meshes.items()}
    offsets = _compute_mesh_offsets(meshes)
    for option in _iter_pool_options(meshes):
        is_shared = any(GENERATE_CALL.role in pool for pool in option.shared_pools)
        # A hybrid run has one process per device for generator and policy, so their meshes agree.
        same_mesh = meshes.get(GENERATE_CALL.role) == meshes.get(POLICY)
        is_hybrid = has_colocated_actor(option.shared_pools)
        if not (same_mesh if is_hybrid else not (is_split and is_shared)):
            continue
        slots = lay_out_slots(option.shared_pools, counts).slots
        laid_out = {role: Mesh(devices[0], len(devices)) for role, devices in slots.items()}
        if _compute_mesh_offsets(laid_out) == offsets:
            return option
    return None


NAMED_MODES = [PlacementConfig(mode=mode) for mode in ("disaggregated", *POOL_STRATEGIES)]


def _iter_pool_options(meshes: Mapping[str, Mesh]) -> Iterator[PlacementConfig]:
    """Yield placement configs to try: the named modes, then mixed pools of overlapping roles."""
    yield from NAMED_MODES
    spans: list[tuple[Mesh, list[str]]] = []
    for role in sorted(meshes, key=lambda role: (meshes[role].first, -meshes[role].size, role)):
        mesh = meshes[role]
        if spans and mesh.overlaps(spans[-1][0]):
            span, roles = spans[-1]
            end = max(span.first + span.size, mesh.first + mesh.size)
            spans[-1] = Mesh(span.first, end - span.first), [*roles, role]
        else:
            spans.append((mesh, [role]))
    pools = [
        {role: meshes[role].size / span.size for role in roles}
        for span, roles in spans
        if len(roles) > 1
    ]
    # Shares below MIN_POOL_FRACTION cannot be configured (1 or 2 of thousands of devices).
    if pools and all(part >= MIN_POOL_FRACTION for pool in pools for part in pool.values()):
        yield PlacementConfig(mode=MIXED, pools=pools)


def _compute_mesh_offsets(meshes: Mapping[str, Mesh]) -> dict[tuple[str, str], int]:
    """Return the distance between the first devices of every two roles with common devices.

    Each role is also paired with itself.
    """
    return {
        (a, b): meshes[b].first - meshes[a].first
        for a in meshes
        for b in meshes
        if meshes[a].overlaps(meshes[b])
    }


def _split_models(rewards: Sequence[RewardConfig], sizes: Mapping[str, int]) -> list[RewardConfig]:
    """Return rewards, or costs, of which those with a model have ranks of these sizes."""
    split = []
    for reward in rewards:
        changed = {key: size for key, size in sizes.items() if size > 1 or key in reward.options}
        is_model = reward.kind == "model"
        split.append(replace(reward, options=reward.options | changed) if is_model else reward)
    return split


def _apply_sizes(
    config: RunConfig, roles: Mapping[str, CallAssignment], max_staleness: int
) -> RunConfig:
    """Return the config with the numbers of actors, and of devices per actor, of a placement.

    roles: assignment of devices by role.
    """
    generator, policy = roles[GENERATE_CALL.role], roles[POLICY]
    sections: dict[str, Any] = {
        "pipeline": replace(config.pipeline, max_staleness=max_staleness, depth=None),
        "trainer": replace(config.trainer, **make_trainer_sizes(config.trainer, policy)),
        "generator": replace(config.generator, tensor_parallel=generator.grid.tp_size),
    }
    if critics := [role for role in CRITIC_ROLES if role in roles]:
        sizes = make_trainer_sizes(config.get_trainer_config(critics[0]), roles[critics[0]])
        trainer = {**config.critic.trainer, **sizes}
        sections["critic"] = replace(config.critic, trainer=trainer)
    for role in filter(roles.__contains__, SERVING_ROLES):
        name, _, key = SERVING_ROLES[role].replicas.partition(".")
        section, placed = sections.get(name, attrgetter(name)(config)), roles[role]
        layout, replicas = SERVING_ROLES[role].ranks, count_copies(placed)
        changes: dict[str, Any] = {key: replicas}
        sizes = vars(RankLayout(placed.mesh.size // replicas, placed.grid.tp_size))
        if role in REWARD_ROLES:
            entries = SCORE_SPECS[role].section
            sections[entries] = _split_models(vars(config)[entries], sizes)
        elif layout:
            nested = layout.removeprefix(f"{name}.").rpartition(".")[0]
            changes |= {nested: replace(getattr(section, nested), **sizes)} if nested else sizes
        sections[name] = replace(section, **changes)
    if any(roles[role].is_offloaded for role in SERVING_ROLES if role in roles):
        sections["scorer"] = replace(sections.get("scorer", config.scorer), offload=True)
    # Replace all sections at once: new sizes may contradict old sizes of other sections.
    return replace(config, **sections)
