"""LoRA: pairs of small matrices are trained in place of a model's linear layers (peft).

What is trained, the optimizer's state and what travels shrink to them. There is no dropout: the
policy that is trained would be another one than the policy that sampled.
"""

from typing import TYPE_CHECKING

import torch

from streamrl.engines.models.forward import VALUE_HEAD_PREFIX, load_skeleton
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.placement.lora_params import is_lora_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_lora_adapters(module: "PreTrainedModel", config: TrainerConfig) -> None:
    """Freeze all of the model but new adapters, and a critic's value head, which is trained whole.

    Half of each adapter starts at 0, so nothing is changed yet. Raises ConfigError as
    `find_lora_layers` does.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = find_lora_layers(module, config)
    settings = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=layers)
    # In place: the model stays one of its own class, with its own names.
    inject_adapter_in_model(settings, module)
    for name, parameter in module.named_parameters():
        if name.startswith(VALUE_HEAD_PREFIX):
            parameter.requires_grad_(True)


def find_lora_layers(
    module: "PreTrainedModel", config: TrainerConfig, *, section: str = "trainer"
) -> list[str]:
    """The names of the linear layers that the settings of a section mean, heads left out.

    Raises ConfigError if a target means none of them, or there are none.
    """
    head = module.get_output_embeddings()
    linear = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
        if not f"{name}.".startswith(VALUE_HEAD_PREFIX)
    ]
    if not linear:
        raise ConfigError(f"{section}.lora_rank={config.lora_rank}: the model has no linear layers")
    for target in config.lora_targets:
        if not any(is_lora_target(name, target) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(
                f"{section}.lora_targets={config.lora_targets}: {target} must be a linear"
                f" layer of the model, which has {known}"
            )
    targets = config.lora_targets or linear
    return [name for name in linear if any(is_lora_target(name, target) for target in targets)]


def count_trained_params(module: "PreTrainedModel", config: TrainerConfig) -> int:
    """Elements that are trained of a model, which may be on the meta device, each of them once.

    They are all of it, or adapters and what is trained whole beside them.
    """
    if not config.lora_rank:
        return sum(parameter.numel() for parameter in module.parameters())
    layers = [module.get_submodule(name) for name in find_lora_layers(module, config)]
    ends = sum(layer.in_features + layer.out_features for layer in layers)
    named = module.named_parameters()
    heads = sum(
        parameter.numel() for name, parameter in named if name.startswith(VALUE_HEAD_PREFIX)
    )
    return config.lora_rank * ends + heads


def check_lora_targets(model_path: str, config: TrainerConfig, *, section: str) -> None:
    """Raise ConfigError if the model in a directory has no such layers, or none at all."""
    if config.lora_rank:
        find_lora_layers(load_skeleton(model_path), config, section=section)
