"""The configuration of a run: read, checked, and turned into placements and planner problems."""

from streamrl.config.run_config import (
    ModelConfig,
    RunConfig,
    RunSettings,
    configure,
    dump_config,
    load_config,
    resolve,
    to_dict,
    with_settings,
)

__all__ = [
    "ModelConfig",
    "RunConfig",
    "RunSettings",
    "configure",
    "dump_config",
    "load_config",
    "resolve",
    "to_dict",
    "with_settings",
]
