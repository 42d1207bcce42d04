"""Cost of moving a version's weights from a trained model to its follower, by formula.

The formulas are those of Table 2 of arXiv:2409.19256, extended to separate devices, to ZeRO-3 and
to expert parallelism. They equal the bytes of a run's copy plan (`streamrl.resharding`) where a
model splits evenly, meshes are equal or separate, and ZeRO is below 3 or tensors have one size;
else they are estimates (0.8 to 3.4 times the bytes on shared devices).
"""

from dataclasses import dataclass, replace

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.placement.clusters import GB, Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment
from streamrl.planner.costs.call_cost import SHARDS_PARAMETERS, find_max_stage_params
from streamrl.planner.costs.constants import HOST_FRACTION, CostConstants
from streamrl.planner.problem.stage_timings import WeightsTiming
from streamrl.weights.config import COLLECTIVE, OBJECT_STORE


@dataclass(frozen=True)
class TransferCost:
    """Cost of moving a version from a trained model to a follower.

    seconds: time to move the bytes, without fixed overheads.
    extra_bytes: memory of the follower's weights on the fullest device, beyond the trained weights.
    """

    seconds: float
    extra_bytes: int


FILE_WRITE_BYTES_PER_S, FILE_READ_BYTES_PER_S = 2.4 * GB, 5.8 * GB
"""Measured on a server core: writing a version to shared memory, and reading and verifying it."""
STORE_BYTES_PER_S = 1.2 * GB
"""Ray's object store between nodes: a TCP stream of 10 Gb/s; not measured here."""


@dataclass(frozen=True)
class WeightTraffic:
    """Estimator of weight transfer costs within a cluster."""

    cluster: Cluster
    constants: CostConstants

    def estimate_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        """Return the cost of moving a version from trainer `source` to follower `target`."""
        if shape.adapter_params:
            return self._estimate_adapter_transfer(shape, source, target)
        constants, grid = self.constants, target.grid
        wanted_bytes = (
            find_max_stage_params(shape, grid.pp_size, grid.tp_size, target.ep_size)
            * constants.served_bytes
        )
        if source.mesh == target.mesh:
            received, network = self._estimate_same_mesh_bytes(shape, source, target, wanted_bytes)
        else:
            network = self._estimate_cross_mesh_bytes(source.mesh, target.mesh, wanted_bytes)
            received = float(wanted_bytes)
        has_one_dtype = constants.weight_bytes == constants.served_bytes
        is_aliased = source.mesh == target.mesh and has_one_dtype
        return TransferCost(
            self._estimate_duration_s(source.mesh, target.mesh, received, network),
            round(received) if is_aliased else wanted_bytes,
        )

    def estimate_run_pull(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment, transport: str
    ) -> WeightsTiming:
        """Return the timing of a version of whole weights between GPUs that a run does not share.

        Rank 0 of the trainer publishes; each rank of the follower receives what it serves, the
        slices of a split generator, into host memory. The follower pauses while it loads them.
        """
        constants, grid = self.constants, target.grid
        whole = shape.num_params * constants.served_bytes
        wanted = find_max_stage_params(shape, grid.pp_size, grid.tp_size) * constants.served_bytes
        kinds = [*source.mesh.find_node_groups(self.cluster)]
        kinds += target.mesh.find_node_groups(self.cluster)
        host = min(kind.device.host_bytes_per_s for kind in kinds) * HOST_FRACTION
        load_s = wanted / host
        if transport == COLLECTIVE:
            # A broadcast enters each node once; ranks that take slices receive one by one, and the
            # publisher packs these after the whole.
            is_split = grid.tp_size > 1
            copies = target.mesh.count_devices_per_node(self.cluster) if is_split else 1
            network = min(kind.node_bytes_per_s for kind in kinds) * constants.network_fraction
            pull_s = copies * wanted / network + 2 * load_s
            return WeightsTiming(whole / host * (1 + is_split), pull_s + load_s, load_s)
        read_s = wanted / FILE_READ_BYTES_PER_S
        read_s += whole / STORE_BYTES_PER_S * (transport == OBJECT_STORE)
        return WeightsTiming(whole / FILE_WRITE_BYTES_PER_S, read_s + load_s, load_s)

    def _estimate_adapter_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        """Return the cost of moving LoRA adapters.

        Every device of the follower reads the whole base model through its host, adds the adapters,
        and keeps its own copy of the merged weights.
        """
        constants, grid = self.constants, target.grid
        whole = replace(shape, adapter_params=0)
        moving_s = self.estimate_transfer(whole, source, target).seconds * shape.trained_fraction
        groups = target.mesh.find_node_groups(self.cluster)
        host = min(group.device.host_bytes_per_s for group in groups)
        reading_s = shape.num_params * constants.served_bytes / (host * HOST_FRACTION)
        params = find_max_stage_params(whole, grid.pp_size, grid.tp_size, target.ep_size)
        return TransferCost(moving_s + reading_s, params * constants.served_bytes)

    def _estimate_same_mesh_bytes(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment, wanted_bytes: int
    ) -> tuple[float, float]:
        """Return received bytes of a rank and network bytes of a node, on a shared mesh."""
        train, follow = source.grid, target.grid
        is_sharded = source.zero_stage >= SHARDS_PARAMETERS
        model_ranks = train.pp_size * max(train.tp_size, source.ep_size)
        holders = model_ranks * (train.dp_size if is_sharded else 1)
        kept = _count_shared_params(shape, source, target) * self.constants.served_bytes
        kept /= max(train.pp_size, follow.pp_size) * (train.dp_size if is_sharded else 1)
        received = max(0.0, wanted_bytes - kept)
        per_node = source.mesh.count_devices_per_node(self.cluster)
        # Fraction of the model that the ranks of one node hold together.
        node_fraction = min(1.0, per_node / holders)
        return received, per_node * min(received, wanted_bytes * (1 - node_fraction))

    def _estimate_cross_mesh_bytes(self, source: Mesh, target: Mesh, wanted_bytes: int) -> float:
        """Return network bytes of the busiest node when weights move to another mesh."""
        nodes = [self.cluster.find_node(device) for device in (source.first, target.first)]
        counts = (source.count_nodes(self.cluster), target.count_nodes(self.cluster))
        if nodes[0] == nodes[1] and counts == (1, 1):
            return 0.0
        sent = target.size * wanted_bytes / counts[0]
        return max(target.count_devices_per_node(self.cluster) * wanted_bytes, sent)

    def _estimate_duration_s(
        self, source: Mesh, target: Mesh, received: float, network: float
    ) -> float:
        """Return the time for `received` bytes of a rank, `network` bytes of the busiest node."""
        kinds = [kind for mesh in (source, target) for kind in mesh.find_node_groups(self.cluster)]
        if network:
            slowest = min(kind.node_bytes_per_s for kind in kinds)
            return network / (slowest * self.constants.network_fraction)
        if source != target:
            received *= max(1.0, target.size / source.size)
        slowest = min(kind.device.link_bytes_per_s for kind in kinds)
        return received / (slowest * self.constants.link_fraction)


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
