"""Run configuration: read, check, and convert to placements and planner problems."""

from streamrl.config.run_config import (
    ModelConfig,
    RunConfig,
    RunSettings,
    build_config,
    config_to_dict,
    dump_config,
    load_config,
    parse_settings,
    with_settings,
)

__all__ = [
    "ModelConfig",
    "RunConfig",
    "RunSettings",
    "build_config",
    "config_to_dict",
    "dump_config",
    "load_config",
    "parse_settings",
    "with_settings",
]
