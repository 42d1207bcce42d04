"""LoRA adapters on a model's linear layers (peft; arXiv 2106.09685).

Only adapters are trained and published. LoRA dropout is disabled: with it, the trained policy would
differ from the sampling policy.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from streamrl.distributed.devices import get_local_device
from streamrl.engines.models.forward import VALUE_HEADS, load_skeleton
from streamrl.engines.models.model_shapes import is_lora_target
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_lora_adapters(module: "PreTrainedModel", config: TrainerConfig) -> None:
    """Add LoRA adapters to a model; freeze all other parameters except a critic's value head.

    The B matrices start at 0, so the model's output is unchanged. Raises ConfigError as
    `find_lora_layers` does.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = find_lora_layers(module, config)
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


def find_lora_layers(
    module: "PreTrainedModel", config: TrainerConfig, *, section: str = "trainer"
) -> list[str]:
    """Return the names of the linear layers that get LoRA adapters; heads get none.

    The names in `lora_targets` select the layers, all layers if empty. Raises ConfigError if a
    target matches no layer or the model has no linear layers. `section` is the config section that
    error messages name.
    """
    head = module.get_output_embeddings()
    linear = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
        if not f"{name}.".startswith(VALUE_HEADS)
    ]
    if not linear:
        raise ConfigError(f"{section}.lora_rank={config.lora_rank}: the model has no linear layers")
    for target in config.lora_targets:
        if not any(is_lora_target(name, target) for name in linear):
            layer_names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(
                f"{section}.lora_targets={config.lora_targets}: {target} must name a linear"
                f" layer of the model, which has {layer_names}"
            )
    targets = config.lora_targets or linear
    return [name for name in linear if any(is_lora_target(name, target) for target in targets)]


def count_trained_params(module: "PreTrainedModel", config: TrainerConfig) -> int:
    """Count the elements of a model's trained parameters; the model may be on the meta device.

    With LoRA these are adapters and value head, otherwise all parameters; tied ones count once.
    """
    if not config.lora_rank:
        return sum(parameter.numel() for parameter in module.parameters())
    layers = [module.get_submodule(name) for name in find_lora_layers(module, config)]
    dims = sum(layer.in_features + layer.out_features for layer in layers)
    named = module.named_parameters()
    heads = sum(parameter.numel() for name, parameter in named if name.startswith(VALUE_HEADS))
    return config.lora_rank * dims + heads


def check_lora_targets(model_path: str, config: TrainerConfig, *, section: str) -> None:
    """Raise ConfigError if a name in `lora_targets` matches no linear layer of the model.

    Does nothing without LoRA. `section` is the config section that error messages name.
    """
    if config.lora_rank:
        find_lora_layers(load_skeleton(model_path), config, section=section)
