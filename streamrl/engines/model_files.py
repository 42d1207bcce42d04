"""A trained model on its way to the disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from streamrl.data import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_model(
    directory: Path,
    module: "PreTrainedModel",
    parameters: Mapping[str, Tensor],
    *,
    tokenizer_from: str,
) -> None:
    """Write a Hugging Face directory: these parameters, the module's buffers, and a tokenizer."""
    # Its state has no buffers that are computed anew, as those of rotary embeddings are.
    own, buffers = module.state_dict(), dict(module.named_buffers())
    state = {**parameters, **{name: own[name].cpu() for name in own.keys() & buffers.keys()}}
    module.save_pretrained(directory, state_dict=state)
    load_tokenizer(tokenizer_from).save_pretrained(directory)
