"""Memory layout by which trainer and generator of a process share parameters without a copy."""

import torch
from torch import Tensor

from streamrl.resharding.layouts import TensorShard
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import group_for_fusion


def make_sisters_contiguous(module: torch.nn.Module) -> None:
    """Move the trained parameters of sibling layers (such as q, k and v) into a contiguous block.

    vLLM fuses sibling layers into a single parameter and can then alias the block instead of
    copying.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for names in group_for_fusion(trained):
        parameters = [trained[name] for name in names]
        if len({(p.dtype, p.device) for p in parameters}) > 1:
            continue
        block = torch.cat([p.detach().flatten() for p in parameters])
        views = torch.split(block, [p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view.view(parameter.shape)


def find_alias_view(
    served: ShardStorage, name: str, local: Tensor, shard: TensorShard
) -> Tensor | None:
    """Return the part of the generator's storage that can replace a trainer rank's local tensor.

    The part is a contiguous view with the elements of `shard` of parameter `name`. Returns None if
    dtype or device differ or the elements are strided in the generator's storage, such as columns
    of an unsplit matrix.
    """
    if len(shard.boxes) != 1:
        return None
    try:
        view = served.get_view(name, shard.boxes[0])
    except KeyError:
        return None
    is_compatible = (view.dtype, view.device) == (local.dtype, local.device)
    return view if is_compatible and view.is_contiguous() else None
