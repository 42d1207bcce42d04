"""Reshard weights from trainer ranks into the generators of the same processes (HybridFlow).

Used in colocated runs where the layouts of training and generation differ, or several ranks share a
generator. Shards that a rank trains and serves stay in place; missing shards are received once, in
buckets, without staging a full model. The transfer is planned once, from the shards that each rank
trains and serves, and executed for every version. After planning, ranks move their trained shards
into the generator's memory where the layout allows, which saves those copies. If the dtypes differ,
each rank casts its shards first.
"""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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

NamedShards = Iterable[tuple[str, Tensor, TensorShard]]
"""A rank's trained shards: name, local tensor, position in the full tensor."""


class ShardSource(Protocol):
    """The part of `TrainingBackend` that resharding uses: a rank's trained shards."""

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]: ...

    def alias_into(self, served: ShardStorage) -> None: ...


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
    """Writes each version from the trainer ranks into this rank's generator, by a fixed plan."""

    def __init__(
        self, executor: ReshardingExecutor, storage: ShardStorage, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._executor = executor
        self._storage = storage
        self._dtypes = dtypes

    def run(self, train_shards: NamedShards, version: int) -> ReshardingStats:
        """Fill the generator's parameters with `version` while it is paused. Collective.

        Raises WeightsError if the ranks pass different versions or a rank times out.
        """
        buffers, shards = {}, {}
        for name, tensor, shard in train_shards:
            buffers[name], shards[name] = tensor.to(self._dtypes[name]), shard
        return self._executor.run(
            create_from_buffers(buffers, shards, version=version), self._storage
        )


def plan_resharding(
    train_shards: NamedShards, served: ShardStorage | None, *, timeout_s: float
) -> WeightResharder | None:
    """Plan the transfer of parameters from all ranks' trained shards to their generators' storages.

    Collective. `served` is the storage of this rank's generator, or None if resharding cannot write
    into the generator. Returns None if any rank passes None, or if trained and served parameters
    differ.
    """
    local_shards = {name: (tensor, shard) for name, tensor, shard in train_shards}
    descriptions: list[_RankShards | None] = [None] * dist.get_world_size()
    dist.all_gather_object(descriptions, _describe_rank(local_shards, served))
    ranks = [rank_shards for rank_shards in descriptions if rank_shards is not None]
    if served is None or len(ranks) < len(descriptions):
        return None
    model = _merge_served_specs(ranks)
    if {spec.name for spec in model.tensors} != {
        name for rank_shards in ranks for name in rank_shards.train_shards
    }:
        return None
    executor = create_least_bytes_executor(
        ModelLayout(
            model, {rank: rank_shards.train_shards for rank, rank_shards in enumerate(ranks)}
        ),
        ModelLayout(
            model, {rank: rank_shards.serve_shards for rank, rank_shards in enumerate(ranks)}
        ),
        cluster=make_nodes([rank_shards.node for rank_shards in ranks]),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
    )
    return WeightResharder(
        executor,
        served,
        {n: dtype for rank_shards in ranks for n, dtype in rank_shards.dtypes.items()},
    )


class LazyWeightResharder:
    """Plans the transfer of weights on the first `run` and executes the plan for every version."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_planned = False
        self._resharder: WeightResharder | None = None

    def run(
        self, source: ShardSource, served: ShardStorage | None, version: int
    ) -> ReshardingStats | None:
        """Write `version` from the trainer ranks into this rank's generator. Collective.

        `served` is the generator's storage, the same at every call. Returns None at every call if
        the first found resharding impossible.
        """
        if not self._is_planned:
            self._resharder = plan_resharding(
                source.iter_shards(), served, timeout_s=self._timeout_s
            )
            self._is_planned = True
            if self._resharder is not None and served is not None:
                source.alias_into(served)
        return self._resharder.run(source.iter_shards(), version) if self._resharder else None


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
