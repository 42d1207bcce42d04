"""Decoder layers of a transformers model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def iter_layers(module: "PreTrainedModel") -> Iterator[nn.Module]:
    """Yield the layers of a model; none of a family that does not name their class."""
    layer_classes = set(module._no_split_modules or ())
    return (layer for layer in module.modules() if type(layer).__name__ in layer_classes)
