"""Import of packages that streamrl does not require."""

import importlib
from types import ModuleType

from streamrl.errors import ConfigError


def import_optional(module: str, *, setting: str, extra: str) -> ModuleType:
    """Import a module that imports a package which an extra of streamrl installs.

    setting: setting that needs it, as key=value. Raises ConfigError that names the extra if the
    package, or what the module takes from it, is missing; the error of an import within streamrl
    stays as it is.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").startswith("streamrl"):
            raise
        raise ConfigError(f"{setting}: {error}; run pip install 'streamrl[{extra}]'") from error
