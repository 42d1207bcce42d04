"""Weight transfer cost between a trained model and its follower, from the copy plan.

The copy plan comes from `streamrl.resharding`, as in a run; here its ranks are device numbers of
the cluster. Two reductions keep planning fast at any size without changing the bytes of any rank:

- tensors with equal shapes, and with equal ranks before and after, are merged into a single tensor;
- of several replicas with identical transfers, a single replica is planned.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment
from streamrl.planner.costs.call_cost import build_model_spec, find_max_stage_params
from streamrl.planner.costs.constants import HOST_FRACTION, CostConstants
from streamrl.resharding.grids import RankAssignment, RankGrid
from streamrl.resharding.grouping import (
    GenerationSizes,
    assign_max_overlap,
    assign_zero_redundancy,
)
from streamrl.resharding.layouts import ModelLayout, create_layout, partition_zero3
from streamrl.resharding.plans import CopyPlan, NodeTopology, RankBytes, plan_copies
from streamrl.resharding.tensor_specs import ModelSpec, split_stages_evenly

SHARDS_PARAMETERS = 3
"""ZeRO stage that shards the weights over replicas."""


@dataclass(frozen=True)
class ClusterNodes(NodeTopology):
    """Node of every device of a cluster; nodes may differ in size."""

    node_by_device: tuple[int, ...] = ()

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> "ClusterNodes":
        nodes = tuple(map(cluster.find_node, range(cluster.num_devices)))
        return cls(max(group.devices_per_node for group in cluster.node_groups), nodes)

    def get_node(self, rank: int) -> int:
        return self.node_by_device[rank]


@dataclass(frozen=True)
class TransferCost:
    """Cost of moving a version from a trained model to a follower.

    seconds: time to move the bytes, without fixed overheads.
    received_bytes: bytes that the rank with the most incoming bytes receives.
    extra_bytes: memory of the follower's weights on the fullest device, beyond the trained weights.
    """

    seconds: float
    received_bytes: int
    extra_bytes: int


class WeightTraffic:
    """Estimator of weight transfer costs within a cluster; caches results."""

    def __init__(self, cluster: Cluster, constants: CostConstants) -> None:
        self._cluster = cluster
        self._constants = constants
        self._nodes = ClusterNodes.from_cluster(cluster)
        self._link_byte_s: list[float] = []
        self._network_byte_s: list[float] = []
        for group in cluster.node_groups:
            link = group.device.link_bytes_per_s * constants.link_fraction
            self._link_byte_s += [1 / link] * group.num_devices
            network = 1 / (group.node_bytes_per_s * constants.network_fraction)
            self._network_byte_s += [network] * group.num_nodes
        self._transfer_costs: dict[Hashable, TransferCost] = {}

    def estimate_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        """Return the cost of moving a version from trainer `source` to follower `target`."""
        location = self._make_location_key(source.mesh, target.mesh)
        is_sharded = source.zero_stage >= SHARDS_PARAMETERS
        key = (
            shape,
            source.grid,
            source.ep_size,
            is_sharded,
            target.grid,
            target.ep_size,
            location,
        )
        if key not in self._transfer_costs:
            self._transfer_costs[key] = self._compute_transfer(shape, source, target)
        return self._transfer_costs[key]

    def plan_transfer(
        self,
        shape: ModelShape,
        source: CallAssignment,
        target: CallAssignment,
        *,
        full: bool = False,
    ) -> CopyPlan:
        """Return the copy plan of a version from the trainer `source` to the follower `target`.

        full: plan every layer and replica separately, although equal layers and replicas could
          share a plan.
        """
        return _TransferPlanner(
            shape, source, target, self._nodes, self._constants.served_bytes
        ).build_plan(full=full)

    def report_duration_s(self, report: Mapping[int, RankBytes]) -> float:
        """Return the transfer time, s: the longest of any device's links and of any node's network.

        Links and network run at full speed in both directions at once.
        """
        longest = 0.0
        for device, counts in report.items():
            link_bytes = max(counts.received_by_link["node"], counts.sent_by_link["node"])
            longest = max(longest, link_bytes * self._link_byte_s[device])
        for node, num_bytes in _count_network_bytes_by_node(report, self._nodes).items():
            longest = max(longest, num_bytes * self._network_byte_s[node])
        return longest

    def _compute_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        plan = self.plan_transfer(shape, source, target)
        report = plan.report_bytes()
        is_aliased = source.mesh == target.mesh and self._has_one_dtype
        itemsize = self._constants.served_bytes
        copy_bytes = (
            find_max_stage_params(shape, target.grid.pp_size, target.grid.tp_size) * itemsize
        )
        return TransferCost(
            self.report_duration_s(report),
            max(counts.received_bytes for counts in report.values()),
            _find_max_extra_bytes(plan, report) if is_aliased else copy_bytes,
        )

    @property
    def _has_one_dtype(self) -> bool:
        return self._constants.weight_bytes == self._constants.served_bytes

    def _make_location_key(self, source: Mesh, target: Mesh) -> Hashable:
        kinds = (
            tuple(source.find_node_groups(self._cluster)),
            tuple(target.find_node_groups(self._cluster)),
        )
        if not self._cluster.is_uniform:
            return source, target
        per_node = self._nodes.ranks_per_node
        if source == target:
            return kinds, source.size
        # Separate whole nodes are interchangeable, so only sizes matter.
        if not source.overlaps(target) and not (source.size % per_node or target.size % per_node):
            return kinds, source.size, target.size
        # Parts of nodes: the offsets from the first node decide which bytes use the network.
        first = min(source.first, target.first) // per_node * per_node
        return kinds, source.first - first, target.first - first, source.size, target.size


class ApproximateTraffic(WeightTraffic):
    """Weight transfer costs by formula, for a search that evaluates thousands of placements.

    The formulas assume even splits (arXiv:2409.19256, Table 2, extended to separate devices);
    `WeightTraffic` computes the exact bytes of the copy plan.
    """

    def _compute_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        itemsize = self._constants.served_bytes
        grid = target.grid
        wanted_bytes = (
            find_max_stage_params(shape, grid.pp_size, grid.tp_size, target.ep_size) * itemsize
        )
        if source.mesh == target.mesh:
            received, network = self._estimate_same_mesh_bytes(shape, source, target, wanted_bytes)
        else:
            received, network = (
                float(wanted_bytes),
                self._cross_mesh_bytes(source.mesh, target.mesh, wanted_bytes),
            )
        is_aliased = source.mesh == target.mesh and self._has_one_dtype
        return TransferCost(
            self._approximate_duration_s(source.mesh, target.mesh, received, network),
            round(received),
            round(received) if is_aliased else wanted_bytes,
        )

    def _estimate_same_mesh_bytes(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment, wanted_bytes: int
    ) -> tuple[float, float]:
        """Return received bytes of a rank and network bytes of a node, on a shared mesh."""
        train, follow = source.grid, target.grid
        is_sharded = source.zero_stage >= SHARDS_PARAMETERS
        model_ranks = train.pp_size * max(train.tp_size, source.ep_size)
        holders = model_ranks * (train.dp_size if is_sharded else 1)
        kept = _count_shared_params(shape, source, target) * self._constants.served_bytes
        kept /= max(train.pp_size, follow.pp_size) * (train.dp_size if is_sharded else 1)
        received = max(0.0, wanted_bytes - kept)
        per_node = source.mesh.count_devices_per_node(self._cluster)
        # Fraction of the model that the ranks of one node hold together.
        node_fraction = min(1.0, per_node / holders)
        return received, per_node * min(received, wanted_bytes * (1 - node_fraction))

    def _cross_mesh_bytes(self, source: Mesh, target: Mesh, wanted_bytes: int) -> float:
        """Return network bytes of the busiest node when weights move to another mesh."""
        nodes = [self._cluster.find_node(device) for device in (source.first, target.first)]
        counts = (source.count_nodes(self._cluster), target.count_nodes(self._cluster))
        if nodes[0] == nodes[1] and counts == (1, 1):
            return 0.0
        sent = target.size * wanted_bytes / counts[0]
        return max(target.count_devices_per_node(self._cluster) * wanted_bytes, sent)

    def _approximate_duration_s(
        self, source: Mesh, target: Mesh, received: float, network: float
    ) -> float:
        """Return the time for `received` bytes of a rank, `network` bytes of the busiest node."""
        devices = (source.first, target.first)
        link_s = max(self._link_byte_s[device] for device in devices)
        network_s = max(self._network_byte_s[self._cluster.find_node(device)] for device in devices)
        link_bytes = received if not network else 0.0
        if source != target and not network:
            link_bytes = max(link_bytes, received * target.size / source.size)
        return max(link_bytes * link_s, network * network_s)


class LoraTraffic(ApproximateTraffic):
    """Estimator of weight transfer costs for models with LoRA adapters.

    Every device of the follower reads the whole base model through its host, adds the adapters, and
    keeps its own copy of the merged weights.
    """

    def _compute_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        full_shape, trained_fraction = replace(shape, adapter_params=0), shape.trained_fraction
        transfer = super()._compute_transfer(full_shape, source, target)
        groups = target.mesh.find_node_groups(self._cluster)
        host = min(group.device.host_bytes_per_s for group in groups)
        itemsize, grid = self._constants.served_bytes, target.grid
        reading_s = shape.num_params * itemsize / (host * HOST_FRACTION)
        return TransferCost(
            transfer.seconds * trained_fraction + reading_s,
            round(transfer.received_bytes * trained_fraction),
            find_max_stage_params(full_shape, grid.pp_size, grid.tp_size, target.ep_size)
            * itemsize,
        )


def _count_shared_params(
    shape: ModelShape, source: CallAssignment, target: CallAssignment
) -> float:
    """Return the most parameters that a rank both trains and serves, before the pipeline split.

    With expert parallelism on one side only, ranks still share a part of the experts' slices.
    """
    split = max(source.grid.tp_size, target.grid.tp_size)
    ep_sizes = (source.ep_size, target.ep_size)
    if max(ep_sizes) == 1:
        return shape.num_params / split
    tp_sizes = [
        assignment.grid.tp_size for assignment in (source, target) if assignment.ep_size == 1
    ]
    routed = shape.routed_params / (max(ep_sizes) * max(tp_sizes, default=1))
    return (shape.num_params - shape.routed_params) / split + routed


@dataclass(frozen=True)
class _TransferPlanner:
    """Builder of the copy plan from a trainer's assignment to a follower's."""

    shape: ModelShape
    source: CallAssignment
    target: CallAssignment
    nodes: ClusterNodes
    itemsize: int

    @property
    def is_sharded(self) -> bool:
        return self.source.zero_stage >= SHARDS_PARAMETERS and self.source.grid.dp_size > 1

    @property
    def is_nested(self) -> bool:
        """Whether, on a shared mesh, each trained replica splits into whole follower replicas."""
        train, follow = self.source.grid, self.target.grid
        return (
            self.source.mesh == self.target.mesh
            and not train.pp_size % follow.pp_size
            and not train.tp_size % follow.tp_size
            and not follow.dp_size % train.dp_size
        )

    def build_plan(self, *, full: bool) -> CopyPlan:
        parts = 1 if full or self.is_sharded else self._count_equal_parts()
        train = replace(self.source.grid, dp_size=self.source.grid.dp_size // parts)
        follow = replace(self.target.grid, dp_size=self.target.grid.dp_size // parts)
        spec = build_model_spec(self.shape, self.itemsize)
        if not full:
            pieces = 1 if self.is_sharded else _count_pieces(train, follow)
            spec = _merge_tensors(spec, (train, follow), pieces, in_runs=self.is_sharded)
        target_layout = create_layout(spec, self._assign_target_ranks(spec, train, follow))
        return plan_copies(
            self._make_source_layout(spec, train, self.source.mesh.first), target_layout, self.nodes
        )

    def _make_source_layout(
        self, spec: ModelSpec, train_grid: RankGrid, first_rank: int
    ) -> ModelLayout:
        ranks = replace(train_grid.assign_ranks(), first_rank=first_rank)
        layout = create_layout(spec, ranks)
        return partition_zero3(layout, ranks.list_dp_groups()) if self.is_sharded else layout

    def _assign_target_ranks(
        self, spec: ModelSpec, train: RankGrid, follow: RankGrid
    ) -> RankAssignment:
        """Assign the follower's ranks to devices.

        On the trainer's devices, each gets a rank that needs many of the weights already there.
        """
        first = self.target.mesh.first
        if self.source.mesh != self.target.mesh:
            return replace(follow.assign_ranks(), first_rank=first)
        replicas = train.dp_size if self.is_nested else 1
        micro = follow.dp_size // replicas
        sizes = GenerationSizes(follow.pp_size, follow.tp_size, micro, replicas)
        served = (
            assign_zero_redundancy(train, sizes)
            if self.is_nested
            else assign_max_overlap(self._make_source_layout(spec, train, 0), sizes)
        )
        return replace(served, first_rank=first)

    def _count_equal_parts(self) -> int:
        """Return the number of device sets with equal, independent transfers; one set is planned.

        On shared devices a set is the smallest block with whole replicas of trainer and follower;
        on separate devices, some whole nodes of the trainer and the nodes that they serve.
        """
        train, follow = self.source.grid, self.target.grid
        if train.order != "hf" or follow.order != "hf" or len(set(self.nodes.node_by_device)) == 1:
            return 1
        per_node = self.nodes.ranks_per_node
        if self.source.mesh == self.target.mesh:
            # All blocks of whole replicas of both hold and want the same shards.
            size = lcm(train.ranks_per_replica, follow.ranks_per_replica)
            fills_nodes = size % per_node == 0 or per_node % size == 0
            return train.num_ranks // size if fills_nodes and train.num_ranks % size == 0 else 1
        if self.source.mesh.overlaps(self.target.mesh):
            return 1
        max_parts = gcd(train.dp_size, follow.dp_size)
        for parts in range(max_parts, 0, -1):
            sizes = (self.source.mesh.size // parts, self.target.mesh.size // parts)
            if max_parts % parts == 0 and not any(size % per_node for size in sizes):
                return parts
        return 1


def _count_pieces(train: RankGrid, follow: RankGrid) -> int:
    """Return how many merged tensors replace equal tensors.

    With a single merged tensor, a single trained replica would send everything; with several, all
    replicas that hold the tensors share the sends.
    """
    return train.dp_size // gcd(train.dp_size, follow.dp_size)


def _merge_tensors(
    spec: ModelSpec, grids: tuple[RankGrid, RankGrid], pieces: int, *, in_runs: bool
) -> ModelSpec:
    """Merge tensors of equal shape, split and pipeline stages; bytes per rank stay the same.

    grids: of trainer and follower, for the pipeline stages.
    pieces: number of merged tensors that replace equal tensors, at most.
    in_runs: for ZeRO-3 shards, which are flat runs of elements. A trailing dimension interleaves
      the merged tensors, so a run of the merged tensor is the same run of each of them.
    """
    stages = [_list_place_stages(spec.num_pipeline_positions, grid.pp_size) for grid in grids]
    indices_by_cut: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(spec.tensors):
        at = tuple(
            tuple(sorted({of[position] for position in tensor.pipeline_positions})) for of in stages
        )
        cut = (tensor.shape, tensor.split_dim, tensor.components, tensor.itemsize)
        indices_by_cut.setdefault((at, cut), []).append(index)
    merged = []
    for indices in indices_by_cut.values():
        parts = min(pieces, len(indices))
        for part in range(parts):
            members = indices[part::parts]
            first = spec.tensors[members[0]]
            if in_runs:
                merged.append(replace(first, shape=(*first.shape, len(members))))
                continue
            dim = None if first.split_dim is None else first.split_dim + 1
            merged.append(replace(first, shape=(len(members), *first.shape), split_dim=dim))
    return ModelSpec(tuple(merged), spec.num_pipeline_positions)


def _list_place_stages(num_places: int, stages: int) -> list[int]:
    counts = split_stages_evenly(num_places, stages)
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _find_max_extra_bytes(plan: CopyPlan, report: Mapping[int, RankBytes]) -> int:
    source_bytes: dict[int, int] = {}
    for rank, shards in plan.source.shards.items():
        if id(shards) not in source_bytes:
            source_bytes[id(shards)] = plan.source.count_bytes(rank)
    return max(
        counts.memory_bytes - source_bytes[id(plan.source.shards[rank])]
        for rank, counts in report.items()
    )


def _count_network_bytes_by_node(
    report: Mapping[int, RankBytes], nodes: NodeTopology
) -> Counter[int]:
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for device, counts in report.items():
        received[nodes.get_node(device)] += counts.received_by_link["network"]
        sent[nodes.get_node(device)] += counts.sent_by_link["network"]
    return received | sent
