"""Views of a bucket's bytes as tensors."""

import torch

from streamrl.messages import Array
from streamrl.weights.manifest import DTYPE_BYTES, TensorSlot

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""Supported dtypes by name. Manifests store names because numpy has no bfloat16."""


def view_tensor(data: Array, slot: TensorSlot) -> torch.Tensor:
    """Return the tensor of a slot as a view of its bucket's bytes; `data` may be read-only.

    Uses DLPack because torch.from_numpy warns about read-only arrays.
    """
    raw = torch.from_dlpack(data[slot.offset : slot.end])
    return raw.view(TORCH_DTYPES[slot.dtype]).view(slot.shape)
