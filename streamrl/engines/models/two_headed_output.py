"""Output type of a two-headed model; a module of its own because transformers imports slowly."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class TwoHeadedOutput(ModelOutput):
    """Output of a policy with a value head: logits [B, T, V] and values [B, T, 1].

    A ModelOutput is a dataclass and a dict: FSDP registers its gradient hooks on dataclass fields,
    DeepSpeed on dict entries.
    """

    logits: Tensor | None = None
    state_values: Tensor | None = None
