"""Memory of a rank's shards: pieces as views of buffers, with the version that they hold."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.layouts import ShardPiece, TensorShard


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

    def list_boxes(self) -> dict[str, list[TensorBox]]:
        """Return the stored boxes of each tensor, sorted."""
        return {name: sorted(box for box, _ in pieces) for name, pieces in self._views.items()}

    def get_pieces(self, tensor: str) -> Sequence[tuple[TensorBox, torch.Tensor]]:
        """Return the stored pieces of a tensor, (box, view) each; empty if none is stored."""
        return self._views.get(tensor, ())

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
            tensor: [(piece.box, view_piece(buffers[tensor], piece)) for piece in shard.pieces]
            for tensor, shard in shards.items()
        },
        version=version,
    )


def view_piece(stored: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
    """Return a view of the elements of a contiguous box, given the tensor that stores its shard."""
    offset = int(stored.storage_offset()) + piece.offset
    return stored.as_strided(piece.box.shape, piece.strides, offset)
