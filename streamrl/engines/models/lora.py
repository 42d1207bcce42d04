"""LoRA adapters on a model's linear layers (peft; arXiv 2106.09685).

Only adapters are trained and published. LoRA dropout is disabled: with it, the trained policy would
differ from the sampling policy.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from streamrl.distributed.devices import get_local_device
from streamrl.engines.models.forward import VALUE_HEADS
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError


def add_lora_adapters(module: PreTrainedModel, config: TrainerConfig) -> None:
    """Add LoRA adapters to a model; freeze all other parameters except a critic's value head.

    The B matrices start at 0, so the model's output is unchanged. Raises ConfigError as
    `find_lora_layers` does.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = find_lora_layers(module)
    settings = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=layers)
    with _replace_meta_weights([module.get_submodule(name) for name in layers]):
        # In place, so that the model keeps its class and parameter names (PeftModel would wrap it).
        inject_adapter_in_model(settings, module)
    for name, parameter in module.named_parameters():
        if name.startswith(VALUE_HEADS):
            parameter.requires_grad_(True)


@contextmanager
def _replace_meta_weights(layers: Iterable[Any]) -> Iterator[None]:
    """Give layers on the meta device weights of one element on this process's device.

    peft moves new adapters to the device of their layer; on the meta device they lose their values.
    """
    on_meta = [(layer, layer.weight) for layer in layers if layer.weight.is_meta]
    for layer, weight in on_meta:
        element = torch.empty((), dtype=weight.dtype, device=get_local_device())
        layer.weight = torch.nn.Parameter(element.expand(weight.shape))
    try:
        yield
    finally:
        for layer, weight in on_meta:
            layer.weight = weight.requires_grad_(layer.weight.requires_grad)


@contextmanager
def disable_adapters(module: PreTrainedModel) -> Iterator[None]:
    """Context in which a model computes without its LoRA adapters, if it has any."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    # peft's enable_adapters would also change which parameters have gradients.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def find_lora_layers(module: PreTrainedModel, *, section: str = "trainer") -> list[str]:
    """Return the names of the linear layers, which get LoRA adapters; heads get none.

    Raises ConfigError, naming the trainer's config section, if the model has no linear layers.
    """
    head = module.get_output_embeddings()
    linear = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
        if not f"{name}.".startswith(VALUE_HEADS)
    ]
    if not linear:
        raise ConfigError(f"{section}.lora_rank: the model has no linear layers; set it to 0")
    return linear


def count_trained_params(module: PreTrainedModel, config: TrainerConfig) -> int:
    """Count the elements of a model's trained parameters; the model may be on the meta device.

    With LoRA these are adapters and value head, otherwise all parameters; tied ones count once.
    """
    if not config.lora_rank:
        return sum(parameter.numel() for parameter in module.parameters())
    layers = [module.get_submodule(name) for name in find_lora_layers(module)]
    dims = sum(layer.in_features + layer.out_features for layer in layers)
    named = module.named_parameters()
    heads = sum(parameter.numel() for name, parameter in named if name.startswith(VALUE_HEADS))
    return config.lora_rank * dims + heads
