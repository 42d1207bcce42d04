"""Sequence parallelism: a group of ranks shares the tokens of each micro-batch.

As in DeepSpeed-Ulysses (arXiv 2309.14509). Each rank runs the layers and the head on its part of
the tokens. Attention is where tokens meet: an all-to-all gives each rank all tokens of its part of
the heads, and another one returns the outputs.

              tokens 0 to n    tokens n to 2n
    layers    rank 0           rank 1            all heads
    attention ranks 0 and 1    ranks 0 and 1     half of the heads each

Scores of tokens are then gathered, so every rank of the group computes the loss of whole rows. Its
backward pass covers the rank's own tokens: gradients of parameters are to be summed over the group.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.errors import StreamError


class SequenceGroup:
    """The ranks that share the tokens of a micro-batch, seen from one of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def select_own(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of [..., N]; the group's size must divide N."""
        return tokens.chunk(self.size, -1)[self.rank]

    def gather_tokens(self, values: Tensor) -> Tensor:
        """Gather values of all tokens, [..., N], from each rank's [..., N / size]. Collective.

        Backward, each rank takes the gradient of its own part, since all compute the same loss.
        """
        gathered: Tensor = _AllGather.apply(values, self._group)
        return gathered

    def split_heads(self, states: Tensor) -> Tensor:
        """Turn [1, heads, N / size, width] into [1, heads / size, N, width]. Collective."""
        _, heads, tokens, width = states.shape
        if heads % self.size:
            raise StreamError(
                f"trainer.sequence_parallel={self.size}: must divide the {heads} heads"
            )
        parts = states.view(self.size, heads // self.size, tokens, width)
        received: Tensor = _AllToAll.apply(parts, self._group)
        return received.transpose(0, 1).reshape(1, heads // self.size, -1, width)

    def join_heads(self, outputs: Tensor) -> Tensor:
        """Turn [1, N, heads / size, width] into [1, N / size, heads, width]. Collective."""
        _, tokens, heads, width = outputs.shape
        parts = outputs.view(self.size, tokens // self.size, heads, width)
        received: Tensor = _AllToAll.apply(parts, self._group)
        return received.transpose(0, 1).reshape(1, -1, heads * self.size, width)


def join_sequence_group(*, world_size: int, size: int, tensor_parallel: int) -> SequenceGroup:
    """Create the sequence groups of all ranks; return this rank's. Collective.

    `size` ranks that are `tensor_parallel` apart form a group.
    """
    block, own = size * tensor_parallel, None
    for start in range(0, world_size, block):
        for offset in range(tensor_parallel):
            ranks = list(range(start + offset, start + block, tensor_parallel))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own = SequenceGroup(group)
    assert own is not None
    return own


class _AllToAll(torch.autograd.Function):
    """Part i of rank j becomes part j of rank i."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(ctx.size)]
        dist.all_gather(parts, values, group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.size, -1)[ctx.rank], None
