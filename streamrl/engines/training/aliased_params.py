"""Parameters laid in memory so that the trainer and the generator of one process can share them."""

import torch
from torch import Tensor

from streamrl.resharding import TensorShard
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import group_for_fusion


def make_sisters_contiguous(module: torch.nn.Module) -> None:
    """Move what is trained of sister layers into one block of memory each, in the order they have
    when they are published.

    The generator fuses some of them into one parameter; which, it may then take as it lies there.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for names in group_for_fusion(trained):
        parameters = [trained[name] for name in names]
        if len({(p.dtype, p.device) for p in parameters}) > 1:
            continue
        block = torch.cat([p.detach().flatten() for p in parameters])
        parts = torch.split(block, [p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part.view(parameter.shape)


def find_alias_view(
    served: ShardStorage, name: str, kept: Tensor, shard: TensorShard
) -> Tensor | None:
    """Where in what a generator serves a rank may keep its part of a parameter, of one type.

    None where that does not lie in one piece there, as columns of a matrix that is served whole.
    """
    if len(shard.boxes) != 1:
        return None
    try:
        place = served.get_view(name, shard.boxes[0])
    except KeyError:
        return None
    is_alike = (place.dtype, place.device) == (kept.dtype, kept.device)
    return place if is_alike and place.is_contiguous() else None
