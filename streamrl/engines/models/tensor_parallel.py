"""Tensor parallelism of decoder layers by the plans that transformers ships with its families.

As in Megatron-LM (arXiv 1909.08053, section 3), attention heads and columns of MLPs are split over
the ranks: the first matrix of a pair by its outputs (column parallel), the second by its inputs
(row parallel), so each pair needs a single all-reduce. The experts of a mixture are not cut: each
rank has some of them, and tokens travel to the rank of their experts (expert parallelism).
Embeddings and output heads are split by the vocabulary if its size allows.
Norms, routers and value heads are replicated.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    _use_local_dtensor_params,
    apply_expert_parallelism,
    apply_tensor_parallelism,
)

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
from streamrl.errors import ConfigError


def parallelize_layers(module: PreTrainedModel, mesh: DeviceMesh, section: str) -> None:
    """Replace the parameters of `iter_split_params` by DTensors over the mesh.

    Inputs and outputs of a layer, and their gradients, stay replicated. The gradients of
    `list_shared_norms` are each rank's part, to be summed over the mesh. Raises ConfigError, naming
    the config section of the ranks, if the plan does not name the model's layers.
    """
    if next(_iter_layer_params(module), None) is None:
        setting = f"{section}.tensor_parallel={mesh.size()}"
        raise ConfigError(f"{setting}: splits nothing of {module.name_or_path}; set it to 1")
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


def list_shared_norms(module: PreTrainedModel, section: str) -> list[str]:
    """Return the names of parameters that all ranks have, each of which sees its own heads only.

    Raises ConfigError, naming the config section of the ranks, for a norm with weights of its own
    for each head.
    """
    plan, names = _get_plan_by_name(module), []
    for name, parameter in module.named_parameters():
        if _find_style(plan, name) != SHARED_NORM_STYLE and not _is_unplanned_norm(plan, name):
            continue
        if parameter.ndim > 1:
            reason = f"{name} of {module.name_or_path} has all heads; set it to 1"
            raise ConfigError(f"{section}.tensor_parallel: {reason}")
        names.append(name)
    return names


def _is_unplanned_norm(plan: Mapping[str, str], parameter_name: str) -> bool:
    """Return whether a norm of queries or keys sees a rank's heads although the plan omits it."""
    attention, _, norm = parameter_name.rpartition(".")[0].rpartition(".")
    queries = f"{attention}.q_proj.weight"
    return norm in QUERY_KEY_NORMS and _find_style(plan, queries) == COLUMN_STYLE


