"""Kinds of environments: a class of the user, and adapters of other packages' environments.

An adapter is a class of the same shape as a user's: `reset` and `step`, or tools. Its constructor
takes `environment.options` as keyword arguments and runs once per episode. A classmethod
`check_options(**options)`, called once when a host process loads the class, may raise ConfigError:
for a package that is not installed, with the extra to install, or a value that it refuses. Adapters
import their package inside functions, which run in host processes only.
"""

from collections.abc import Mapping

CLASS_KIND = "class"
"""Kind of an environment whose class is in a file of the user."""
_ADAPTERS = "streamrl.environments.adapters"
ADAPTER_CLASSES: Mapping[str, str] = {
    "gymnasium": f"{_ADAPTERS}.gymnasium:GymnasiumEnvironment",
    "textarena": f"{_ADAPTERS}.textarena:TextArenaEnvironment",
    "textworld": f"{_ADAPTERS}.textworld:TextWorldEnvironment",
    "openenv": f"{_ADAPTERS}.openenv:OpenEnvEnvironment",
}
"""Class of each further kind, as module:Class."""
PATH_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "gymnasium": ("actions", "observation"),
    "textarena": ("actions", "observation", "opponent"),
    "textworld": ("actions", "observation", "game", "folder"),
    "openenv": ("observation",),
}
"""Options of each kind whose text is a path or file.py:function."""
OPTIONS_CHECK = "check_options"
"""Name of the classmethod by which an adapter checks its options."""
ENVIRONMENT_KINDS = (CLASS_KIND, *ADAPTER_CLASSES)
