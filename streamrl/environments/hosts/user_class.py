"""Environment classes of users: loading, and telling their two shapes apart.

class Guess:                        turns: the class has `step`
    def reset(self, row, seed): ...
    def step(self, reply): ...
    def score(self, episode): ...   optional, as are reset, close, and for tests
    def oracle(self, row, messages): ...

class Calculator:                   tools: its other public methods
    def reset(self, row): ...
    def calculate(self, expression: str) -> str: ...
    def score(self, episode): ...
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.environments.hosts.host_protocol import EnvironmentDescription, EnvironmentShape
from streamrl.environments.tool_calls.tool_schema import make_tool_schema
from streamrl.errors import ConfigError
from streamrl.files.python_module import FileFunction, load_referenced_class, make_file_function

RESET_PARAMETERS = ("row", "seed")
"""Parameters that `reset` may declare."""
POSITIONAL_ARGUMENTS = {
    "step": ("reply",),
    "score": ("episode",),
    "oracle": ("row", "messages"),
    "close": (),
}
"""Positional arguments of the other methods that are not tools."""
CONSTRUCTOR = "__init__"
SETTING = "environment.path"


@dataclass(frozen=True)
class UserClass:
    """Environment class of a user.

    methods: `reset`, `step`, `score`, `oracle`, `close` and tools by name, as far as the class has
        them, and the constructor.
    reset_arguments: names of the arguments that `reset` takes.
    """

    class_object: type
    description: EnvironmentDescription
    methods: Mapping[str, FileFunction]
    reset_arguments: tuple[str, ...]


def load_user_class(path: str) -> UserClass:
    """Load the class that the setting `environment.path` names, and check its methods.

    Raises ConfigError if the file cannot be imported, the class has neither shape or both, or a
    method has other parameters than its caller passes.
    """
    file, class_object = load_referenced_class(path, setting=SETTING)
    label = f"{SETTING}={path.removesuffix(':' + class_object.__name__)}:{class_object.__name__}"
    _check_constructor(class_object, file, label)
    methods = _find_methods(class_object, file, label)
    tools = [name for name in methods if name not in ("reset", *POSITIONAL_ARGUMENTS)]
    if ("step" in methods) == bool(tools):
        found = f"step and also {', '.join(tools)}" if tools else "no public method"
        raise ConfigError(
            f"{label}: in {file} has {found}; write either step(self, reply), which returns a Turn,"
            " or tools: public methods with annotated parameters and a docstring (helpers: _name)"
        )
    for name, arguments in POSITIONAL_ARGUMENTS.items():
        if name in methods:
            methods[name].check_positional(arguments)
    reset_arguments: tuple[str, ...] = ()
    if "reset" in methods:
        reset_arguments = methods["reset"].select_arguments(RESET_PARAMETERS)
    description = EnvironmentDescription(
        name=class_object.__name__,
        file=file,
        shape=EnvironmentShape.TOOLS if tools else EnvironmentShape.TURNS,
        tools=tuple(make_tool_schema(methods[name].function) for name in tools),
        has_score="score" in methods,
        has_oracle="oracle" in methods,
    )
    constructor = FileFunction(file, class_object.__name__, class_object, {}, label)
    return UserClass(
        class_object, description, {CONSTRUCTOR: constructor, **methods}, reset_arguments
    )


def _find_methods(class_object: type, file: str, label: str) -> dict[str, FileFunction]:
    """Return the public methods, inherited ones included, in the order of their definition."""
    methods: dict[str, FileFunction] = {}
    for name in dict.fromkeys(key for base in class_object.__mro__[::-1] for key in vars(base)):
        static = inspect.getattr_static(class_object, name)
        is_method = inspect.isfunction(static) or isinstance(static, classmethod | staticmethod)
        if name.startswith("_") or not is_method:
            continue
        # Bound to a stand-in: objects of the class are made only for sessions.
        bound = static.__get__(object(), class_object)
        methods[name] = make_file_function(
            file, f"{class_object.__name__}.{name}", bound, label=f"{label}.{name}"
        )
    return methods


def _check_constructor(class_object: type, file: str, label: str) -> None:
    try:
        inspect.signature(class_object).bind()
    except TypeError as error:
        raise ConfigError(
            f"{label}: in {file} cannot be constructed without arguments: {error}; move them to"
            " reset(self, row, seed)"
        ) from None
    except ValueError as error:  # some C classes have no signature
        raise ConfigError(f"{label}: in {file}: {error}") from None
