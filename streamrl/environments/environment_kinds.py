"""Kinds of environments: a class of the user, and adapters of other packages' environments.

An adapter is a class with `reset` and `step`, like a user's. Its constructor takes
`environment.options` as keyword arguments and runs once per episode. A classmethod
`check_options(**options)`, called once when a host process loads the class, may raise ConfigError:
for a package that is not installed, with the extra to install, or a value that it refuses. Adapters
import their package inside functions, which run in host processes only.

An adapter whose server may have tools also has an async classmethod `list_tools(**options)`, called
once before the run, and `call_tool(name, arguments)`, which returns a ToolAnswer. If schemas are
listed, `call_tool` answers the policy's calls, and `step` is not used.
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
    "textworld": ("actions", "observation", "game"),
    "openenv": ("observation",),
}
"""Options of each kind whose text is a path or file.py:function."""
OPTIONS_CHECK = "check_options"
"""Name of the classmethod by which an adapter checks its options."""
LIST_TOOLS, CALL_TOOL = "list_tools", "call_tool"
"""Names of the methods of an adapter whose server may have tools."""
ENVIRONMENT_KINDS = (CLASS_KIND, *ADAPTER_CLASSES)
