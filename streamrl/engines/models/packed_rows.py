"""Rows of a micro-batch packed one after another, without padding.

Attention is the only layer of a decoder in which tokens meet. The function `attend_packed_rows`,
registered with transformers, runs it within each row; all other layers and the head see the tokens
of all rows as a single row, [1, N], whose positions restart with each row.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention import varlen
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GenericForSequenceClassification

from streamrl.errors import ConfigError, StreamError


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
        """Turn [1, heads, N / size, width] into [1, heads / size, N, width]. Collective.

        `check_trainer_split` has refused sizes that do not divide the heads.
        """
        _, heads, tokens, width = states.shape
        parts = states.view(self.size, heads // self.size, tokens, width)
        received = _all_to_all(parts, self._group)
        return received.transpose(0, 1).reshape(1, heads // self.size, -1, width)

    def join_heads(self, outputs: Tensor) -> Tensor:
        """Turn [1, N, heads / size, width] into [1, N / size, heads, width]. Collective."""
        _, tokens, heads, width = outputs.shape
        parts = outputs.view(self.size, tokens // self.size, heads, width)
        received = _all_to_all(parts, self._group)
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


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange parts: part i of rank j becomes part j of rank i, and back in the gradient."""
    received: Tensor = all_to_all_single_autograd(parts.contiguous(), None, None, group)
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


PACKED_ATTENTION = "packed_sdpa"
"""transformers' name of `attend_packed_rows`, in place of sdpa."""
PACKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers, by `layer_types` in config.json, that `attend_packed_rows` keeps to a row."""
DROPPING_FAMILIES = ("nemotron",)
"""Values of model_type in config.json whose layers do not pass arguments on to attention."""
WINDOW_DROPPING_FAMILIES = ("phimoe", "qwen2_moe")
"""Values of model_type whose layers know of their sliding window only by the attention mask."""
_IS_PACKED = ContextVar("is_packed", default=False)
"""Whether a forward pass of packed rows is under way."""
SEQUENCE_GROUP = "sequence_group"
"""Attribute of a model whose tokens a group of ranks shares."""
MAX_KERNEL_HEAD = 256
"""Largest head, in elements, of torch's variable-length attention."""


class RowBounds:
    """Lengths of packed rows, an argument that the model passes on to its attention layers.

    offsets: first token of each row, and the end of the last, int32 [B + 1], on the model's device.
    group: ranks that share the tokens; None if this rank has all. is_used: whether an attention
    layer has received this object. No dataclass: FSDP2 hands a copy of dataclasses to the model.
    """

    def __init__(self, lengths: Tensor, group: SequenceGroup | None) -> None:
        self.group = group
        self.lengths: list[int] = lengths.tolist()
        self.offsets = pad(lengths.cumsum(0), (1, 0)).int()
        self.is_used = False


class RowLayout:
    """Arrangement of right-padded rows, [B, T], for a forward pass of a model.

    Packed if there is padding and the model's rows can be packed, see `explain_padding`. Always
    packed, and then this rank's part, if ranks share the tokens.

    token_ids, next_token_ids: int64 [1, N], packed, or [B, T]. The token after the last of a row is
    meaningless.
    """

    def __init__(
        self, model: Callable[..., Any], token_ids: Tensor, attention_mask: Tensor
    ) -> None:
        """Arrange `token_ids` int64 [B, T]; `attention_mask` bool [B, T] is False for padding.

        `model` is a transformers model or a DeepSpeed engine of one.
        """
        self.token_ids, self.next_token_ids = token_ids, token_ids.roll(-1, dims=1)
        self._model = model
        self._bounds: RowBounds | None = None
        module = unwrap_engine(model)
        self._group: SequenceGroup | None = vars(module).get(SEQUENCE_GROUP)
        if module.config._attn_implementation != PACKED_ATTENTION:
            return
        # One attention call for all rows costs 4 % less than one each.
        if self._group is None and attention_mask.all():
            return
        # A model cannot compute without tokens, so a row keeps a token even if all are padding.
        lengths = attention_mask.sum(-1).clamp(min=1)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        self._mask = positions < lengths[:, None]
        self.token_ids = token_ids[self._mask][None]
        self._positions = positions.expand_as(token_ids)[self._mask][None]
        if self._group is not None:
            lengths = self._share_tokens(self._group, lengths)
        else:
            self.next_token_ids = self.token_ids.roll(-1, dims=1)
        self._bounds = RowBounds(lengths, self._group)

    def _share_tokens(self, group: SequenceGroup, lengths: Tensor) -> Tensor:
        """Keep this rank's part of the packed tokens; return the lengths of all rows.

        Tokens that make the parts equal are a row of their own.
        """
        self._num_tokens = self.token_ids.shape[1]
        extra = -self._num_tokens % group.size
        ids = pad(self.token_ids, (0, extra))
        added = torch.arange(extra, device=ids.device)[None]
        self._positions = group.select_own(torch.cat((self._positions, added), dim=1))
        self.token_ids, self.next_token_ids = map(group.select_own, (ids, ids.roll(-1, dims=1)))
        return torch.cat((lengths, lengths.new_full((min(extra, 1),), extra)))

    def arrange(self, values: Tensor) -> Tensor:
        """Return values of the tokens, [B, T, ...], in the order of `token_ids`."""
        if self._bounds is None:
            return values
        values = values[self._mask][None]
        if self._group is None:
            return values
        extra = values.new_zeros(1, -self._num_tokens % self._group.size, *values.shape[2:])
        parts = torch.cat((values, extra), dim=1).chunk(self._group.size, 1)
        return parts[self._group.rank]

    def run_model(self) -> Any:
        """Return the model's output for the rows.

        Without packing there is no attention mask: tokens never attend to later positions, so
        padding on the right does not affect them, and the causal kernel skips the masked pairs.
        """
        if self._bounds is None:
            return self._model(input_ids=self.token_ids, use_cache=False)
        token = _IS_PACKED.set(True)
        try:
            output = self._model(
                input_ids=self.token_ids,
                position_ids=self._positions,
                packed_rows=self._bounds,
                use_cache=False,
            )
        finally:
            _IS_PACKED.reset(token)
        if not self._bounds.is_used:
            raise StreamError(
                "the model's layers drop arguments of attention, so that packed rows would see each"
                " other; set trainer.attention=eager to pad them"
            )
        return output

    def restore(self, values: Tensor) -> Tensor:
        """Return per-token values of the output, [..., 1, N] if packed, as [..., B, T].

        Collective if ranks share the tokens.
        """
        if self._bounds is None:
            return values
        if self._group is not None:
            values = self._group.gather_tokens(values)[..., : self._num_tokens]
        mask = self._mask.expand(*values.shape[:-2], *self._mask.shape)
        return values.new_zeros(mask.shape).masked_scatter(mask, values)


