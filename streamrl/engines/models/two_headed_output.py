"""What a model with two heads says. Apart from what makes one: transformers is slow to import."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class TwoHeadedOutput(ModelOutput):
    """Logits [B, T, V] and values [B, T, 1].

    Fields of a dataclass, for FSDP, which hooks on to their gradients, and entries of a dictionary,
    for DeepSpeed, which does.
    """

    logits: Tensor | None = None
    state_values: Tensor | None = None
