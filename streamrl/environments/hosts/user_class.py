"""Environment classes of users and that of OpenEnv: loading, and telling their two shapes apart.

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
from functools import cached_property
from typing import Any

from streamrl.environments.config import OPENENV_KIND, SECTION, EnvironmentSpec
from streamrl.environments.hosts.host_protocol import EnvironmentDescription
from streamrl.environments.tool_calls.tool_schema import make_tool_schema
from streamrl.errors import ConfigError
from streamrl.files.optional_package import import_optional
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


@dataclass(frozen=True)
class UserClass:
    """Environment class of a user, or that of OpenEnv.

    options: keyword arguments of the constructor.
    methods: `reset`, `step`, `score`, `oracle`, `close` and tools by name, as far as the class has
        them, and the constructor.
    reset_arguments: names of the arguments that `reset` takes.
    """

    class_object: type
    options: Mapping[str, Any]
    description: EnvironmentDescription
    methods: Mapping[str, FileFunction]
    reset_arguments: tuple[str, ...]

    @cached_property
    def is_async(self) -> bool:
        """True if all methods besides the constructor are async: an episode keeps no thread."""
        return all(m.is_async for name, m in self.methods.items() if name != CONSTRUCTOR)


def load_user_class(spec: EnvironmentSpec, *, section: str = SECTION) -> UserClass:
    """Load the class that a spec names, and check its constructor and methods.

    Without a class, the environment consists of the tools in `spec.tools`. section: config section
    of the spec, for errors. Raises ConfigError if the file cannot be imported, the class has
    neither shape or both, a method has other parameters than its caller passes, or the constructor
    does not take the options.
    """
    if not spec.has_class:
        return _make_bare_class()
    file, class_object, label = _import_class(spec, section)
    constructor = make_file_function(file, class_object.__name__, class_object, label=label)
    _check_options(constructor, spec.options, section)
    is_openenv = spec.kind == OPENENV_KIND
    if is_openenv:
        class_object(**spec.options)  # refuses values that it cannot use
    methods = _find_methods(class_object, file, label)
    other = ("reset", *POSITIONAL_ARGUMENTS)
    tools = [name for name in methods if name not in other and not is_openenv]
    if "step" in methods and spec.tools:
        raise ConfigError(
            f"{section}.tools: {label} in {file} has step(self, reply), which answers every reply;"
            " tools need a class without step, or none"
        )
    if ("step" in methods) == bool(tools or spec.tools):
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
        has_step="step" in methods,
        tools=tuple(make_tool_schema(methods[name].function) for name in tools),
        has_score="score" in methods,
        has_oracle="oracle" in methods,
    )
    return UserClass(
        class_object,
        spec.options,
        description,
        {CONSTRUCTOR: constructor, **methods},
        reset_arguments,
    )


def _make_bare_class() -> UserClass:
    """Return the class of an environment that has tools only."""
    name = "an environment without a class"
    description = EnvironmentDescription(name=name, file="", has_step=False)
    constructor = FileFunction("", name, object, {}, name)
    return UserClass(object, {}, description, {CONSTRUCTOR: constructor}, ())


def _import_class(spec: EnvironmentSpec, section: str) -> tuple[str, type, str]:
    """Return the file of the class, the class, and its setting=value for errors."""
    if spec.kind == OPENENV_KIND:
        setting = spec.format_setting(section)
        name = "streamrl.environments.hosts.openenv"
        module = import_optional(name, setting=setting, extra=spec.kind)
        return str(module.__file__), module.OpenEnvEnvironment, setting
    file, class_object = load_referenced_class(spec.path, setting=f"{section}.path")
    path = spec.path.removesuffix(f":{class_object.__name__}")
    return file, class_object, f"{section}.path={path}:{class_object.__name__}"


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


def _check_options(constructor: FileFunction, options: Mapping[str, Any], section: str) -> None:
    """Raise ConfigError for an option that is missing, or that the constructor does not take."""
    known = {*options} if constructor.has_var_keyword else constructor.keyword_names
    problems = [f"{name}: no such parameter" for name in options if name not in known]
    problems += [f"{name}: missing" for name in sorted(constructor.required_names - {*options})]
    if problems:
        raise ConfigError(
            f"{section}.options.{problems[0]}: the parameters of {constructor.name} in"
            f" {constructor.file} are {', '.join(constructor.parameters) or 'none'}"
        )
