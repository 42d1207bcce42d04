"""From the shards of a trainer's ranks straight into the generators of their processes.

Where a rank trains another part of the parameters than its generator serves, or several ranks share
a generator, what is served is filled from all ranks, in buckets: what a rank has lies where it is,
what it lacks comes once, and nothing is laid down in between. What moves is planned once, from what
each rank says it keeps and serves, and run at every version. Once it is planned, ranks keep in the
memory of their generator what can lie there: that is not copied. Where the generator has another
type, each rank casts what it keeps first.
"""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.resharding import ModelLayout, ModelSpec, NodeTopology, TensorShard, TensorSpec
from streamrl.resharding.executors import (
    ReshardingExecutor,
    ReshardingStats,
    create_least_bytes_executor,
)
from streamrl.resharding.storage import ShardStorage, create_from_buffers

BUCKET_BYTES = 16 * 2**20
"""What is under way at once, bytes; gloo holds as much again."""

NamedShards = Iterable[tuple[str, Tensor, TensorShard]]
"""What a rank keeps of what is trained: by name, where it lies and which part that is."""


class ShardSource(Protocol):
    """What keeps a rank's part of what is trained; see `TrainingBackend`."""

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]: ...

    def alias_into(self, served: ShardStorage) -> None: ...


@dataclass(frozen=True)
class _RankShards:
    """What a rank says of itself: what it keeps, what its generator serves, in what types, and on
    which node it is."""

    train_shards: Mapping[str, TensorShard]
    serve_shards: Mapping[str, TensorShard]
    dtypes: Mapping[str, torch.dtype]
    node: str


class WeightResharder:
    """The way of every version into the generator of this rank."""

    def __init__(
        self, executor: ReshardingExecutor, served: ShardStorage, types: Mapping[str, torch.dtype]
    ) -> None:
        self._executor = executor
        self._storage = served
        self._dtypes = types

    def run(self, placed: NamedShards, version: int) -> ReshardingStats:
        """Fill the generator's parameters with `version`. Collective.

        They must stand still. Raises WeightsError if the ranks hold different versions, or one does
        not answer in time.
        """
        buffers, shards = {}, {}
        for name, tensor, shard in placed:
            buffers[name], shards[name] = tensor.to(self._dtypes[name]), shard
        return self._executor.run(
            create_from_buffers(buffers, shards, version=version), self._storage
        )


def plan_resharding(
    placed: NamedShards, served: ShardStorage | None, *, timeout_s: float
) -> WeightResharder | None:
    """The switch from what each rank keeps to what the generator of each serves. Collective.

    `served` is where the generator of this rank has what it serves: every parameter, or, where
    several ranks share a generator, its part. None if that is nothing to write into. None if any
    rank's is not, or if they have other parameters than are trained.
    """
    kept = {name: (tensor, shard) for name, tensor, shard in placed}
    said: list[_RankShards | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, _describe_rank(kept, served))
    ranks = [each for each in said if each is not None]
    if served is None or len(ranks) < len(said):
        return None
    model = _merge_served_specs(ranks)
    if {spec.name for spec in model.tensors} != {
        name for each in ranks for name in each.train_shards
    }:
        return None
    executor = create_least_bytes_executor(
        ModelLayout(model, {rank: each.train_shards for rank, each in enumerate(ranks)}),
        ModelLayout(model, {rank: each.serve_shards for rank, each in enumerate(ranks)}),
        cluster=make_nodes([each.node for each in ranks]),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
    )
    return WeightResharder(
        executor, served, {n: dtype for each in ranks for n, dtype in each.dtypes.items()}
    )


class LazyWeightResharder:
    """A switch that is planned at its first run."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_planned = False
        self._resharder: WeightResharder | None = None

    def run(
        self, keeper: ShardSource, served: ShardStorage | None, version: int
    ) -> ReshardingStats | None:
        """See `WeightResharder.run`;

        None where there is no switch. `served` is the same at every call.
        """
        if not self._is_planned:
            self._resharder = plan_resharding(
                keeper.iter_shards(), served, timeout_s=self._timeout_s
            )
            self._is_planned = True
            if self._resharder is not None and served is not None:
                keeper.alias_into(served)
        return self._resharder.run(keeper.iter_shards(), version) if self._resharder else None


def _describe_rank(
    kept: Mapping[str, tuple[Tensor, TensorShard]], served: ShardStorage | None
) -> _RankShards | None:
    """What this rank says; None if what it keeps is not where what it serves is."""
    if served is None or any(tensor.device != served.device for tensor, _ in kept.values()):
        return None
    return _RankShards(
        train_shards={name: shard for name, (_, shard) in kept.items()},
        serve_shards={
            name: TensorShard(name, box.shape, ((box, (0,) * len(box.shape)),))
            for name, box, _ in served
        },
        dtypes={name: view.dtype for name, _, view in served},
        node=socket.gethostname(),
    )


def make_nodes(nodes: Sequence[str]) -> NodeTopology:
    """Which ranks are near each other, by the node of each.

    All are as near as any where nodes do not have as many neighbours each: then only the number of
    bytes counts.
    """
    sizes = [len(list(each)) for _, each in groupby(nodes)]
    return NodeTopology(sizes[0] if len(set(sizes)) == 1 else len(nodes))


def _merge_served_specs(ranks: Sequence[_RankShards]) -> ModelSpec:
    """What all generators serve, whole."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for each in ranks:
        for name, shard in each.serve_shards.items():
            (box,) = shard.boxes
            shapes[name] = tuple(map(max, shapes.get(name, box.stop), box.stop))
            sizes[name] = each.dtypes[name].itemsize
    specs = (TensorSpec(name, shape, (0,), itemsize=sizes[name]) for name, shape in shapes.items())
    return ModelSpec(tuple(specs), 1)
