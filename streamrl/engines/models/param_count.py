"""How many parameters of a model are trained, by its config alone.

Of families that the planner's sizes count to the last one. To build any other without weights takes
the classes of all models: two seconds of a process that has no model.
"""

from pathlib import Path

from streamrl.engines.models.tensor_parallel_support import FAMILIES
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_json
from streamrl.placement.lora_params import adapted
from streamrl.placement.model_shapes import shape_of

BIASES = ("attention_bias", "mlp_bias")
"""Those that some models of these families have, and sizes do not count."""


def num_trained_of(
    model_path: str, config: TrainerConfig, *, has_output: bool, has_value: bool
) -> int | None:
    """Elements that are trained of the model in a directory, each of them once; None of others.

    It has an output head, a value head, or both.
    """
    try:
        known = read_small_json(Path(model_path) / "config.json")
        if known.get("model_type") not in FAMILIES or any(known.get(name) for name in BIASES):
            return None
        shape = shape_of(model_path)
    except (ConfigError, OSError, ValueError, AttributeError):
        return None
    shape = shape if has_output else shape.critic()
    shape = adapted(shape, config.lora_rank, config.lora_targets)
    # A value head has a bias, and comes on top where it is beside the other one.
    return (shape.trained or shape.params) + has_value * (1 + has_output * shape.hidden)
