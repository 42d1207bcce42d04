"""Memory of a rank's shards: pieces as views of buffers, with the version that they hold."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from streamrl.resharding.boxes import TensorBox, is_nested
from streamrl.resharding.layouts import ModelLayout, TensorShard


class ShardStorage:
    """Pieces of tensors that a rank holds, as views; the creator of the views owns the memory.

    version: policy version of the contents; None before and while they are filled.
    """

    def __init__(
        self,
        views: Mapping[str, Sequence[tuple[TensorBox, torch.Tensor]]],
        *,
        version: int | None = None,
    ) -> None:
        for tensor, pieces in views.items():
            for box, view in pieces:
                if tuple(view.shape) != box.shape:
                    raise ValueError(f"{tensor}{box}: a view of shape {tuple(view.shape)}")
        self._views = {tensor: list(pieces) for tensor, pieces in views.items()}
        self.version = version

    @property
    def device(self) -> torch.device:
        """Device of the stored pieces; the CPU if there are none."""
        views = (view for pieces in self._views.values() for _, view in pieces)
        return next((view.device for view in views), torch.device("cpu"))

    def __iter__(self) -> Iterator[tuple[str, TensorBox, torch.Tensor]]:
        """Yield every piece: tensor name, box and view."""
        for tensor, pieces in self._views.items():
            for box, view in pieces:
                yield tensor, box, view

    def get_pieces(self, tensor: str) -> Sequence[tuple[TensorBox, torch.Tensor]]:
        """Return the stored pieces of a tensor, (box, view) each; empty if none is stored."""
        return self._views.get(tensor, ())

    def merge_with(self, other: "ShardStorage") -> "ShardStorage":
        """Return a storage with the pieces of both storages, which must have different tensors."""
        return ShardStorage({**self._views, **other._views}, version=self.version)

    def get_view(self, tensor: str, box: TensorBox) -> torch.Tensor:
        """Return a view of a tensor's box; raise KeyError unless a single piece contains it."""
        for piece_box, view in self.get_pieces(tensor):
            if piece_box.intersect(box) == box:
                return narrow_view(view, piece_box, box)
        raise KeyError(f"{tensor}{box}: not in one piece of this storage")


def narrow_view(view: torch.Tensor, view_box: TensorBox, box: TensorBox) -> torch.Tensor:
    """Narrow a view of a tensor's `view_box` to the smaller `box`."""
    dims = zip(box.dim_ranges, view_box.start, strict=True)
    return view[
        tuple(slice(low - view_start, high - view_start) for (low, high), view_start in dims)
    ]


def allocate_storage(
    layout: ModelLayout, rank: int, dtypes: Mapping[str, torch.dtype], *, device: str = "cpu"
) -> ShardStorage:
    """Allocate a buffer, uninitialized, for each shard of a rank.

    dtypes: by tensor name; their itemsizes must match the layout's specs.
    """
    buffers = {}
    specs = layout.model.specs_by_name()
    shards = layout.shards.get(rank, {})
    for tensor, shard in shards.items():
        dtype = dtypes[tensor]
        if dtype.itemsize != specs[tensor].itemsize:
            raise ValueError(f"{tensor}: {dtype} does not have {specs[tensor].itemsize} bytes")
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
        source_storage.merge_with(
            create_from_storage(_select_tensors(source, rank, in_target), rank, target_storage)
        ),
        target_storage.merge_with(
            create_from_storage(_select_tensors(target, rank, in_source), rank, source_storage)
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


def create_from_buffers(
    buffers: Mapping[str, torch.Tensor],
    shards: Mapping[str, TensorShard],
    *,
    version: int | None = None,
) -> ShardStorage:
    """Return a storage of a rank's shards as views of contiguous buffers, by tensor name.

    A shard begins at the start of its buffer, which may be longer, for example if it is padded.
    """
    return ShardStorage(
        {
            tensor: [
                (
                    piece.box,
                    buffers[tensor].as_strided(
                        piece.box.shape,
                        piece.strides,
                        buffers[tensor].storage_offset() + piece.offset,
                    ),
                )
                for piece in shard.pieces
            ]
            for tensor, shard in shards.items()
        },
        version=version,
    )


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
