"""How many parameters of a model are trained, by its config alone.

Of families that the planner's sizes count to the last one. To build any other without weights takes
the classes of all models: two seconds of a process that has no model.
"""

from pathlib import Path

from streamrl.engines.models.tensor_parallel_support import TENSOR_PARALLEL_FAMILIES
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_json
from streamrl.placement.lora_params import add_lora_adapters
from streamrl.placement.model_shapes import load_model_shape

BIAS_KEYS = ("attention_bias", "mlp_bias")
"""Those that some models of these families have, and sizes do not count."""


def count_trained_params_from_config(
    model_path: str, config: TrainerConfig, *, has_output: bool, has_value: bool
) -> int | None:
    """Elements that are trained of the model in a directory, each of them once; None of others.

    It has an output head, a value head, or both.
    """
    try:
        known = read_small_json(Path(model_path) / "config.json")
        if known.get("model_type") not in TENSOR_PARALLEL_FAMILIES or any(
            known.get(name) for name in BIAS_KEYS
        ):
            return None
        shape = load_model_shape(model_path)
    except (ConfigError, OSError, ValueError, AttributeError):
        return None
    shape = shape if has_output else shape.to_critic()
    shape = add_lora_adapters(shape, config.lora_rank, config.lora_targets)
    # A value head has a bias, and comes on top where it is beside the other one.
    return (shape.adapter_params or shape.num_params) + has_value * (1 + has_output * shape.hidden)
