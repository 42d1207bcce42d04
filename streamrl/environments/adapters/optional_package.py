"""Import of packages that streamrl does not require."""

import importlib
from types import ModuleType

from streamrl.errors import ConfigError


def import_optional(module: str, *, kind: str) -> ModuleType:
    """Import a module that an environment kind needs.

    Raises ConfigError that names the extra to install if the module or one of its own requirements
    is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment.kind={kind}: {error}; run pip install 'streamrl[{kind}]'"
        ) from error
