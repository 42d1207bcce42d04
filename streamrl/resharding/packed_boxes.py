"""Packing of boxes of several tensors into a single byte buffer for transfer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from streamrl.resharding.plans import NamedBox
from streamrl.resharding.storage import ShardStorage, narrow_view


@dataclass(frozen=True)
class BoxPacker:
    """Packs boxes of tensors into a byte buffer and unpacks them.

    itemsizes: bytes per element, by tensor name.
    """

    itemsizes: Mapping[str, int]

    def sort_boxes(self, boxes: Sequence[NamedBox]) -> list[NamedBox]:
        """Order boxes for a buffer: wider elements first, so that every box is aligned."""
        return sorted(boxes, key=lambda named_box: -self.itemsizes[named_box[0]])

    def count_bytes(self, boxes: Sequence[NamedBox]) -> int:
        return sum(box.numel * self.itemsizes[tensor] for tensor, box in boxes)

    def create_packed(self, source: ShardStorage, boxes: Sequence[NamedBox]) -> torch.Tensor:
        """Return a new buffer that holds the boxes of `source`, one after another."""
        size = self.count_bytes(boxes)
        buffer = torch.empty(size, dtype=torch.uint8, device=source.device)
        self.pack_boxes(source, boxes, buffer)
        return buffer

    def pack_boxes(
        self, source: ShardStorage, boxes: Sequence[NamedBox], buffer: torch.Tensor
    ) -> None:
        """Copy boxes of `source` to the front of `buffer`, one after another; it may be longer."""
        begin = 0
        for tensor, box in boxes:
            view = source.get_view(tensor, box)
            end = begin + view.nbytes
            buffer[begin:end].view(view.dtype).view(box.shape).copy_(view)
            begin = end

    def unpack_boxes(
        self, buffer: torch.Tensor, boxes: Sequence[NamedBox], target: ShardStorage
    ) -> None:
        """Copy the boxes in `buffer` to `target`, except elements that `target` does not store."""
        begin = 0
        for tensor, box in boxes:
            end = begin + box.numel * self.itemsizes[tensor]
            for piece_box, view in target.get_pieces(tensor):
                if common := piece_box.intersect(box):
                    received = buffer[begin:end].view(view.dtype).view(box.shape)
                    narrow_view(view, piece_box, common).copy_(narrow_view(received, box, common))
            begin = end
