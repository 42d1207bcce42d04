"""Parcels: boxes of several tensors in one run of bytes, as they travel together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from streamrl.resharding.plans import Gift
from streamrl.resharding.storage import Storage, part


@dataclass(frozen=True)
class Packer:
    """Packs and unpacks; itemsizes: bytes of an element, by tensor name."""

    itemsizes: Mapping[str, int]

    def in_order(self, gifts: Sequence[Gift]) -> list[Gift]:
        """The order in a parcel: wider elements first, so that each lies where it can be viewed."""
        return sorted(gifts, key=lambda gift: -self.itemsizes[gift[0]])

    def num_bytes(self, gifts: Sequence[Gift]) -> int:
        """Size of their parcel."""
        return sum(box.numel * self.itemsizes[tensor] for tensor, box in gifts)

    def packed(self, source: Storage, gifts: Sequence[Gift]) -> torch.Tensor:
        """A parcel with the gifts."""
        size = self.num_bytes(gifts)
        parcel = torch.empty(size, dtype=torch.uint8, device=source.device)
        self.pack(source, gifts, parcel)
        return parcel

    def pack(self, source: Storage, gifts: Sequence[Gift], parcel: torch.Tensor) -> None:
        """Put the gifts into the front of a parcel, which may be longer."""
        begin = 0
        for tensor, box in gifts:
            view = source.view(tensor, box)
            end = begin + view.nbytes
            parcel[begin:end].view(view.dtype).view(box.shape).copy_(view)
            begin = end

    def unpack(self, parcel: torch.Tensor, gifts: Sequence[Gift], target: Storage) -> None:
        """Put into the target what it holds of the gifts; the rest is passed over."""
        begin = 0
        for tensor, box in gifts:
            end = begin + box.numel * self.itemsizes[tensor]
            for held, view in target.pieces(tensor):
                if common := held.meet(box):
                    given = parcel[begin:end].view(view.dtype).view(box.shape)
                    part(view, held, common).copy_(part(given, box, common))
            begin = end
