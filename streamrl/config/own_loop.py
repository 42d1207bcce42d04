"""Config of the workers of an own loop."""

from dataclasses import replace

from streamrl.config.role_counts import with_placement_mode
from streamrl.config.run_config import RunConfig
from streamrl.errors import ConfigError


def set_world_size(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config with trainer.world_size set to a number of ranks.

    Sets the critic's world size too if the config has one.
    """
    trainer, critic = replace(config.trainer, world_size=ranks), config.critic
    if "world_size" in critic.trainer:
        critic = replace(critic, trainer={**critic.trainer, "world_size": ranks})
    return replace(config, trainer=trainer, critic=critic)


def make_loop_config(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config of PolicyWorkers on `ranks` ranks: each worker trains and samples.

    Raises ConfigError for settings that have no effect in an own loop or are not supported there.
    """
    mode, tensor_parallel = config.placement.mode, config.generator.tensor_parallel
    every = config.reference.every
    fixed_settings = (
        ("filter.kind", config.filter.kind, "none", "filters no groups"),
        ("reference.every", every, 0, "has a fixed reference"),
        ("generator.tensor_parallel", tensor_parallel, 1, "has a whole generator in each worker"),
    )
    for key, value, required, reason in fixed_settings:
        if value != required:
            raise ConfigError(f"{key}={value}: an own loop {reason}; must be {required}")
    if config.environment.is_enabled:
        raise ConfigError(f"{config.environment.settings_text}: an own loop samples single turns")
    if mode not in ("auto", "colocated"):
        raise ConfigError(
            f"placement.mode={mode}: in an own loop the policy's workers both train and"
            " generate; must be auto or colocated"
        )
    return with_placement_mode(set_world_size(config, ranks), "colocated")
