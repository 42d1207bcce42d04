"""Gradients of functions of tokens that the backward pass computes again, chunk by chunk."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def compute_chunk_gradients(
    chunks: Iterable[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]],
    grad_inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> list[Tensor | None]:
    """Run each chunk forward and backward; return the gradients of `parameters`.

    `chunks` are (function, inputs, gradient of the function's output); `grad_inputs` receive the
    gradients of the inputs. Gradients of parameters are summed in float32 and returned in their
    dtype, None for frozen ones.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    totals = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
    for (run, inputs, grad_outputs), grad_chunk in zip(chunks, grad_inputs, strict=True):
        leaf = inputs.detach().requires_grad_()
        with torch.enable_grad():
            outputs = run(leaf)
        grads = torch.autograd.grad(outputs, (leaf, *trained), grad_outputs)
        del outputs
        grad_chunk.copy_(grads[0])
        for total, grad in zip(totals, grads[1:], strict=True):
            total += grad
    sums = {id(p): total.to(p.dtype) for p, total in zip(trained, totals, strict=True)}
    return [sums.get(id(parameter)) for parameter in parameters]
