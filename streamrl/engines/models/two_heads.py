"""A policy with its critic as a second head: one body, one forward pass, one gradient.

HybridFlow's AC-share, and what trlx trains; the gradient of the values goes into the body.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamrl.engines.models.forward import (
    DEFAULT_OPTIONS,
    ModelLoadOptions,
    load_model,
    shift_right,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_two_headed_model(
    path: str, *, dtype: torch.dtype, options: ModelLoadOptions = DEFAULT_OPTIONS
) -> "PreTrainedModel":
    """The causal language model in a directory, with a value head that begins at 0.

    The head has the names it has in a critic. The body gets the gradient of both. Raises
    ConfigError as `load_model` does.
    """
    from streamrl.engines.models.two_headed_output import TwoHeadedOutput

    model = load_model(path, dtype=dtype, options=options)
    add_value_head(model, dtype=dtype)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.zero_()
    seen: list[Tensor] = []

    def note(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    def judge(module: Any, _: Any, output: Any) -> Any:
        return TwoHeadedOutput(logits=output.logits, state_values=module.score(seen.pop()))

    # What the output head is given is the body's last word, whatever the family calls its parts.
    model.get_output_embeddings().register_forward_pre_hook(note)
    model.register_forward_hook(judge)
    return model


def add_value_head(model: "PreTrainedModel", *, dtype: torch.dtype) -> None:
    """Put a value head beside the output head, where the model is."""
    width = model.config.get_text_config().hidden_size
    model.score = torch.nn.Linear(width, 1, device=model.device, dtype=dtype)


def extract_values(output: Any, attention_mask: Tensor) -> Tensor:
    """The values of a forward pass, as `compute_token_values` gives them."""
    return shift_right(output.state_values[..., 0].float(), attention_mask)
