"""Memory for the shards of a layout, and for two layouts that share it where shards are nested."""

from collections.abc import Mapping

import torch

from benchmarks.table_2 import is_nested
from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.layouts import ModelLayout
from streamrl.resharding.storage import ShardStorage, create_from_buffers


def allocate_storage(
    layout: ModelLayout, rank: int, dtypes: Mapping[str, torch.dtype], *, device: str = "cpu"
) -> ShardStorage:
    """Allocate a buffer, uninitialized, for each shard of a rank.

    dtypes: by tensor name; their itemsizes must match the layout's specs.
    """
    buffers = {}
    sizes = layout.model.itemsizes
    shards = layout.shards.get(rank, {})
    for tensor, shard in shards.items():
        dtype = dtypes[tensor]
        if dtype.itemsize != sizes[tensor]:
            raise ValueError(f"{tensor}: {dtype} does not have {sizes[tensor]} bytes")
        buffers[tensor] = torch.empty(shard.numel, dtype=dtype, device=device)
    return create_from_buffers(buffers, shards)


def allocate_overlapping(
    source: ModelLayout,
    target: ModelLayout,
    rank: int,
    dtypes: Mapping[str, torch.dtype],
    *,
    device: str = "cpu",
) -> tuple[ShardStorage, ShardStorage]:
    """Allocate a rank's shards of two layouts, sharing memory where possible.

    Returns the storages of source and target. If a tensor's boxes in one layout lie inside its
    boxes in the other, its pieces are views of the other layout's memory.
    """
    in_target = {
        name
        for name, shard in source.shards.get(rank, {}).items()
        if is_nested(shard.boxes, target.get_boxes(rank, name))
    }
    in_source = {
        name
        for name, shard in target.shards.get(rank, {}).items()
        if name not in in_target and is_nested(shard.boxes, source.get_boxes(rank, name))
    }
    source_storage, target_storage = (
        allocate_storage(
            _select_tensors(layout, rank, shared_names, without=True), rank, dtypes, device=device
        )
        for layout, shared_names in ((source, in_target), (target, in_source))
    )
    return (
        _merge(
            source_storage,
            create_from_storage(_select_tensors(source, rank, in_target), rank, target_storage),
        ),
        _merge(
            target_storage,
            create_from_storage(_select_tensors(target, rank, in_source), rank, source_storage),
        ),
    )


def _select_tensors(
    layout: ModelLayout, rank: int, names: set[str], *, without: bool = False
) -> ModelLayout:
    """Return a layout with only the shards of `names` on a rank, or of all others (`without`)."""
    shards = layout.shards.get(rank, {})
    return ModelLayout(
        layout.model, {rank: {n: shards[n] for n in shards if (n in names) is not without}}
    )


def _merge(*storages: ShardStorage) -> ShardStorage:
    """Return a storage with the pieces of all storages, which must have different tensors."""
    views: dict[str, list[tuple[TensorBox, torch.Tensor]]] = {}
    for storage in storages:
        for tensor, box, view in storage:
            views.setdefault(tensor, []).append((box, view))
    return ShardStorage(views)


def create_from_storage(layout: ModelLayout, rank: int, host: ShardStorage) -> ShardStorage:
    """Return a storage of a rank's shards as views of the memory of `host`, without allocating.

    Raises ValueError if a piece does not lie within a single piece of `host`.
    """
    views: dict[str, list[tuple[TensorBox, torch.Tensor]]] = {}
    for tensor, shard in layout.shards.get(rank, {}).items():
        try:
            views[tensor] = [(box, host.get_view(tensor, box)) for box in shard.boxes]
        except KeyError as error:
            raise ValueError(f"rank {rank} cannot share its memory: {error.args[0]}") from None
    return ShardStorage(views, version=host.version)


def count_memory_bytes(*storages: ShardStorage) -> int:
    """Return the bytes of all buffers behind the storages, each buffer once."""
    buffers = {}
    for storage in storages:
        for _, _, view in storage:
            buffer = view.untyped_storage()
            buffers[buffer.data_ptr()] = buffer.nbytes()
    return sum(buffers.values())
