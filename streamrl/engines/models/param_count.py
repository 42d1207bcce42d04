"""Count trained parameters from config.json alone, for families with exact planner shapes.

Building a model on the meta device instead imports transformers' classes, which takes 2 s.
"""

from pathlib import Path

from streamrl.engines.models.lora_params import add_adapter_params
from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_json

COUNTED_FAMILIES = ("llama", "mistral", "qwen2")
"""Values of model_type in config.json of which `ModelShape` counts every parameter."""
BIAS_KEYS = ("attention_bias", "mlp_bias")
"""Keys in config.json that enable biases; `ModelShape` does not count these biases."""


def count_trained_params_from_config(
    model_path: str, config: TrainerConfig, *, has_output: bool, has_value: bool
) -> int | None:
    """Count the trained elements of the model in a directory, if config.json suffices for that.

    Returns None for families and biases that the planner's shapes do not cover. `has_output` and
    `has_value` say whether the trained model has an output head and a value head.
    """
    try:
        settings = read_small_json(Path(model_path) / "config.json")
        if settings.get("model_type") not in COUNTED_FAMILIES or any(
            settings.get(name) for name in BIAS_KEYS
        ):
            return None
        shape = load_model_shape(model_path)
    except (ConfigError, OSError, ValueError, AttributeError):
        return None
    shape = shape if has_output else shape.to_critic()
    shape = add_adapter_params(shape, config.lora_rank, config.lora_targets)
    # The critic's shape includes the weight of its value head but not the bias. A shared model has
    # the value head in addition to the output head.
    return (shape.adapter_params or shape.num_params) + has_value * (1 + has_output * shape.hidden)
