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

from streamrl.resharding import Layout, ModelSpec, Nodes, Shard, TensorSpec
from streamrl.resharding.executors import Executor, Moved, least_moving
from streamrl.resharding.storage import Storage, lying_in

BUCKET_BYTES = 16 * 2**20
"""What is under way at once, bytes; gloo holds as much again."""

Placed = Iterable[tuple[str, Tensor, Shard]]
"""What a rank keeps of what is trained: by name, where it lies and which part that is."""


class Keeper(Protocol):
    """What keeps a rank's part of what is trained; see `TrainingBackend`."""

    def placed(self) -> Iterator[tuple[str, Tensor, Shard]]: ...

    def move_into(self, served: Storage) -> None: ...


@dataclass(frozen=True)
class _Held:
    """What a rank says of itself: what it keeps, what its generator serves, in what types, and on
    which node it is."""

    kept: Mapping[str, Shard]
    served: Mapping[str, Shard]
    types: Mapping[str, torch.dtype]
    node: str


class Switch:
    """The way of every version into the generator of this rank."""

    def __init__(
        self, executor: Executor, served: Storage, types: Mapping[str, torch.dtype]
    ) -> None:
        self._executor = executor
        self._served = served
        self._types = types

    def run(self, placed: Placed, version: int) -> Moved:
        """Fill the generator's parameters with `version`. Collective.

        They must stand still. Raises WeightsError if the ranks hold different versions, or one does
        not answer in time.
        """
        buffers, shards = {}, {}
        for name, tensor, shard in placed:
            buffers[name], shards[name] = tensor.to(self._types[name]), shard
        return self._executor.run(lying_in(buffers, shards, version=version), self._served)


def plan_switch(placed: Placed, served: Storage | None, *, timeout_s: float) -> Switch | None:
    """The switch from what each rank keeps to what the generator of each serves. Collective.

    `served` is where the generator of this rank has what it serves: every parameter, or, where
    several ranks share a generator, its part. None if that is nothing to write into. None if any
    rank's is not, or if they have other parameters than are trained.
    """
    kept = {name: (tensor, shard) for name, tensor, shard in placed}
    said: list[_Held | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, _held(kept, served))
    ranks = [each for each in said if each is not None]
    if served is None or len(ranks) < len(said):
        return None
    model = _model(ranks)
    if {spec.name for spec in model.tensors} != {name for each in ranks for name in each.kept}:
        return None
    executor = least_moving(
        Layout(model, {rank: each.kept for rank, each in enumerate(ranks)}),
        Layout(model, {rank: each.served for rank, each in enumerate(ranks)}),
        cluster=cluster_of([each.node for each in ranks]),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
    )
    return Switch(executor, served, {n: dtype for each in ranks for n, dtype in each.types.items()})


class PlannedOnce:
    """A switch that is planned at its first run."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_planned = False
        self._switch: Switch | None = None

    def run(self, keeper: Keeper, served: Storage | None, version: int) -> Moved | None:
        """See `Switch.run`; None where there is no switch. `served` is the same at every call."""
        if not self._is_planned:
            self._switch = plan_switch(keeper.placed(), served, timeout_s=self._timeout_s)
            self._is_planned = True
            if self._switch is not None and served is not None:
                keeper.move_into(served)
        return self._switch.run(keeper.placed(), version) if self._switch else None


def _held(kept: Mapping[str, tuple[Tensor, Shard]], served: Storage | None) -> _Held | None:
    """What this rank says; None if what it keeps is not where what it serves is."""
    if served is None or any(tensor.device != served.device for tensor, _ in kept.values()):
        return None
    return _Held(
        kept={name: shard for name, (_, shard) in kept.items()},
        served={
            name: Shard(name, box.shape, ((box, (0,) * len(box.shape)),)) for name, box, _ in served
        },
        types={name: view.dtype for name, _, view in served},
        node=socket.gethostname(),
    )


def cluster_of(nodes: Sequence[str]) -> Nodes:
    """Which ranks are near each other, by the node of each.

    All are as near as any where nodes do not have as many neighbours each: then only the number of
    bytes counts.
    """
    sizes = [len(list(each)) for _, each in groupby(nodes)]
    return Nodes(sizes[0] if len(set(sizes)) == 1 else len(nodes))


def _model(ranks: Sequence[_Held]) -> ModelSpec:
    """What all generators serve, whole."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for each in ranks:
        for name, shard in each.served.items():
            (box,) = shard.boxes
            shapes[name] = tuple(map(max, shapes.get(name, box.stop), box.stop))
            sizes[name] = each.types[name].itemsize
    specs = (TensorSpec(name, shape, (0,), itemsize=sizes[name]) for name, shape in shapes.items())
    return ModelSpec(tuple(specs), 1)
