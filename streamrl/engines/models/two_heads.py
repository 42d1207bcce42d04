"""Policy and critic as two heads of a shared transformer, trained with a single forward pass.

HybridFlow calls this AC-share (arXiv 2409.19256); trlx trains the same. The value loss also updates
the shared layers.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamrl.distributed.devices import get_local_device
from streamrl.engines.models.chunked_head import define_output_class
from streamrl.engines.models.forward import (
    DEFAULT_OPTIONS,
    ModelLoadOptions,
    load_model,
    shift_right,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_two_headed_model(
    path: str,
    *,
    dtype: torch.dtype,
    options: ModelLoadOptions = DEFAULT_OPTIONS,
    on_meta: bool = False,
) -> "PreTrainedModel":
    """Load a directory's causal language model and add a value head initialized to 0.

    The value head's parameters have the same names as those of a separate critic. `on_meta` and
    ConfigError are those of `load_model`.
    """
    make_output = define_output_class()
    model = load_model(path, dtype=dtype, options=options, on_meta=on_meta)
    add_value_head(model, dtype=dtype, device=get_local_device())
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.zero_()
    hidden_states: list[Tensor] = []

    def save_hidden(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        hidden_states.append(inputs[0])

    def add_values(module: Any, _: Any, output: Any) -> Any:
        results = {name: output.get(name) for name in ("logits", "scores")}
        return make_output(**results, state_values=module.score(hidden_states.pop()))

    # The output head's input is the last hidden state in every family, whatever its modules' names.
    model.get_output_embeddings().register_forward_pre_hook(save_hidden)
    model.register_forward_hook(add_values)
    return model


def add_value_head(
    model: "PreTrainedModel", *, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Add a randomly initialized value head, a scalar per token, on `device` or the model's."""
    width = model.config.get_text_config().hidden_size
    model.score = torch.nn.Linear(width, 1, device=device or model.device, dtype=dtype)


def extract_values(output: Any, attention_mask: Tensor) -> Tensor:
    """Return the values [B, T] of a two-headed model's output; 0 at position 0 and in the padding.

    As in `compute_token_values`, position t has the value of the state before token t.
    """
    return shift_right(output.state_values, attention_mask)
