"""Memory of calls and devices, and the bytes left for the KV cache.

A call holds resident bytes, and active bytes only while it computes. A device holds the resident
bytes of all its calls, and the active bytes of one call, as calls take turns. The KV cache gets the
rest, or the size that the run sets. The KV cache stays during scoring, in streamrl's runs also
during training; other systems release it then.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from streamrl.dataflow import CallKind
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.memory.training_memory import (
    DTYPE_BYTES,
    TrainingSizes,
    estimate_rank_memory,
)
from streamrl.engines.memory.worker_memory import (
    CUDA_CONTEXT_BYTES,
    NCCL_GROUP_BYTES,
    WorkerMemory,
)
from streamrl.engines.models.model_shapes import ModelShape
from streamrl.engines.trainer_config import HEAD_CHUNK_TOKENS, LIVE_ELEMENTS, TrainerConfig
from streamrl.placement.clusters import GB, GIB, Cluster, DeviceSpec
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_cost import (
    SHARDS_PARAMETERS,
    CallCost,
    build_model_spec,
    is_expert_tensor,
)
from streamrl.planner.costs.call_timings import (
    SHARDS_GRADIENTS,
    SHARDS_OPTIMIZER,
    count_groups_in_batch,
    count_kv_token_bytes,
    count_rank_micro_batches,
    count_replica_tokens,
)
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.problem.problem import CallMemory

GATHERED_LAYERS = 2
"""With ZeRO stage 3, one layer computes while the next is gathered."""
KV_BLOCK_TOKENS = 128
"""Tokens of a KV cache block of vLLM on a CPU; blocks on a GPU are smaller."""


@dataclass(frozen=True)
class TrainStateBytes:
    """Bytes per device of a trained model.

    active: what the worse of micro-batches and updates needs besides the state.
    libraries: CUDA's context and NCCL's buffers of a run.
    """

    weights: float
    gradients: float
    optimizer: float
    active: float
    libraries: float = 0.0

    @classmethod
    def from_call_cost(cls, cost: CallCost) -> "TrainStateBytes":
        """Return the bytes of a call; of streamrl's trainers by the memory model of a run."""
        if cost.trainer is not None:
            held = estimate_trainer_memory(cost, cost.trainer)
            used = max(held.activations, held.update_buffers)
            return cls(held.weights, held.gradients, held.optimizer, used, held.libraries)
        constants, stage = cost.constants, cost.assignment.zero_stage
        trained_fraction = cost.shape.trained_fraction

        def share(num_bytes: float, from_stage: int) -> float:
            return num_bytes * (cost.sharded_params if stage >= from_stage else cost.device_params)

        # Adapters are held beside the frozen weights.
        copies = 1 + trained_fraction if cost.shape.adapter_params else 1
        active = _compute_activation_bytes(cost)
        if stage >= SHARDS_PARAMETERS and cost.dp_size > 1:
            gathered = GATHERED_LAYERS * cost.device_params * cost.pp_size / cost.shape.layers
            active += gathered * constants.weight_bytes
        return cls(
            share(constants.weight_bytes * copies, SHARDS_PARAMETERS),
            share(constants.gradient_bytes * trained_fraction, SHARDS_GRADIENTS),
            share(constants.optimizer_bytes * trained_fraction, SHARDS_OPTIMIZER),
            active,
        )

    @property
    def total_bytes(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.libraries

    def offloaded_bytes(self, constants: CostConstants) -> float:
        optimizer = self.optimizer if constants.offloads_optimizer else 0.0
        return optimizer + (self.weights if constants.offloads_weights else 0.0)

    def compute_resident_bytes(self, constants: CostConstants) -> float:
        gradients = self.gradients if constants.offloads_weights else 0.0
        return self.total_bytes - gradients - self.offloaded_bytes(constants)


def estimate_trainer_memory(
    cost: CallCost, trainer: TrainerConfig, generator: GeneratorConfig | None = None
) -> WorkerMemory:
    """Return the memory of a rank of streamrl's trainers by the memory model of a run.

    generator: settings of a generator in its process, if any.
    """
    sizes, tokens = build_training_sizes(cost, trainer), math.ceil(find_max_train_tokens(cost))
    return estimate_rank_memory(sizes, trainer, generator, tokens=tokens, on_gpu=cost.on_gpu)


@cache
def _count_split_params(shape: ModelShape) -> tuple[int, int]:
    """Return `split_params` and `strided_params` of `TrainingSizes`; ranks hold whole experts."""
    split = [item for item in build_model_spec(shape, 1).tensors if item.split_dim is not None]
    dense = [item for item in split if not is_expert_tensor(item, shape)]
    strided = [item for item in dense if 0 < (item.split_dim or 0) == len(item.shape) - 1]
    return sum(item.numel for item in split), sum(item.numel for item in strided)


def build_training_sizes(cost: CallCost, trainer: TrainerConfig) -> TrainingSizes:
    """Return the sizes of a model that streamrl's `trainer` splits over tensor-parallel ranks."""
    shape, ranks, adapters = cost.shape, cost.tp_size, cost.shape.adapter_params
    outside = shape.embedding_params // ranks
    # The gate and up matrices of all experts of a layer are one parameter.
    widest = max(shape.intermediate * max(1, 2 * shape.experts), shape.dense_intermediate)
    split, strided = _count_split_params(shape) if ranks > 1 else (0, 0)
    return TrainingSizes(
        params=shape.num_params + adapters,
        base_params=shape.num_params,
        trained=adapters or shape.num_params,
        split_params=split,
        strided_params=strided,
        vocabulary_params=shape.embedding_params,
        rank_params=cost.device_params + adapters,
        layer_params=(cost.device_params - outside) // shape.layers,
        root_params=outside + adapters,
        largest_param=shape.hidden * max(shape.vocab, widest) // ranks,
        layers=shape.layers,
        hidden=shape.hidden,
        mlp_width=shape.token_mlp_width // ranks,
        head_rows=1 if shape.has_scalar_head else shape.vocab // ranks,
        has_chunked_mlps=ranks == 1 and not shape.experts,
        has_experts=bool(shape.experts),
        itemsize=DTYPE_BYTES[trainer.resolve_dtype(on_gpu=cost.on_gpu)],
    )


def train_memory(cost: CallCost, *, offload_idle: bool = False) -> CallMemory:
    """Return a training call's memory per device: its state and the activations of micro-batches.

    offload_idle: other calls share the devices in turn, so part of the state may move to the host.
    """
    state = TrainStateBytes.from_call_cost(cost)
    resident = state.compute_resident_bytes(cost.constants) if offload_idle else state.total_bytes
    return CallMemory(resident, state.active + state.total_bytes - resident)


def _compute_activation_bytes(cost: CallCost) -> float:
    """Return activation bytes of a training call's first pipeline stage, which holds the most.

    They are those of all micro-batches in flight, and the logits of one.
    """
    constants, shape = cost.constants, cost.shape
    micro_batches, tokens = count_rank_micro_batches(cost), find_max_train_tokens(cost)
    layers = shape.layers / cost.pp_size * min(cost.pp_size, micro_batches)
    width = tokens * shape.hidden
    layer, logits = width * constants.activation_bytes / cost.tp_size, _logit_bytes(cost, tokens)
    if constants.recompute:
        return layers * width * constants.weight_bytes + layer + logits
    return layers * layer + logits


def find_max_train_tokens(cost: CallCost) -> float:
    tokens = count_replica_tokens(cost)
    if cost.pp_size > 1:
        return tokens / count_rank_micro_batches(cost)
    return min(tokens, cost.workload.micro_batch_tokens)


def _logit_bytes(cost: CallCost, tokens: float) -> float:
    entries = 1 if cost.shape.has_scalar_head else cost.shape.vocab / cost.tp_size
    return tokens * entries * cost.constants.logit_bytes


def score_active_bytes(cost: CallCost) -> float:
    """Return bytes to compute a scoring batch: the activations of a layer, and the logits."""
    tokens = find_max_score_tokens(cost)
    layer = tokens * cost.shape.hidden * cost.constants.activation_bytes / cost.tp_size
    # Runs compute logits in chunks.
    return layer + _logit_bytes(cost, min(tokens, HEAD_CHUNK_TOKENS) if cost.run_memory else tokens)


def find_max_score_tokens(cost: CallCost) -> float:
    tokens = cost.workload.group_size * cost.workload.rollout_tokens
    return min(cost.constants.score_tokens, count_groups_in_batch(cost) * tokens)


def compute_serving_weight_bytes(cost: CallCost) -> float:
    return cost.device_params * cost.constants.served_bytes


def compute_scorer_memory(cost: CallCost) -> CallMemory:
    """Return the bytes of the weights of a run's scoring model, whole, sharded or on the host.

    Sharded and resting weights pass through the device layer by layer.
    """
    whole = compute_serving_weight_bytes(cost)
    outside = cost.shape.embedding_params / cost.shape.num_params
    passing = whole * (outside + (1 - outside) * min(1.0, GATHERED_LAYERS / cost.shape.layers))
    if cost.is_sharded:
        kept = min(whole, LIVE_ELEMENTS * cost.constants.served_bytes)
        return CallMemory(
            0.0 if cost.scores_from_host else whole / cost.fsdp_size, max(passing, kept)
        )
    return CallMemory(passing if cost.scores_from_host else whole, 0.0)


def estimate_library_bytes(cost: CallCost, kind: CallKind, *, is_in_trainer: bool) -> float:
    """Return GPU memory besides tensors of a call that a run does not train.

    The actor of a split generator has a context of its own on each device of its processes.
    is_in_trainer: the call is computed by a trainer's process.
    """
    if not cost.on_gpu or cost.run_memory is None or is_in_trainer:
        return 0.0
    groups = (cost.tp_size > 1) + (kind is CallKind.SCORE and cost.is_sharded)
    contexts = 1 + (kind is CallKind.GENERATE and cost.tp_size > 1)
    return CUDA_CONTEXT_BYTES * contexts + NCCL_GROUP_BYTES * groups


HOST_PROCESS_BYTES = 2 * GIB
"""Main memory of a process with torch, CUDA and vLLM besides tensors; not measured here."""
HOST_OPTIMIZER_BYTES = 16
"""Main memory per trained parameter of DeepSpeed's offloaded optimizer: moments, master weights
and gradients in float32."""
SHARED_VERSIONS = 3
"""Versions of a model in a node's shared memory: two published ones, and one being written."""


@dataclass(frozen=True)
class HostBytes:
    """Main memory of a call: for each of its ranks, and for all ranks of a node together."""

    per_rank: float = 0.0
    per_node: float = 0.0

    def sum_on_node(self, mesh: Mesh, cluster: Cluster) -> float:
        return self.per_node + self.per_rank * mesh.count_devices_per_node(cluster)


def estimate_host_bytes(cost: CallCost, kind: CallKind, *, is_in_trainer: bool) -> HostBytes:
    """Return the main memory that a run's call takes on nodes with GPUs."""
    if not cost.on_gpu or cost.run_memory is None:
        return HostBytes()
    per_rank, per_node = 0.0 if is_in_trainer else float(HOST_PROCESS_BYTES), 0.0
    moves_by_memory = cost.cluster.num_nodes == 1
    whole = cost.shape.num_params * cost.constants.served_bytes
    if kind is CallKind.TRAIN:
        per_node = whole * cost.shape.trained_fraction * (SHARED_VERSIONS if moves_by_memory else 1)
        if cost.updates_on_host:
            per_rank += HOST_OPTIMIZER_BYTES * cost.sharded_params * cost.shape.trained_fraction
        if cost.keeps_inputs_on_host:
            tokens = find_max_train_tokens(cost)
            per_rank += tokens * cost.shape.layers * cost.hidden_bytes
    elif kind is CallKind.GENERATE and not is_in_trainer and not moves_by_memory:
        per_rank += compute_serving_weight_bytes(cost)
    elif cost.scores_from_host and cost.is_sharded:
        per_rank += compute_serving_weight_bytes(cost) / cost.fsdp_size
    elif cost.scores_from_host and kind is CallKind.SCORE:
        per_node = whole
    return HostBytes(per_rank, per_node)


def estimate_weight_load_s(cost: CallCost) -> float:
    is_offloaded = cost.constants.offloads_weights
    return compute_serving_weight_bytes(cost) * cost.host_byte_s if is_offloaded else 0.0


def estimate_state_offload_s(cost: CallCost) -> float:
    return (
        2 * TrainStateBytes.from_call_cost(cost).offloaded_bytes(cost.constants) * cost.host_byte_s
    )


def compute_rollout_kv_bytes(cost: CallCost, tokens: float) -> float:
    """Return KV cache bytes per device of a rollout with `tokens` tokens, in whole blocks."""
    tokens = math.ceil(tokens / KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    return tokens * count_kv_token_bytes(cost.shape, cost.tp_size, cost.pp_size, cost.constants)


def compute_usable_bytes(memory_bytes: float, constants: CostConstants) -> float:
    return memory_bytes * (1 - constants.memory_reserve_fraction)


@dataclass(frozen=True)
class CallFootprint:
    """Memory needs of a call on each of its devices; a generating call also has a KV cache.

    memory: resident and active bytes, without the KV cache.
    weights_key: identifies the resident weights; calls with equal keys on a device share them.
    min_kv_bytes: KV cache of the longest rollout, or the size that the run sets.
    step_kv_bytes: KV cache of all rollouts of a step.
    max_kv_bytes: KV cache of the maximum of concurrent rollouts.
    host: main memory of the nodes.
    """

    kind: CallKind
    memory: CallMemory
    weights_key: str
    min_kv_bytes: float = 0.0
    step_kv_bytes: float = 0.0
    max_kv_bytes: float = 0.0
    host: HostBytes = HostBytes()


@dataclass(frozen=True)
class DeviceRange:
    """Adjacent devices of the same type that hold the same calls."""

    mesh: Mesh
    device: DeviceSpec
    stages: tuple[str, ...]


def iter_device_ranges(placement: Placement, cluster: Cluster) -> Iterator[DeviceRange]:
    """Yield the ranges of devices with the same calls; devices without calls are left out."""
    edges = set(cluster.group_starts)
    for assignment in placement.assignments.values():
        edges |= {assignment.mesh.first, assignment.mesh.first + assignment.mesh.size}
    for first, end in pairwise(sorted(edges)):
        mesh = Mesh(first, end - first)
        stages = tuple(s for s, call in placement.assignments.items() if call.mesh.overlaps(mesh))
        if stages:
            yield DeviceRange(mesh, cluster.find_node_group(first).device, stages)


@dataclass(frozen=True)
class MemoryItem:
    """Item of a device's peak memory: the active bytes of a call, or a KV cache."""

    stage: str
    num_bytes: float
    is_kv: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of all calls of a placement, added up per device.

    keeps_kv: whether the KV cache stays while other calls train on its devices.
    """

    placement: Placement
    footprints: Mapping[str, CallFootprint]
    cluster: Cluster
    constants: CostConstants
    keeps_kv: bool

    def compute_kv_capacity_bytes(self, stage: str) -> float:
        """Return the bytes left for a generating stage's KV cache on its fullest device.

        The result is negative if memory is short.
        """
        return min(
            self._free_kv_bytes(device_range)
            for device_range in self._device_ranges
            if stage in device_range.stages
        )

    def compute_kv_cache_bytes(self, stage: str) -> float:
        """Return the KV cache bytes per device that a stage's engines can fill.

        Besides the free memory, the number of concurrent rollouts limits them.
        """
        footprint, steps = self.footprints[stage], self.placement.max_staleness + 1
        return max(
            0.0,
            min(
                self.compute_kv_capacity_bytes(stage),
                footprint.max_kv_bytes,
                steps * footprint.step_kv_bytes,
            ),
        )

    def compute_memory_by_stage(self) -> dict[str, CallMemory]:
        """Return, by stage, the memory of a call per device, including the used KV cache.

        Weights and KV cache that several calls share count for the first of these calls.
        """
        memory: dict[str, CallMemory] = {}
        seen: set[str] = set()
        for stage, footprint in self.footprints.items():
            is_first, own = footprint.weights_key not in seen, footprint.memory
            has_kv = is_first and footprint.kind is CallKind.GENERATE
            kv = self.compute_kv_cache_bytes(stage) if has_kv else 0.0
            resident = is_first * own.resident_bytes + self.keeps_kv * kv
            memory[stage] = CallMemory(resident, own.active_bytes + (not self.keeps_kv) * kv)
            seen.add(footprint.weights_key)
        return memory

    def explain_infeasible(self) -> str:
        shortages = [
            (self._compute_missing_bytes(device_range), device_range)
            for device_range in self._device_ranges
        ]
        if not shortages:
            return ""  # no call is placed yet
        missing, fullest = max(shortages, key=lambda entry: entry[0])
        return self._explain_shortage(fullest) if missing > 0 else self._explain_host_shortage()

    def _explain_host_shortage(self) -> str:
        """Return why the main memory of a node is short, with its sum; "" if it suffices."""
        cluster, calls = self.cluster, self.placement.assignments
        placed = [(stage, self.footprints[stage].host) for stage in calls]
        placed = [(stage, host) for stage, host in placed if host.per_rank or host.per_node]
        spans = {
            stage: (
                cluster.find_node(calls[stage].mesh.first),
                cluster.find_node(calls[stage].mesh.devices[-1]),
            )
            for stage, _ in placed
        }
        for node in sorted({first for first, _ in spans.values()}):
            parts = {
                stage: host.sum_on_node(calls[stage].mesh, cluster)
                for stage, host in placed
                if spans[stage][0] <= node <= spans[stage][1]
            }
            stage = next(stage for stage in parts if spans[stage][0] == node)
            group = cluster.find_node_group(calls[stage].mesh.first)
            has, needed = group.node_host_bytes, sum(parts.values())
            if needed > has:
                terms = ", ".join(f"{s} {_format_gb(size)}" for s, size in parts.items())
                larger = replace(group, host_bytes=math.ceil(needed / GB) * GB)
                groups = (larger if g == group else g for g in cluster.node_groups)
                return (
                    f"node {node}: this placement needs {_format_gb(needed)} GB of main memory; it"
                    f" has {_format_gb(has)}, {_format_gb(needed - has)} GB short: {terms};"
                    f" --cluster {Cluster(tuple(groups))} has enough for it"
                )
        return ""

    @property
    def _device_ranges(self) -> list[DeviceRange]:
        return list(iter_device_ranges(self.placement, self.cluster))

    def _compute_resident_bytes(self, device_range: DeviceRange) -> float:
        bytes_by_key = {
            self.footprints[s].weights_key: self.footprints[s].memory.resident_bytes
            for s in device_range.stages
        }
        return sum(bytes_by_key.values())

    def _free_kv_bytes(self, device_range: DeviceRange) -> float:
        usable = compute_usable_bytes(device_range.device.memory_bytes, self.constants)
        active = self._find_max_active_bytes(device_range, self._kinds_beside_kv)
        active += self._find_max_active_bytes(device_range, (CallKind.GENERATE,))
        return usable - self._compute_resident_bytes(device_range) - active

    @property
    def _kinds_beside_kv(self) -> Sequence[CallKind]:
        """Kinds of calls that compute while a generator holds its KV cache."""
        kinds = (CallKind.SCORE, CallKind.TRAIN)
        return kinds if self.keeps_kv else kinds[:1]

    def _find_max_active_bytes(self, device_range: DeviceRange, kinds: Sequence[CallKind]) -> float:
        footprints = (self.footprints[stage] for stage in device_range.stages)
        return max(
            (footprint.memory.active_bytes for footprint in footprints if footprint.kind in kinds),
            default=0.0,
        )

    def _list_peak_items(self, device_range: DeviceRange) -> list[MemoryItem]:
        """Return the active bytes and the KV cache at the memory peak of a device in the range.

        Resident bytes are left out.
        """
        footprints = {stage: self.footprints[stage] for stage in device_range.stages}
        worst = max(footprints, key=lambda stage: footprints[stage].memory.active_bytes)
        peak = [MemoryItem(worst, footprints[worst].memory.active_bytes)]
        # Either the call with the largest active bytes computes, or a generator holds its KV cache
        # while a call that tolerates the KV cache computes.
        for stage, footprint in footprints.items():
            if footprint.kind is not CallKind.GENERATE:
                continue
            others = [
                other for other in footprints if footprints[other].kind in self._kinds_beside_kv
            ]
            items = [
                MemoryItem(stage, footprint.min_kv_bytes, is_kv=True),
                MemoryItem(stage, footprint.memory.active_bytes),
            ]
            if others:
                largest = max(others, key=lambda other: footprints[other].memory.active_bytes)
                items.append(MemoryItem(largest, footprints[largest].memory.active_bytes))
            peak = max(peak, items, key=_sum_bytes)
        return peak

    def _compute_missing_bytes(self, device_range: DeviceRange) -> float:
        needed = self._compute_resident_bytes(device_range) + _sum_bytes(
            self._list_peak_items(device_range)
        )
        return needed - compute_usable_bytes(device_range.device.memory_bytes, self.constants)

    def _explain_shortage(self, device_range: DeviceRange) -> str:
        device, missing = device_range.device, self._compute_missing_bytes(device_range)
        usable = compute_usable_bytes(device.memory_bytes, self.constants)
        stages_by_key: dict[str, list[str]] = {}
        for stage in device_range.stages:
            stages_by_key.setdefault(self.footprints[stage].weights_key, []).append(stage)
        resident = [
            f"{' and '.join(stages)} {_format_gb(self.footprints[stages[0]].memory.resident_bytes)}"
            for stages in stages_by_key.values()
        ]
        active = [
            f"{item.stage}{' for keys and values' * item.is_kv} {_format_gb(item.num_bytes)}"
            for item in self._list_peak_items(device_range)
            if item.num_bytes
        ]
        return (
            f"devices {device_range.mesh}: needs {_format_gb(usable + missing)} GB per"
            f" {device.name};"
            f" {_format_gb(usable)} of {_format_gb(device.memory_bytes)} GB usable,"
            f" {_format_gb(missing)} GB short: resident"
            f" {', '.join(resident)}; active {', '.join(active)}"
        )


def _sum_bytes(items: Sequence[MemoryItem]) -> float:
    return sum(item.num_bytes for item in items)


def _format_gb(num_bytes: float) -> str:
    """Return gigabytes with a decimal place, or with two significant digits below 1 GB."""
    size = num_bytes / GB
    return f"{size:.1f}" if size >= 1 or not size else f"{size:.2g}"
