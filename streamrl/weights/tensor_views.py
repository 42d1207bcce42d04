"""Tensors as views of the buckets they travel in."""

import torch

from streamrl.messages import Array
from streamrl.weights.manifest import DTYPE_BYTES, TensorSlot

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""What can travel, by name: numpy has no bfloat16, so a name is what manifest and tensor share."""


def view_tensor(data: Array, slot: TensorSlot) -> torch.Tensor:
    """The tensor of a slot as a view of its bucket's bytes; `data` may be read-only.

    Through DLPack, because torch.from_numpy warns of a read-only array.
    """
    raw = torch.from_dlpack(data[slot.offset : slot.end])
    return raw.view(TORCH_DTYPES[slot.dtype]).view(slot.shape)
