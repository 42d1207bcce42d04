"""One rank's shards in memory: every piece a view of some buffer, and the version they hold."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from streamrl.resharding.boxes import TensorBox, is_nested
from streamrl.resharding.layouts import ModelLayout, TensorShard


class ShardStorage:
    """The pieces one rank holds of every tensor, as views; whoever made them owns the memory.

    version: the policy_version of what is in them, None while they are being filled or before.
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
        """Where the pieces are; the CPU if there are none."""
        views = (view for pieces in self._views.values() for _, view in pieces)
        return next((view.device for view in views), torch.device("cpu"))

    def __iter__(self) -> Iterator[tuple[str, TensorBox, torch.Tensor]]:
        """Every piece: its tensor, its box and its view."""
        for tensor, pieces in self._views.items():
            for box, view in pieces:
                yield tensor, box, view

    def get_pieces(self, tensor: str) -> Sequence[tuple[TensorBox, torch.Tensor]]:
        """What is held of a tensor; nothing if none of it."""
        return self._views.get(tensor, ())

    def merge_with(self, other: "ShardStorage") -> "ShardStorage":
        """The pieces of both, which are of different tensors."""
        return ShardStorage({**self._views, **other._views}, version=self.version)

    def get_view(self, tensor: str, box: TensorBox) -> torch.Tensor:
        """The elements of a box that lies within one piece, to read or to fill."""
        for held, view in self.get_pieces(tensor):
            if held.intersect(box) == box:
                return narrow_view(view, held, box)
        raise KeyError(f"{tensor}{box}: not in one piece of this storage")


def narrow_view(view: torch.Tensor, held: TensorBox, box: TensorBox) -> torch.Tensor:
    """Of a view of `held`, that of a box inside."""
    steps = zip(box.dim_ranges, held.start, strict=True)
    return view[tuple(slice(low - own, high - own) for (low, high), own in steps)]


def allocate_storage(
    layout: ModelLayout, rank: int, dtypes: Mapping[str, torch.dtype], *, device: str = "cpu"
) -> ShardStorage:
    """New memory for a rank's shards, one buffer for each, not yet filled.

    dtypes: by tensor name; their sizes must be those of the layout's specs.
    """
    buffers = {}
    specs = layout.model.specs_by_name()
    shards = layout.shards.get(rank, {})
    for tensor, shard in shards.items():
        dtype = dtypes[tensor]
        if dtype.itemsize != specs[tensor].itemsize:
            raise ValueError(f"{tensor}: {dtype} has not {specs[tensor].itemsize} bytes")
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
    """New memory for a rank's shards of two layouts.

    Tensor by tensor, those of the one are views into those of the other where they lie inside.
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
    held, wanted = (
        allocate_storage(
            _select_tensors(layout, rank, elsewhere, without=True), rank, dtypes, device=device
        )
        for layout, elsewhere in ((source, in_target), (target, in_source))
    )
    return (
        held.merge_with(
            create_from_storage(_select_tensors(source, rank, in_target), rank, wanted)
        ),
        wanted.merge_with(
            create_from_storage(_select_tensors(target, rank, in_source), rank, held)
        ),
    )


def _select_tensors(
    layout: ModelLayout, rank: int, names: set[str], *, without: bool = False
) -> ModelLayout:
    """One rank's shards of these tensors, or of all others."""
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
    """A rank's shards as views of the contiguous tensors that hold them, each from its beginning.

    A buffer may be longer than its shard, as where it is padded.
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
    """A rank's shards of a layout as views into what `host` holds: no memory of their own.

    Raises ValueError if a piece does not lie within one of the host's.
    """
    views: dict[str, list[tuple[TensorBox, torch.Tensor]]] = {}
    for tensor, shard in layout.shards.get(rank, {}).items():
        try:
            views[tensor] = [(box, host.get_view(tensor, box)) for box in shard.boxes]
        except KeyError as error:
            raise ValueError(f"rank {rank} cannot share its memory: {error.args[0]}") from None
    return ShardStorage(views, version=host.version)


def count_memory_bytes(*storages: ShardStorage) -> int:
    """Bytes of the buffers behind some storages, each buffer once."""
    buffers = {}
    for storage in storages:
        for _, _, view in storage:
            whole = view.untyped_storage()
            buffers[whole.data_ptr()] = whole.nbytes()
    return sum(buffers.values())
