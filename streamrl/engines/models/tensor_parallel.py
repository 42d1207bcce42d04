"""Tensor parallelism of decoder layers by the plans that transformers ships with its families.

As in Megatron-LM (arXiv 1909.08053, section 3), attention heads and columns of MLPs are split over
the ranks: the first matrix of a pair by its outputs (column parallel), the second by its inputs
(row parallel), so each pair needs a single all-reduce. The experts of a mixture are not cut: each
rank has some of them, and tokens travel to the rank of their experts (expert parallelism).
Embeddings and output heads are split by the vocabulary (`vocabulary_parallel`) if its size allows.
Norms, routers and value heads are replicated.

DTensor's import is slow, so it happens in the functions that split layers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from streamrl.engines.models.tensor_parallel_support import (
    COLUMN_STYLE,
    COLUMN_STYLES,
    EXPERT_STYLES,
    QUERY_KEY_NORMS,
    ROW_STYLES,
    SHARED_NORM_STYLE,
    SPLIT_EXPERTS_STYLE,
    get_split_plan,
)
from streamrl.engines.models.vocabulary_parallel import list_vocabulary_params, split_vocabulary
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def parallelize_layers(module: "PreTrainedModel", mesh: "DeviceMesh") -> None:
    """Replace the parameters of `iter_split_params` by DTensors over the mesh.

    Inputs and outputs of a layer, and their gradients, stay replicated. The gradients of
    `list_shared_norms` are each rank's part, to be summed over the mesh. Raises ConfigError if the
    plan does not name the model's layers.
    """
    from transformers.distributed.tensor_parallel import (
        apply_expert_parallelism,
        apply_tensor_parallelism,
    )

    if next(_iter_layer_params(module), None) is None:
        name = type(module).__name__
        raise ConfigError(f"trainer.tensor_parallel={mesh.size()}: no layer of {name} is split")
    plan = _get_plan_by_name(module)
    experts = {name: style for name, style in plan.items() if style in EXPERT_STYLES}
    # transformers sums gradients of shared norms in every backward pass, and so those of earlier
    # micro-batches again.
    dense = plan.items() - experts.items()
    apply_tensor_parallelism(
        module, mesh, {name: style for name, style in dense if style != SHARED_NORM_STYLE}
    )
    apply_expert_parallelism(module, mesh, mesh, experts)
    _share_inputs(module, mesh, plan)
    split_vocabulary(module, mesh)


def list_shared_norms(module: "PreTrainedModel") -> list[str]:
    """Return the names of parameters that all ranks have, each of which sees its own heads only.

    Raises ConfigError for a norm with weights of its own for each head.
    """
    plan, names = _get_plan_by_name(module), []
    for name, parameter in module.named_parameters():
        if _find_style(plan, name) != SHARED_NORM_STYLE and not _is_unplanned_norm(plan, name):
            continue
        if parameter.ndim > 1:
            raise ConfigError(f"trainer.tensor_parallel: cannot split {name}, which has all heads")
        names.append(name)
    return names


def _is_unplanned_norm(plan: Mapping[str, str], parameter_name: str) -> bool:
    """Return whether a norm of queries or keys sees a rank's heads although the plan omits it."""
    attention, _, norm = parameter_name.rpartition(".")[0].rpartition(".")
    queries = f"{attention}.q_proj.weight"
    return norm in QUERY_KEY_NORMS and _find_style(plan, queries) == COLUMN_STYLE


def _share_inputs(module: "PreTrainedModel", mesh: "DeviceMesh", plan: Mapping[str, str]) -> None:
    """Make matrices of a layer with the same input, such as q, k and v, share its DTensor.

    Autograd then sums the input's gradients before a single all-reduce.
    """
    siblings = defaultdict(list)
    for name, child in module.named_modules():
        if _find_style(plan, f"{name}.weight") == COLUMN_STYLE and isinstance(child, nn.Linear):
            siblings[name.rpartition(".")[0]].append(child)
    for children in siblings.values():
        shared = _SharedInput(mesh, len(children))
        for child in children:
            child.register_forward_pre_hook(shared.replace_input)


class _SharedInput:
    """Wraps an input of several modules once; forgets it after the last of them."""

    def __init__(self, mesh: "DeviceMesh", num_users: int) -> None:
        self._mesh, self._num_users = mesh, num_users
        self._input: Tensor | None = None
        self._wrapped: Any = None
        self._uses = 0

    def replace_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor, Replicate

        if self._input is not args[0]:
            self._input, self._uses = args[0], 0
            self._wrapped = DTensor.from_local(args[0], self._mesh, [Replicate()], run_check=False)
        wrapped, self._uses = self._wrapped, self._uses + 1
        if self._uses == self._num_users:
            self._input = self._wrapped = None
        return (wrapped, *args[1:])


def iter_split_params(module: "PreTrainedModel", ranks: int) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters that tensor-parallel ranks split, with the dimension that is cut.

    The parameters must be whole. Tied ones are yielded once.
    """
    yield from _iter_layer_params(module)
    yield from ((parameter, 0) for parameter in list_vocabulary_params(module, ranks))


def _iter_layer_params(module: "PreTrainedModel") -> Iterator[tuple[nn.Parameter, int]]:
    plan = _get_plan_by_name(module)
    for name, parameter in module.named_parameters():
        style = _find_style(plan, name)
        if style in COLUMN_STYLES:
            yield parameter, max(0, parameter.ndim - 2)
        elif style in ROW_STYLES and parameter.ndim > 1:
            yield parameter, parameter.ndim - 1
        elif style == SPLIT_EXPERTS_STYLE:
            yield parameter, 0


def _get_plan_by_name(module: "PreTrainedModel") -> dict[str, str]:
    """Return the split plan of a model by names from the model on, with * for numbers."""
    prefix = f"{module.base_model_prefix}." if module.base_model is not module else ""
    return {f"{prefix}{name}": style for name, style in get_split_plan(module.config).items()}


def _find_style(plan: Mapping[str, str], parameter_name: str) -> str | None:
    """Return the style of a parameter, which the plan names itself or by its module."""
    name = re.sub(r"\.\d+(?=\.)", ".*", parameter_name)
    return plan.get(name) or plan.get(name.rpartition(".")[0])
