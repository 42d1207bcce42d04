"""A reward function in a user's Python file: found, loaded, and told apart by its parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import FileFunction, file_function, find_function
from streamrl.messages import Prompt
from streamrl.rewards.user_code.plugins import find_registered

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """A way to write a reward function, known by the names of its parameters.

    `marks` are the parameters that tell it from the others; `offers` all it may ask for, None
    where the row's columns are offered too. `arguments` makes what a call is given for some
    completions of a prompt: for one completion, or for the whole group if `per_group`. A None is
    no mistake if it `may_abstain`: it says nothing of that completion.
    """

    signature: str
    marks: frozenset[str]
    offers: frozenset[str] | None
    per_group: bool
    may_abstain: bool
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


def _verl_batch_arguments(prompt: Prompt, completions: Sequence[str]) -> Arguments:
    rows = [_verl_arguments(prompt, [completion]) for completion in completions]
    return {f"{name}s": [row[name] for row in rows] for name in rows[0]}


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
        may_abstain=False,
        arguments=_streamrl_arguments,
    ),
    Style(
        "compute_score(data_source, solution_str, ground_truth, extra_info)",
        marks=frozenset({"solution_str", "ground_truth"}),
        offers=frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
        per_group=False,
        may_abstain=False,
        arguments=_verl_arguments,
    ),
    Style(
        "compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
        marks=frozenset({"solution_strs", "ground_truths"}),
        offers=frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"}),
        per_group=True,
        may_abstain=False,
        arguments=_verl_batch_arguments,
    ),
    Style(
        "f(prompts, completions, **columns)",
        marks=frozenset({"completions"}),
        offers=None,
        per_group=True,
        may_abstain=True,
        arguments=_trl_arguments,
    ),
)


@dataclass(frozen=True)
class Needs:
    """What a reward function is called with: plain data, known outside its worker too.

    where: the function and its file. style: the signature of one of STYLES. required: the
    parameters it must be given. kwargs: what every call is given besides.
    """

    where: str
    style: str
    parameters: frozenset[str]
    required: frozenset[str]
    takes_any: bool
    kwargs: tuple[tuple[str, Any], ...]

    def arguments(self, prompt: Prompt, completions: Sequence[str]) -> Arguments:
        """What to call it with, by name. Raises RewardError if it wants a column the row lacks."""
        (style,) = (style for style in STYLES if style.signature == self.style)
        offered = {**style.arguments(prompt, completions), **dict(self.kwargs)}
        missing = self.required - offered.keys()
        if missing:
            raise RewardError(
                f"{self.where} needs {', '.join(sorted(missing))}; "
                f"the row has {', '.join(sorted(offered))}"
            )
        if self.takes_any:
            return offered
        return {name: value for name, value in offered.items() if name in self.parameters}


@dataclass(frozen=True)
class UserFunction:
    """A loaded reward function, and how it is called."""

    code: FileFunction
    style: Style
    needs: Needs

    def error(self, failure: BaseException) -> RewardError:
        """What the function raised, with the innermost line of the user's file."""
        return RewardError(self.code.place_of(failure))

    def __str__(self) -> str:
        return self.needs.where


@dataclass(frozen=True)
class Source:
    """Where a function comes from: a file and its name there, or the kind it registers itself as.

    kwargs: more arguments for every call, by name.
    """

    path: str
    name: str
    kwargs: tuple[tuple[str, Any], ...] = ()
    is_registered: bool = False

    def load(self) -> UserFunction:
        """The function.

        Raises ConfigError if there is none, its file cannot be used, a keyword is none of its
        parameters, or its parameters fit none of STYLES.
        """
        code, kwargs = self._find(), dict(self.kwargs)
        for key in kwargs:
            if key not in code.parameters and not code.takes_any:
                raise ConfigError(
                    f"rewards.kwargs.{key}: {code.name} in {code.file} has no such parameter"
                )
        style = _style(code, kwargs)
        needs = Needs(
            where=f"{code.name} in {code.file}",
            style=style.signature,
            parameters=frozenset(code.parameters),
            required=frozenset(code.required),
            takes_any=code.takes_any,
            kwargs=self.kwargs,
        )
        return UserFunction(code, style, needs)

    def _find(self) -> FileFunction:
        if not self.is_registered:
            said = f"rewards.function={self.name}"
            return find_function(self.path, self.name, setting="rewards.path", said=said)
        function = find_registered(self.name, self.path)
        file = self.path and str(Path(self.path).resolve())
        file = file or inspect.getsourcefile(inspect.unwrap(function)) or self.name
        return file_function(file, self.name, function, said=f"rewards.kind={self.name}")


def _style(code: FileFunction, kwargs: Mapping[str, Any]) -> Style:
    for style in STYLES:
        fits = style.offers is None or code.required - kwargs.keys() <= style.offers
        if style.marks <= code.named - kwargs.keys() and fits:
            return style
    ways = "; ".join(style.signature for style in STYLES)
    raise ConfigError(
        f"{code.said}: its parameters in {code.file} ({code.written}) fit none of "
        f"the ways to write a reward: {ways}"
    )
