"""Parcels: boxes of several tensors in one run of bytes, as they travel together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from streamrl.resharding.plans import NamedBox
from streamrl.resharding.storage import ShardStorage, narrow_view


@dataclass(frozen=True)
class BoxPacker:
    """Packs and unpacks; itemsizes: bytes of an element, by tensor name."""

    itemsizes: Mapping[str, int]

    def sort_boxes(self, gifts: Sequence[NamedBox]) -> list[NamedBox]:
        """The order in a parcel: wider elements first, so that each lies where it can be viewed."""
        return sorted(gifts, key=lambda gift: -self.itemsizes[gift[0]])

    def count_bytes(self, gifts: Sequence[NamedBox]) -> int:
        """Size of their parcel."""
        return sum(box.numel * self.itemsizes[tensor] for tensor, box in gifts)

    def create_packed(self, source: ShardStorage, gifts: Sequence[NamedBox]) -> torch.Tensor:
        """A parcel with the gifts."""
        size = self.count_bytes(gifts)
        parcel = torch.empty(size, dtype=torch.uint8, device=source.device)
        self.pack_boxes(source, gifts, parcel)
        return parcel

    def pack_boxes(
        self, source: ShardStorage, gifts: Sequence[NamedBox], parcel: torch.Tensor
    ) -> None:
        """Put the gifts into the front of a parcel, which may be longer."""
        begin = 0
        for tensor, box in gifts:
            view = source.get_view(tensor, box)
            end = begin + view.nbytes
            parcel[begin:end].view(view.dtype).view(box.shape).copy_(view)
            begin = end

    def unpack_boxes(
        self, parcel: torch.Tensor, gifts: Sequence[NamedBox], target: ShardStorage
    ) -> None:
        """Put into the target what it holds of the gifts; the rest is passed over."""
        begin = 0
        for tensor, box in gifts:
            end = begin + box.numel * self.itemsizes[tensor]
            for held, view in target.get_pieces(tensor):
                if common := held.intersect(box):
                    given = parcel[begin:end].view(view.dtype).view(box.shape)
                    narrow_view(view, held, common).copy_(narrow_view(given, box, common))
            begin = end