def unwrap_engine(model: Callable[..., Any]) -> Any:
    """Return the transformers model of a DeepSpeed engine, or the model itself."""
    return model.module if hasattr(model, "module") else model


def explain_padding(model_class: type[PreTrainedModel], config: Any, attention: str) -> str:
    """Explain why rows of a model cannot be packed; "" if they can.

    `attention` is transformers' name of the model's attention function.
    """
    text_config = config.get_text_config()
    mixing = set(text_config.to_dict().get("layer_types") or ()) - PACKED_LAYER_TYPES
    rules = {
        "it is a model of more than text": config is not text_config,
        "its layers keep a state from token to token": model_class._is_stateful,
        f"its layers of type {', '.join(sorted(mixing))} mix tokens": bool(mixing),
        "its attention cannot be replaced by one without a mask": not (
            model_class._supports_attention_backend and model_class._supports_flash_attn
        ),
        "its layers drop arguments of attention": config.model_type in DROPPING_FAMILIES,
        "its layers do not pass on their sliding window": (
            config.model_type in WINDOW_DROPPING_FAMILIES
            and bool(config.to_dict().get("sliding_window"))
        ),
        "its head reads whole rows": (
            model_class.__name__.endswith("ForSequenceClassification")
            and not issubclass(model_class, GenericForSequenceClassification)
        ),
        f"its attention function, {attention}, is not sdpa": attention != "sdpa",
    }
    return next((reason for reason, applies in rules.items() if applies), "")


def enable_packing(model: PreTrainedModel) -> None:
    """Make `RowLayout` pack rows of the model, unless `explain_padding` has a reason against it."""
    if not explain_padding(type(model), model.config, model.config._attn_implementation):
        AttentionInterface.register(PACKED_ATTENTION, attend_packed_rows)
        AttentionMaskInterface.register(PACKED_ATTENTION, _make_mask)
        model.set_attn_implementation(PACKED_ATTENTION)


def share_tokens(model: PreTrainedModel, group: SequenceGroup) -> None:
    """Make the ranks of a group share the tokens of each forward pass of the model.

    Raises ConfigError if the model's rows cannot be packed.
    """
    if (attention := model.config._attn_implementation) != PACKED_ATTENTION:
        reason = explain_padding(type(model), model.config, attention)
        raise ConfigError(f"sequence_parallel={group.size}: needs packed rows, but {reason}")
    vars(model)[SEQUENCE_GROUP] = group


def _make_mask(**kwargs: Any) -> Tensor | None:
    """Return transformers' mask for sdpa; None for packed rows, whose attention needs none."""
    return None if _IS_PACKED.get() else sdpa_mask(**kwargs)


def attend_packed_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: RowBounds | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed row, causally; return [B, T, heads, size of a value].

    Without `packed_rows` this is transformers' function for sdpa. query, key, value: [B, heads, T,
    size]. Collective if ranks share the tokens.
    """
    if packed_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    packed_rows.is_used = True
    group = packed_rows.group
    if group is not None:
        query, key, value = map(group.split_heads, (query, key, value))
    if _fits_kernel(query):
        output = _run_kernel(query, key, value, packed_rows, **kwargs)
    else:
        # Splits have one backward operation for all rows; slices would have one of size N each.
        splits = (states.split(packed_rows.lengths, 2) for states in (query, key, value))
        outputs = []
        for row in zip(*splits, strict=True):
            window = _make_window(row[0], kwargs.get("sliding_window"))
            outputs.append(sdpa_attention_forward(module, *row, window, **kwargs)[0])
        output = torch.cat(outputs, dim=1)
    return (output if group is None else group.join_heads(output)), None


def _make_window(query: Tensor, sliding_window: int | None) -> Tensor | None:
    """Return the causal mask of a row longer than its window, bool [T, T]; None for others."""
    length = query.shape[2]
    if not sliding_window or length <= sliding_window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return seen.triu(1 - sliding_window)[None, None]


def _fits_kernel(query: Tensor) -> bool:
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and query.shape[-1] <= MAX_KERNEL_HEAD


def _run_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_rows: RowBounds,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """Attend within all rows with torch's flash attention for rows of different lengths."""
    size, value_size = query.shape[-1], value.shape[-1]
    longest = max(packed_rows.lengths)
    query, key, value = (
        x[0].transpose(0, 1) for x in (query, key, pad(value, (0, size - value_size)))
    )
    output: Any = varlen.varlen_attn(
        query,
        key,
        value,
        packed_rows.offsets,
        packed_rows.offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        enable_gqa=True,
    )
    return output[None, ..., :value_size]
