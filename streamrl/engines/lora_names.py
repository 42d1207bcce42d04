"""What trainer.lora_targets mean: layers by the ends of their names."""


def is_meant(name: str, target: str) -> bool:
    """Whether a target means the layer of this name."""
    return name == target or name.endswith(f".{target}")
