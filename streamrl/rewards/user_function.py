"""A reward function in a user's Python file: found, loaded, and told apart by its parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import Prompt
from streamrl.rewards.plugins import find_registered
from streamrl.user_module import failure_place, import_file

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """A way to write a reward function, known by the names of its parameters.

    `marks` are the parameters that tell it from the others; `offers` all it may ask for, None
    where the row's columns are offered too. `arguments` makes what a call is given for some
    completions of a prompt: for one completion, or for the whole group if `per_group`.
    """

    signature: str
    marks: frozenset[str]
    offers: frozenset[str] | None
    per_group: bool
    arguments: Callable[[Prompt, Sequence[str]], Arguments]


def _streamrl_arguments(prompt: Prompt, completions: Sequence[str]) -> Arguments:
    return {"prompt": prompt, "completion": completions[0]}


def _verl_arguments(prompt: Prompt, completions: Sequence[str]) -> Arguments:
    return {
        "data_source": prompt.data_source,
        "solution_str": completions[0],
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
    }


def _trl_arguments(prompt: Prompt, completions: Sequence[str]) -> Arguments:
    """Every column is a list with an entry per completion; chat rows get chat completions."""
    is_chat = prompt.is_chat
    columns = {
        **prompt.extra_info,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "prompts": list(prompt.messages) if is_chat else prompt.messages[0]["content"],
    }
    arguments: Arguments = {name: [value] * len(completions) for name, value in columns.items()}
    arguments["completions"] = [
        [{"role": "assistant", "content": completion}] if is_chat else completion
        for completion in completions
    ]
    return arguments


STYLES = (
    Style(
        "score(prompt, completion)",
        marks=frozenset({"prompt", "completion"}),
        offers=frozenset({"prompt", "completion"}),
        per_group=False,
        arguments=_streamrl_arguments,
    ),
    Style(
        "compute_score(data_source, solution_str, ground_truth, extra_info)",
        marks=frozenset({"solution_str", "ground_truth"}),
        offers=frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
        per_group=False,
        arguments=_verl_arguments,
    ),
    Style(
        "f(prompts, completions, **columns)",
        marks=frozenset({"completions"}),
        offers=None,
        per_group=True,
        arguments=_trl_arguments,
    ),
)


@dataclass(frozen=True)
class UserFunction:
    """A loaded function: what it is called with, and where it is from."""

    path: str
    name: str
    function: Callable[..., Any]
    style: Style
    parameters: Mapping[str, Parameter]
    kwargs: Mapping[str, Any]

    @property
    def is_async(self) -> bool:
        """Whether a call gives an awaitable."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__
        )

    def arguments(self, prompt: Prompt, completions: Sequence[str]) -> Arguments:
        """What to call it with, by name. Raises RewardError if it wants a column the row lacks."""
        offered = {**self.style.arguments(prompt, completions), **self.kwargs}
        missing = required_parameters(self.parameters) - offered.keys()
        if missing:
            raise RewardError(
                f"{self.name} in {self.path} needs {', '.join(sorted(missing))}; "
                f"the row has {', '.join(sorted(offered))}"
            )
        if any(p.kind is Parameter.VAR_KEYWORD for p in self.parameters.values()):
            return offered
        return {name: value for name, value in offered.items() if name in self.parameters}

    def error(self, failure: BaseException) -> RewardError:
        """What the function raised, with the innermost line of the user's file."""
        return RewardError(f"{self.name} at {failure_place(self.path, failure)}")


def load_function(path: str, name: str, kwargs: Mapping[str, Any]) -> UserFunction:
    """Reward function `name` of the Python file `path`, given `kwargs` with every call.

    Raises ConfigError as `find_function` does, or if its parameters fit none of STYLES.
    """
    file, function, _ = find_function(path, name, section="rewards")
    return _user_function(file, name, function, kwargs)


def load_registered(path: str, kind: str, kwargs: Mapping[str, Any]) -> UserFunction:
    """The reward function registered as `kind`: in the file `path`, or by an installed package.

    Raises ConfigError as `find_registered` does, or if its parameters fit none of STYLES.
    """
    function = find_registered(kind, path)
    file = str(Path(path).resolve()) if path else inspect.getsourcefile(inspect.unwrap(function))
    return _user_function(file or kind, kind, function, kwargs)


def _user_function(
    file: str, name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> UserFunction:
    parameters = _parameters(function, f"rewards.function={name}: in {file}")
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    for key in kwargs:
        if key not in parameters and not takes_any:
            raise ConfigError(f"rewards.kwargs.{key}: {name} in {file} has no such parameter")
    style = _style(file, name, {k: p for k, p in parameters.items() if k not in kwargs})
    return UserFunction(file, name, function, style, parameters, kwargs)


def find_function(
    path: str, name: str, *, section: str
) -> tuple[str, Callable[..., Any], Mapping[str, Parameter]]:
    """Function `name` of the Python file `path`: the resolved path, it, and its parameters.

    Raises ConfigError, which names a setting of `section`, if the file is missing or cannot be
    imported (with its line), or has no such function.
    """
    module = import_file(path, setting=f"{section}.path")
    if name not in vars(module):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"{section}.function={name}: not in {path}, which has {', '.join(names) or 'none'}"
        )
    function = vars(module)[name]
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{section}.function={name}: in {path} it is no function")
    parameters = _parameters(function, f"{section}.function={name}: in {path}")
    return str(Path(path).resolve()), function, parameters


def _parameters(function: Callable[..., Any], place: str) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError as error:  # some functions written in C do not tell
        raise ConfigError(f"{place}: {error}") from error


def _style(path: str, name: str, parameters: Mapping[str, Parameter]) -> Style:
    by_name = {key for key, p in parameters.items() if p.kind is not Parameter.POSITIONAL_ONLY}
    for style in STYLES:
        fits = style.offers is None or required_parameters(parameters) <= style.offers
        if style.marks <= by_name and fits:
            return style
    ways = "; ".join(style.signature for style in STYLES)
    raise ConfigError(
        f"rewards.function={name}: its parameters in {path} ({', '.join(parameters)}) fit none of "
        f"the ways to write a reward: {ways}"
    )


def required_parameters(parameters: Mapping[str, Parameter]) -> set[str]:
    """Names of the parameters that a call must give."""
    return {
        name
        for name, parameter in parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    }


def wanted(parameters: Mapping[str, Parameter], offered: Sequence[str]) -> tuple[str, ...]:
    """Those of `offered` that a function takes by name."""
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        return tuple(offered)
    unnamed = (Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY)
    named = {name for name, p in parameters.items() if p.kind not in unnamed}
    return tuple(name for name in offered if name in named)
