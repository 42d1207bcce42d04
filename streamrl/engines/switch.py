"""From the shards of a trainer's ranks straight into the generators of their processes.

Where no rank has the parameters whole, those the generator samples from are filled from all ranks,
in buckets: what a rank has lies where it is, what it lacks comes once, and nothing is laid down in
between. What moves is planned once, from what each rank says it keeps, and run at every version.
Where the generator has another type, each rank casts what it keeps first.
"""

from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch import Tensor

from streamrl.resharding import (
    Cluster,
    Executor,
    Layout,
    ModelSpec,
    Moved,
    Shard,
    Storage,
    TensorSpec,
    least_moving,
    lying_in,
    whole_shard,
)

BUCKET_BYTES = 16 * 2**20
"""What is under way at once, bytes; gloo holds as much again."""

Placed = Iterable[tuple[str, Tensor, Shard]]
"""What a rank keeps of what is trained: by name, where it lies and which part that is."""


class Switch:
    """The way of every version into the generator of this rank."""

    def __init__(self, executor: Executor, served: Storage) -> None:
        self._executor = executor
        self._served = served

    def run(self, placed: Placed, version: int) -> Moved:
        """Fill the generator's parameters with `version`. Collective.

        They must stand still. Raises WeightsError if the ranks hold different versions, or one does
        not answer in time.
        """
        types = {name: view.dtype for name, _, view in self._served}
        buffers, shards = {}, {}
        for name, tensor, shard in placed:
            buffers[name], shards[name] = tensor.to(types[name]), shard
        return self._executor.run(lying_in(buffers, shards, version=version), self._served)


def plan_switch(placed: Placed, served: Storage | None, *, timeout_s: float) -> Switch | None:
    """The switch from what each rank keeps to all of it in the generator of each. Collective.

    `served` is where the generator of this rank has every parameter, None if that is nothing to
    write into. None if any rank's is not, or has other parameters than are trained.
    """
    kept = {name: (tensor, shard) for name, tensor, shard in placed}
    fits = served is not None and _fits({n: tensor for n, (tensor, _) in kept.items()}, served)
    mine = {name: shard for name, (_, shard) in kept.items()} if fits else None
    said: list[Mapping[str, Shard] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    shards = [each for each in said if each is not None]
    if served is None or len(shards) < len(said):
        return None
    model = _model(served)
    executor = least_moving(
        Layout(model, dict(enumerate(shards))),
        Layout(model, dict.fromkeys(range(len(said)), _whole(model))),
        # All are as near as any: only the number of bytes counts here.
        cluster=Cluster(len(said)),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
    )
    return Switch(executor, served)


class PlannedOnce:
    """A switch that is planned at its first run."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_planned = False
        self._switch: Switch | None = None

    def run(
        self, placed: Callable[[], Placed], served: Storage | None, version: int
    ) -> Moved | None:
        """See `Switch.run`; None where there is no switch. `served` is the same at every call."""
        if not self._is_planned:
            self._switch = plan_switch(placed(), served, timeout_s=self._timeout_s)
            self._is_planned = True
        return self._switch.run(placed(), version) if self._switch else None


def _fits(kept: Mapping[str, Tensor], served: Storage) -> bool:
    """Whether what is kept are parts of what is served. A rank may keep nothing of a parameter."""
    devices = {name: view.device for name, _, view in served}
    return all(devices.get(name) == tensor.device for name, tensor in kept.items())


def _model(served: Storage) -> ModelSpec:
    specs = {
        name: TensorSpec(name, tuple(view.shape), (0,), itemsize=view.itemsize)
        for name, _, view in served
    }
    return ModelSpec(tuple(specs.values()), 1)


def _whole(model: ModelSpec) -> Mapping[str, Shard]:
    return {spec.name: whole_shard(spec.name, spec.shape) for spec in model.tensors}
