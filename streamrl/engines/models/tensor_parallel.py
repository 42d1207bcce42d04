"""Which matrices of a model are split over tensor-parallel ranks, and along which dimension.

Attention heads and columns of the MLP are shared out: matrices come in pairs, the first cut by its
outputs and the second by its inputs, so that activations are summed over the ranks once per pair.
Embeddings, norms and heads are whole on every rank. Source: Shoeybi et al. 2019 (Megatron-LM),
section 3.

DTensor is imported where layers are split: it takes longer than all else that is needed to ask
which matrices those are.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel.style import ParallelStyle
    from transformers import PreTrainedModel

COLUMN_PARALLEL = (
    *(f"self_attn.{name}_proj" for name in "qkv"),
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")


def parallelize_layers(module: "PreTrainedModel", mesh: "DeviceMesh") -> None:
    """Leave each rank of the mesh its part of every layer, which is what it computes.

    What goes into a layer and comes out of it is whole on every rank, as are its gradients.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    for layer in iter_layers(module):
        parallelize_module(layer, mesh, _make_parallelize_plan())


def iter_parallel_params(
    layer: nn.Module, cut: Sequence[str] = (*COLUMN_PARALLEL, *ROW_PARALLEL)
) -> Iterator[nn.Parameter]:
    """What of a layer is cut; a few biases that stay whole are counted with it."""
    for name in cut:
        yield from layer.get_submodule(name).parameters()


def iter_layers(module: "PreTrainedModel") -> Iterator[nn.Module]:
    """The blocks a model is a stack of."""
    blocks = set(module._no_split_modules or ())
    return (part for part in module.modules() if type(part).__name__ in blocks)


def _make_parallelize_plan() -> "dict[str, ParallelStyle]":
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
    )

    whole = Replicate()
    return {
        # Once for all that read it, so that their gradients are added up before they travel.
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        **{name: ColwiseParallel() for name in COLUMN_PARALLEL},
        **{name: RowwiseParallel() for name in ROW_PARALLEL},
    }