def _share_inputs(module: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
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

    def __init__(self, mesh: DeviceMesh, num_users: int) -> None:
        self._mesh, self._num_users = mesh, num_users
        self._input: Tensor | None = None
        self._wrapped: Any = None
        self._uses = 0

    def replace_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        if self._input is not args[0]:
            self._input, self._uses = args[0], 0
            self._wrapped = DTensor.from_local(args[0], self._mesh, [Replicate()], run_check=False)
        wrapped, self._uses = self._wrapped, self._uses + 1
        if self._uses == self._num_users:
            self._input = self._wrapped = None
        return (wrapped, *args[1:])


def iter_split_params(module: PreTrainedModel, ranks: int) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters that tensor-parallel ranks split, with the dimension that is cut.

    The parameters must be whole. Tied ones are yielded once.
    """
    yield from _iter_layer_params(module)
    yield from ((parameter, 0) for parameter in list_vocabulary_params(module, ranks))


def _iter_layer_params(module: PreTrainedModel) -> Iterator[tuple[nn.Parameter, int]]:
    plan = _get_plan_by_name(module)
    for name, parameter in module.named_parameters():
        style = _find_style(plan, name)
        if style in COLUMN_STYLES:
            yield parameter, max(0, parameter.ndim - 2)
        elif style in ROW_STYLES and parameter.ndim > 1:
            yield parameter, parameter.ndim - 1
        elif style == SPLIT_EXPERTS_STYLE:
            yield parameter, 0


def _get_plan_by_name(module: PreTrainedModel) -> dict[str, str]:
    """Return the split plan of a model by names from the model on, with * for numbers."""
    prefix = f"{module.base_model_prefix}." if module.base_model is not module else ""
    return {f"{prefix}{name}": style for name, style in get_split_plan(module.config).items()}


def _find_style(plan: Mapping[str, str], parameter_name: str) -> str | None:
    """Return the style of a parameter, which the plan names itself or by its module."""
    name = re.sub(r"\.\d+(?=\.)", ".*", parameter_name)
    return plan.get(name) or plan.get(name.rpartition(".")[0])


VOCABULARY_ROWS = "vocabulary_rows"
"""Attribute of a model with a split output head: its `VocabularyRows`."""
WHOLE_LOGITS = "whole_logits"
"""Attribute of a model: why its head cannot be cut into chunks of tokens; "" if it can."""
TRUNCATING_FAMILIES = ("inkling_text",)
"""Values of model_type in config.json whose forward cuts padding off the logits of all words."""
PLAIN_HEAD_STYLE = "colwise_gather_output"
"""transformers' style of a head whose logits are gathered, in calls that do not score tokens."""
MIN_SHIFTED_LOGIT = -1e30
"""Bound of logits less their maximum: exp is 0, products with gradients are finite."""


class VocabularyRows:
    """The rows of the vocabulary that a rank of the mesh has, `size` from `start` on."""

    def __init__(self, mesh: DeviceMesh, vocabulary: int) -> None:
        self._mesh = mesh
        self.size = vocabulary // mesh.size()
        self.start = self.size * mesh.get_local_rank()

    def apply_head(self, head: nn.Linear, inputs: Tensor) -> Tensor:
        """Return this rank's logits [N, V / ranks] of inputs [N, H].

        The gradient of the inputs is this rank's part, see `share_inputs`.
        """
        parameters: Any = head.parameters()
        return linear(inputs, *(parameter.to_local() for parameter in parameters))

    def share_inputs(self, inputs: Tensor) -> Tensor:
        """Return the head's inputs, equal on all ranks, so that their gradients are summed."""
        shared = DTensor.from_local(inputs, self._mesh, [Replicate()], run_check=False)
        return shared.to_local(grad_placements=[Partial()])

    def score(self, logits: Tensor, targets: Tensor, *, mode: str) -> tuple[Tensor, Tensor]:
        """Return logprobs of targets [N] and entropies [N]. Collective.

        logits: this rank's, float32 [N, V / ranks]. mode: "none" for entropies of 0, "collision"
        for sums of squared probabilities in their place, else "value" or "gradient".
        """
        logprobs, entropy = VocabularyParallelScores.apply(
            logits, targets - self.start, mode, self._mesh.get_group()
        )
        return logprobs, entropy

    def split_lookup(self, embedding: nn.Embedding) -> None:
        """Make an embedding of local rows look up tokens of the whole vocabulary.

        The embedding's own forward, which may scale, runs on the local rows. DTensor's lookup
        would compute the gradient of all rows on each rank.
        """
        if embedding.padding_idx is not None:
            padding_row = embedding.padding_idx - self.start
            embedding.padding_idx = padding_row if 0 <= padding_row < self.size else None
        look_up = embedding.forward

        def look_up_tokens(token_ids: Tensor) -> Tensor:
            rows = token_ids - self.start
            is_elsewhere = (rows < 0) | (rows >= self.size)
            with _use_local_dtensor_params(embedding):
                values = look_up(rows.masked_fill(is_elsewhere, 0))
            own_part = values.masked_fill(is_elsewhere[..., None], 0.0)
            parts = DTensor.from_local(own_part, self._mesh, [Partial()], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()

        vars(embedding)["forward"] = look_up_tokens


class VocabularyParallelScores(torch.autograd.Function):
    """Logprobs of targets and entropies, float32 [N], from the logits that each rank has.

    Two all-reduces in the forward pass: of maxima, and of three sums. None in the backward pass,
    since the gradients of a rank's logits need those sums only.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, mode: str, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """Score logits [N, V / ranks]; `rows` int64 [N] are the targets' local rows, if any."""
        maximum = logits.amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum[:, None]
        is_own = (rows >= 0) & (rows < logits.shape[-1])
        rows = rows.where(is_own, 0)[:, None]
        chosen = shifted.gather(-1, rows)[:, 0].where(is_own, 0.0)
        # A forbidden token has logit -inf, which would make 0 * logit NaN.
        shifted.clamp_(min=MIN_SHIFTED_LOGIT)
        exponentials = shifted.exp()
        total = exponentials.sum(-1)
        if mode == "none":
            weighted = torch.zeros_like(total)
        else:
            factors = exponentials if mode == "collision" else shifted
            weighted = exponentials.mul_(factors).sum(-1)
        sums = torch.stack((chosen, total, weighted))
        dist.all_reduce(sums, group=group)
        log_total, mean = sums[1].log(), sums[2] / sums[1]
        ctx.save_for_backward(shifted, log_total, mean, rows, is_own)
        # Without a gradient of the entropy, its half of the backward pass is skipped.
        ctx.set_materialize_grads(False)
        if mode == "collision":
            return sums[0] - log_total, mean / sums[1]
        return sums[0] - log_total, torch.zeros_like(mean) if mode == "none" else log_total - mean

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        """Apply d logprob / d logit = onehot - p and d entropy / d logit = p (mean - shifted)."""
        shifted, log_total, mean, rows, is_own = ctx.saved_tensors
        factors = -grad_logprobs[:, None]
        if grad_entropy is not None:
            factors = (mean[:, None] - shifted).mul_(grad_entropy[:, None]).add_(factors)
        grad = (shifted - log_total[:, None]).exp_().mul_(factors)
        grad.scatter_add_(-1, rows, grad_logprobs.where(is_own, 0.0)[:, None])
        return grad, None, None, None


def list_vocabulary_layers(module: PreTrainedModel, ranks: int) -> list[nn.Embedding | nn.Linear]:
    """Return the embedding and output head if their rows can be split over `ranks`.

    Without a head that can be split, the embedding alone, unless the two are tied.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    family = module.config.get_text_config().model_type
    has_head = type(head) is nn.Linear and find_head_name(module) is not None
    layers: list[nn.Embedding | nn.Linear] = []
    if isinstance(embedding, nn.Embedding):
        layers.append(embedding)
    if has_head and family not in TRUNCATING_FAMILIES:
        layers.append(head)
    is_tied = head is not None and head.weight is embedding.weight
    has_part_of_tie = is_tied and head not in layers
    if has_part_of_tie or any(len(layer.weight) % ranks for layer in layers):
        return []
    return layers


def list_vocabulary_params(module: PreTrainedModel, ranks: int) -> list[nn.Parameter]:
    """Return the parameters of `list_vocabulary_layers`, tied ones once."""
    layers = list_vocabulary_layers(module, ranks)
    return list({id(p): p for layer in layers for p in layer.parameters()}.values())


def find_head_name(module: PreTrainedModel) -> str | None:
    """Return the output head's name in a causal model; None if scoring needs whole logits.

    The latter are models of which transformers knows no head or no base, or of WHOLE_LOGITS.
    """
    if vars(module).get(WHOLE_LOGITS):
        return None
    head = module.get_output_embeddings()
    name = next((name for name, child in module.named_children() if child is head), None)
    return None if module.base_model is module else name


def split_vocabulary(module: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Replace parameters of `list_vocabulary_layers` by DTensors over the mesh; keep ties."""
    split: dict[int, nn.Parameter] = {}
    for layer in list_vocabulary_layers(module, mesh.size()):
        rows = VocabularyRows(mesh, len(layer.weight))
        for name, whole in list(layer.named_parameters(recurse=False)):
            if id(whole) not in split:
                local = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
                split[id(whole)] = nn.Parameter(local, requires_grad=whole.requires_grad)
            setattr(layer, name, split[id(whole)])
        if isinstance(layer, nn.Embedding):
            rows.split_lookup(layer)
        else:
            ALL_PARALLEL_STYLES[PLAIN_HEAD_STYLE].install_forward(layer, mesh)
            vars(module)[VOCABULARY_ROWS] = rows
