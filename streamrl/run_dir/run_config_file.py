"""Config file of a run directory, by which every command recognizes one."""

import os
from pathlib import Path

from streamrl.errors import ConfigError

CONFIG_FILE = "config.yaml"


def check_run_dir(path: Path) -> Path:
    """Return the config file of a run directory. Raises ConfigError for any other path."""
    file = path / CONFIG_FILE
    if not os.path.isfile(file):
        reason = "not a directory" if os.path.exists(path) else "no such directory"
        if os.path.isdir(path):
            reason = f"holds no {CONFIG_FILE}"
        raise ConfigError(f"{path}: not a run directory: {reason}")
    return file
