"""Layers of vLLM on a CPU that keep their weights as they are stored: patches of vLLM 0.32.

vLLM would pack the weights of linear layers, which takes a second copy of every weight and leaves
nothing to compare with what was published. Large linear layers use oneDNN's plain kernel instead,
which is nearly as fast as the packed one.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

#: For smaller weights torch's own kernel is as fast: oneDNN's dispatch takes some 30 us.
MIN_ONEDNN_ELEMENTS = 2**19
#: MKL has other kernels for few rows, on newer processors for up to 12; oneDNN for a single one.
MKL_ROWS, ONEDNN_ROWS = 16, 2
NUM_HEAD_AXES = 3
"""Number of dimensions of queries that have a dimension for heads: [token, head, value]."""


@contextmanager
def keep_plain_linears() -> Iterator[None]:
    """Patch vLLM 0.32 while it builds a model on a CPU, and undo the patches on exit.

    - Linear layers do not pack their weights.
    - transformers' classes, which vLLM uses for some models, are not decorated for compilation:
      the decoration would change them for the whole process, and CPUs do not compile.
    - Rotary embeddings of non-contiguous queries (DeepSeek's attention) use torch: vLLM's CPU
      kernel leaves such queries unrotated.
    """
    from vllm import _custom_ops
    from vllm.compilation import decorators
    from vllm.model_executor.layers import utils as layers
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    supports_onednn = _custom_ops._supports_onednn
    check_cpu_sgl_kernel = layers.check_cpu_sgl_kernel
    decorate = decorators._support_torch_compile
    rotate = RotaryEmbedding.forward_cpu

    def rotate_any(self: Any, positions: Tensor, query: Tensor, key: Any = None) -> Any:
        if query.dim() == NUM_HEAD_AXES and not query.is_contiguous():
            return self.forward_native(positions, query, key)
        return rotate(self, positions, query, key)

    def decorate_vllm_class(cls: type, *arguments: Any, **keywords: Any) -> type:
        is_vllm_class = cls.__module__.partition(".")[0] == "vllm"
        return decorate(cls, *arguments, **keywords) if is_vllm_class else cls

    _custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda n, k, dtype: False
    decorators._support_torch_compile = decorate_vllm_class
    # Layers bind forward_cpu when they are built, so the patch outlives this context for them.
    RotaryEmbedding.forward_cpu = rotate_any
    try:
        yield
    finally:
        _custom_ops._supports_onednn = supports_onednn
        layers.check_cpu_sgl_kernel = check_cpu_sgl_kernel
        decorators._support_torch_compile = decorate
        RotaryEmbedding.forward_cpu = rotate


def choose_linears(model: torch.nn.Module) -> None:
    """Choose the kernels of a model's linear layers, batch invariant in float32.

    A token's log-probability must not depend on which requests are decoded beside it, since that
    depends on timing; kernels for a few rows round differently.
    """
    for module in model.modules():
        if "cpu_linear" in vars(module):
            weight = module.get_parameter("weight")
            is_large = weight.numel() >= MIN_ONEDNN_ELEMENTS and _has_onednn_kernel(weight.dtype)
            linear = onednn_linear if is_large else torch.nn.functional.linear
            if weight.dtype == torch.float32:
                linear = functools.partial(pad_rows, linear, ONEDNN_ROWS if is_large else MKL_ROWS)
            vars(module)["cpu_linear"] = linear


def pad_rows(
    linear: Callable[..., Tensor], multiple: int, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Apply `linear` to x [..., B, in] padded to a multiple of rows; return [..., B, out]."""
    num_rows = x.shape[-2]
    if num_rows % multiple == 0:
        return linear(x, weight, bias)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -num_rows % multiple))
    return linear(padded, weight, bias)[..., :num_rows, :]


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x [..., in] @ weight [out, in].T + bias [out] with oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _has_onednn_kernel(dtype: torch.dtype) -> bool:
    """Return whether this build of oneDNN has a linear kernel for a dtype; many lack float16."""
    try:
        onednn_linear(torch.zeros(1, 8, dtype=dtype), torch.zeros(8, 8, dtype=dtype))
    except RuntimeError:
        return False
    return True
