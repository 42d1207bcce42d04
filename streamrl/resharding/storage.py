"""One rank's shards in memory: every piece a view of some buffer, and the version they hold."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from streamrl.resharding.boxes import Box, nested
from streamrl.resharding.layouts import Layout, Shard


class Storage:
    """The pieces one rank holds of every tensor, as views; whoever made them owns the memory.

    version: the policy_version of what is in them, None while they are being filled or before.
    """

    def __init__(
        self, views: Mapping[str, Sequence[tuple[Box, torch.Tensor]]], *, version: int | None = None
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

    def __iter__(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Every piece: its tensor, its box and its view."""
        for tensor, pieces in self._views.items():
            for box, view in pieces:
                yield tensor, box, view

    def pieces(self, tensor: str) -> Sequence[tuple[Box, torch.Tensor]]:
        """What is held of a tensor; nothing if none of it."""
        return self._views.get(tensor, ())

    def beside(self, other: "Storage") -> "Storage":
        """The pieces of both, which are of different tensors."""
        return Storage({**self._views, **other._views}, version=self.version)

    def view(self, tensor: str, box: Box) -> torch.Tensor:
        """The elements of a box that lies within one piece, to read or to fill."""
        for held, view in self.pieces(tensor):
            if held.meet(box) == box:
                return part(view, held, box)
        raise KeyError(f"{tensor}{box}: not in one piece of this storage")


def part(view: torch.Tensor, held: Box, box: Box) -> torch.Tensor:
    """Of a view of `held`, that of a box inside."""
    steps = zip(box.spans, held.start, strict=True)
    return view[tuple(slice(low - own, high - own) for (low, high), own in steps)]


def allocate(
    layout: Layout, rank: int, dtypes: Mapping[str, torch.dtype], *, device: str = "cpu"
) -> Storage:
    """New memory for a rank's shards, one buffer for each, not yet filled.

    dtypes: by tensor name; their sizes must be those of the layout's specs.
    """
    buffers = {}
    specs = layout.model.by_name()
    shards = layout.shards.get(rank, {})
    for tensor, shard in shards.items():
        dtype = dtypes[tensor]
        if dtype.itemsize != specs[tensor].itemsize:
            raise ValueError(f"{tensor}: {dtype} has not {specs[tensor].itemsize} bytes")
        buffers[tensor] = torch.empty(shard.numel, dtype=dtype, device=device)
    return lying_in(buffers, shards)


def allocate_both(
    source: Layout,
    target: Layout,
    rank: int,
    dtypes: Mapping[str, torch.dtype],
    *,
    device: str = "cpu",
) -> tuple[Storage, Storage]:
    """New memory for a rank's shards of two layouts.

    Tensor by tensor, those of the one are views into those of the other where they lie inside.
    """
    in_target = {
        name
        for name, shard in source.shards.get(rank, {}).items()
        if nested(shard.boxes, target.boxes(rank, name))
    }
    in_source = {
        name
        for name, shard in target.shards.get(rank, {}).items()
        if name not in in_target and nested(shard.boxes, source.boxes(rank, name))
    }
    held, wanted = (
        allocate(_some(layout, rank, elsewhere, without=True), rank, dtypes, device=device)
        for layout, elsewhere in ((source, in_target), (target, in_source))
    )
    return (
        held.beside(inside(_some(source, rank, in_target), rank, wanted)),
        wanted.beside(inside(_some(target, rank, in_source), rank, held)),
    )


def _some(layout: Layout, rank: int, names: set[str], *, without: bool = False) -> Layout:
    """One rank's shards of these tensors, or of all others."""
    shards = layout.shards.get(rank, {})
    return Layout(
        layout.model, {rank: {n: shards[n] for n in shards if (n in names) is not without}}
    )


def lying_in(
    buffers: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard],
    *,
    version: int | None = None,
) -> Storage:
    """A rank's shards as views of the contiguous tensors that hold them, each from its beginning.

    A buffer may be longer than its shard, as where it is padded.
    """
    return Storage(
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


def inside(layout: Layout, rank: int, host: Storage) -> Storage:
    """A rank's shards of a layout as views into what `host` holds: no memory of their own.

    Raises ValueError if a piece does not lie within one of the host's.
    """
    views: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for tensor, shard in layout.shards.get(rank, {}).items():
        try:
            views[tensor] = [(box, host.view(tensor, box)) for box in shard.boxes]
        except KeyError as error:
            raise ValueError(f"rank {rank} cannot share its memory: {error.args[0]}") from None
    return Storage(views, version=host.version)


def memory_bytes(*storages: Storage) -> int:
    """Bytes of the buffers behind some storages, each buffer once."""
    buffers = {}
    for storage in storages:
        for _, _, view in storage:
            whole = view.untyped_storage()
            buffers[whole.data_ptr()] = whole.nbytes()
    return sum(buffers.values())
