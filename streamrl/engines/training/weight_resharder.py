"""Reshard weights from trainer ranks into the generators of the same processes (HybridFlow).

Used in colocated runs where the layouts of training and generation differ, or several ranks share a
generator. Shards that a rank trains and serves stay in place; missing shards are received once, in
buckets, without staging a full model. The transfer is planned once, from the shards that each rank
trains and serves, and executed for every version. After planning, ranks move their trained shards
into the generator's memory where the layout allows, which saves those copies. If the dtypes differ,
each rank casts its shards first.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.engines.training.training_backend import TrainingBackend
from streamrl.resharding.byte_report import NodeTopology
from streamrl.resharding.executors import (
    ReshardingExecutor,
    ReshardingStats,
    create_least_bytes_executor,
)
from streamrl.resharding.layouts import ModelLayout, TensorShard
from streamrl.resharding.storage import ShardStorage, create_from_buffers
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec

BUCKET_BYTES = 16 * 2**20
"""Bytes that a transfer has in flight at a time; gloo buffers as much again."""


@dataclass(frozen=True)
class _RankShards:
    """Facts about a rank that all ranks exchange for planning the transfer.

    `train_shards` and `serve_shards` are the rank's parts of parameters in training and generation;
    `dtypes` are those of generation.
    """

    train_shards: Mapping[str, TensorShard]
    serve_shards: Mapping[str, TensorShard]
    dtypes: Mapping[str, torch.dtype]
    node: str


class WeightResharder:
    """Writes versions from the trainer ranks into this rank's generator, by one plan for all."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_planned = False
        self._executor: ReshardingExecutor | None = None
        self._dtypes: Mapping[str, torch.dtype] = {}

    def run(
        self, backend: TrainingBackend, served: ShardStorage | None, version: int
    ) -> ReshardingStats | None:
        """Fill the generator's parameters with `version` while it is paused. Collective.

        `served` is the storage of this rank's generator, the same at every call, or None if
        resharding cannot write into the generator. The first call plans. Returns None at every call
        if any rank passes None, or if trained and served parameters differ. Raises WeightsError if
        the ranks pass different versions or a rank times out.
        """
        if not self._is_planned:
            self._plan_transfer(backend, served)
            self._is_planned = True
            if self._executor is not None and served is not None:
                backend.alias_into(served)
        if self._executor is None or served is None:
            return None
        buffers, shards = {}, {}
        for name, tensor, shard in backend.iter_forward_shards():
            buffers[name], shards[name] = tensor.to(self._dtypes[name]), shard
        return self._executor.run(create_from_buffers(buffers, shards, version=version), served)

    def _plan_transfer(self, backend: TrainingBackend, served: ShardStorage | None) -> None:
        """Make the executor of the transfer, if resharding is possible. Collective."""
        local_shards = {name: (tensor, shard) for name, tensor, shard in backend.iter_shards()}
        descriptions: list[_RankShards | None] = [None] * dist.get_world_size()
        dist.all_gather_object(descriptions, _describe_rank(local_shards, served))
        ranks = [rank_shards for rank_shards in descriptions if rank_shards is not None]
        if len(ranks) < len(descriptions):
            return
        model = _merge_served_specs(ranks)
        trained_names = {name for rank_shards in ranks for name in rank_shards.train_shards}
        if {spec.name for spec in model.tensors} != trained_names:
            return
        for rank_shards in ranks:
            self._dtypes = {**self._dtypes, **rank_shards.dtypes}
        self._executor = create_least_bytes_executor(
            ModelLayout(model, {i: r.train_shards for i, r in enumerate(ranks)}),
            ModelLayout(model, {i: r.serve_shards for i, r in enumerate(ranks)}),
            cluster=make_nodes([rank_shards.node for rank_shards in ranks]),
            bucket_bytes=BUCKET_BYTES,
            timeout_s=self._timeout_s,
        )


def _describe_rank(
    local_shards: Mapping[str, tuple[Tensor, TensorShard]], served: ShardStorage | None
) -> _RankShards | None:
    """Return this rank's shards for planning; None if it trains and serves on different devices."""
    if served is None or any(tensor.device != served.device for tensor, _ in local_shards.values()):
        return None
    return _RankShards(
        train_shards={name: shard for name, (_, shard) in local_shards.items()},
        serve_shards={
            name: TensorShard(name, box.shape, ((box, (0,) * len(box.shape)),))
            for name, box, _ in served
        },
        dtypes={name: view.dtype for name, _, view in served},
        node=socket.gethostname(),
    )


def make_nodes(nodes: Sequence[str]) -> NodeTopology:
    """Return the topology of the ranks; `nodes` names the node of each rank.

    If nodes have unequal numbers of ranks, all ranks count as a single node, so that planning
    minimizes the number of bytes only.
    """
    sizes = [len(list(ranks)) for _, ranks in groupby(nodes)]
    return NodeTopology(sizes[0] if len(set(sizes)) == 1 else len(nodes))


def _merge_served_specs(ranks: Sequence[_RankShards]) -> ModelSpec:
    """Return names, shapes and item sizes of the full model, inferred from all served shards."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for rank_shards in ranks:
        for name, shard in rank_shards.serve_shards.items():
            (box,) = shard.boxes
            shapes[name] = tuple(map(max, shapes.get(name, box.stop), box.stop))
            sizes[name] = rank_shards.dtypes[name].itemsize
    specs = (TensorSpec(name, shape, (0,), itemsize=sizes[name]) for name, shape in shapes.items())
    return ModelSpec(tuple(specs), 1)
