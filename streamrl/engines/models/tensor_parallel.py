"""Tensor parallelism of decoder layers, as in Megatron-LM (arXiv 1909.08053, section 3).

Attention heads and MLP columns are split over the ranks. Matrices come in pairs: the first is split
by its outputs (column parallel), the second by its inputs (row parallel), so each pair needs a
single all-reduce. Embeddings, norms and heads are replicated.

DTensor's import is slow, so it happens in the functions that split layers.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel.style import ParallelStyle
    from transformers import PreTrainedModel

COLUMN_PARALLEL = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")


def parallelize_layers(module: "PreTrainedModel", mesh: "DeviceMesh") -> None:
    """Replace the weight matrices of every decoder layer by DTensors split over the mesh.

    Inputs and outputs of a layer, and their gradients, stay replicated.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    for layer in iter_layers(module):
        parallelize_module(layer, mesh, _make_parallelize_plan())


def iter_parallel_params(
    layer: nn.Module, names: Sequence[str] = (*COLUMN_PARALLEL, *ROW_PARALLEL)
) -> Iterator[nn.Parameter]:
    """Yield the parameters of the split submodules `names` of a decoder layer, all by default.

    Includes biases of row-parallel submodules although those are replicated; they are negligible.
    """
    for name in names:
        yield from layer.get_submodule(name).parameters()


def iter_layers(module: "PreTrainedModel") -> Iterator[nn.Module]:
    layer_classes = set(module._no_split_modules or ())
    return (layer for layer in module.modules() if type(layer).__name__ in layer_classes)


def _make_parallelize_plan() -> "dict[str, ParallelStyle]":
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
    )

    replicate = Replicate()
    return {
        # Prepare the input once for q, k and v (gate and up): autograd then sums their input
        # gradients before a single all-reduce.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": replicate},
            desired_input_kwarg_layouts={"hidden_states": replicate},
        ),
        "mlp": PrepareModuleInput(input_layouts=(replicate,), desired_input_layouts=(replicate,)),
        **{name: ColwiseParallel() for name in COLUMN_PARALLEL},
        **{name: RowwiseParallel() for name in ROW_PARALLEL},
    }
