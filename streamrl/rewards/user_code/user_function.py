"""A reward function in a user's Python file: found, loaded, and told apart by its parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import FileFunction, load_function, make_file_function
from streamrl.messages import Prompt
from streamrl.rewards.user_code.plugins import find_registered_function

CallArguments = dict[str, Any]


@dataclass(frozen=True)
class SignatureStyle:
    """A way to write a reward function, known by the names of its parameters.

    `marker_parameters` are the parameters that tell it from the others; `offered_parameters` all it
    may ask for, None where the row's columns are offered too. `arguments` makes what a call is
    given for some completions of a prompt: for one completion, or for the whole group if
    `per_group`. A None is no mistake if it `can_abstain`: it says nothing of that completion.
    """

    signature: str
    marker_parameters: frozenset[str]
    offered_parameters: frozenset[str] | None
    is_per_group: bool
    can_abstain: bool
    build_arguments: Callable[[Prompt, Sequence[str]], CallArguments]


def _build_streamrl_arguments(prompt: Prompt, completions: Sequence[str]) -> CallArguments:
    return {"prompt": prompt, "completion": completions[0]}


def _build_verl_arguments(prompt: Prompt, completions: Sequence[str]) -> CallArguments:
    return {
        "data_source": prompt.data_source,
        "solution_str": completions[0],
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
    }


def _build_verl_batch_arguments(prompt: Prompt, completions: Sequence[str]) -> CallArguments:
    rows = [_build_verl_arguments(prompt, [completion]) for completion in completions]
    return {f"{name}s": [row[name] for row in rows] for name in rows[0]}


def _build_trl_arguments(prompt: Prompt, completions: Sequence[str]) -> CallArguments:
    """Every column is a list with an entry per completion; chat rows get chat completions."""
    is_chat = prompt.is_chat
    columns = {
        **prompt.extra_info,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "prompts": list(prompt.messages) if is_chat else prompt.messages[0]["content"],
    }
    arguments: CallArguments = {name: [value] * len(completions) for name, value in columns.items()}
    arguments["completions"] = [
        [{"role": "assistant", "content": completion}] if is_chat else completion
        for completion in completions
    ]
    return arguments


SIGNATURE_STYLES = (
    SignatureStyle(
        "score(prompt, completion)",
        marker_parameters=frozenset({"prompt", "completion"}),
        offered_parameters=frozenset({"prompt", "completion"}),
        is_per_group=False,
        can_abstain=False,
        build_arguments=_build_streamrl_arguments,
    ),
    SignatureStyle(
        "compute_score(data_source, solution_str, ground_truth, extra_info)",
        marker_parameters=frozenset({"solution_str", "ground_truth"}),
        offered_parameters=frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
        is_per_group=False,
        can_abstain=False,
        build_arguments=_build_verl_arguments,
    ),
    SignatureStyle(
        "compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
        marker_parameters=frozenset({"solution_strs", "ground_truths"}),
        offered_parameters=frozenset(
            {"data_sources", "solution_strs", "ground_truths", "extra_infos"}
        ),
        is_per_group=True,
        can_abstain=False,
        build_arguments=_build_verl_batch_arguments,
    ),
    SignatureStyle(
        "f(prompts, completions, **columns)",
        marker_parameters=frozenset({"completions"}),
        offered_parameters=None,
        is_per_group=True,
        can_abstain=True,
        build_arguments=_build_trl_arguments,
    ),
)


@dataclass(frozen=True)
class FunctionCallSpec:
    """What a reward function is called with: plain data, known outside its worker too.

    where: the function and its file. style: the signature of one of STYLES. required: the
    parameters it must be given. kwargs: what every call is given besides.
    """

    location: str
    style: str
    parameters: frozenset[str]
    required: frozenset[str]
    has_var_kwargs: bool
    kwargs: tuple[tuple[str, Any], ...]

    def build_arguments(self, prompt: Prompt, completions: Sequence[str]) -> CallArguments:
        """What to call it with, by name. Raises RewardError if it wants a column the row lacks."""
        (style,) = (style for style in SIGNATURE_STYLES if style.signature == self.style)
        offered = {**style.build_arguments(prompt, completions), **dict(self.kwargs)}
        missing = self.required - offered.keys()
        if missing:
            raise RewardError(
                f"{self.location} needs {', '.join(sorted(missing))}; "
                f"the row has {', '.join(sorted(offered))}"
            )
        if self.has_var_kwargs:
            return offered
        return {name: value for name, value in offered.items() if name in self.parameters}


@dataclass(frozen=True)
class UserFunction:
    """A loaded reward function, and how it is called."""

    file_function: FileFunction
    style: SignatureStyle
    call_spec: FunctionCallSpec

    def to_reward_error(self, failure: BaseException) -> RewardError:
        """What the function raised, with the innermost line of the user's file."""
        return RewardError(self.file_function.describe_error(failure))

    def __str__(self) -> str:
        return self.call_spec.location


@dataclass(frozen=True)
class FunctionSource:
    """Where a function comes from: a file and its name there, or the kind it registers itself as.

    kwargs: more arguments for every call, by name.
    """

    path: str
    name: str
    kwargs: tuple[tuple[str, Any], ...] = ()
    is_registered: bool = False

    def load_function(self) -> UserFunction:
        """The function.

        Raises ConfigError if there is none, its file cannot be used, a keyword is none of its
        parameters, or its parameters fit none of STYLES.
        """
        code, kwargs = self._find_function(), dict(self.kwargs)
        for key in kwargs:
            if key not in code.parameters and not code.has_var_keyword:
                raise ConfigError(
                    f"rewards.kwargs.{key}: {code.name} in {code.file} has no such parameter"
                )
        style = _match_style(code, kwargs)
        needs = FunctionCallSpec(
            location=f"{code.name} in {code.file}",
            style=style.signature,
            parameters=frozenset(code.parameters),
            required=frozenset(code.required_names),
            has_var_kwargs=code.has_var_keyword,
            kwargs=self.kwargs,
        )
        return UserFunction(code, style, needs)

    def _find_function(self) -> FileFunction:
        if not self.is_registered:
            said = f"rewards.function={self.name}"
            return load_function(self.path, self.name, setting="rewards.path", said=said)
        function = find_registered_function(self.name, self.path)
        file = self.path and str(Path(self.path).resolve())
        file = file or inspect.getsourcefile(inspect.unwrap(function)) or self.name
        return make_file_function(file, self.name, function, said=f"rewards.kind={self.name}")


def _match_style(code: FileFunction, kwargs: Mapping[str, Any]) -> SignatureStyle:
    for style in SIGNATURE_STYLES:
        fits = (
            style.offered_parameters is None
            or code.required_names - kwargs.keys() <= style.offered_parameters
        )
        if style.marker_parameters <= code.keyword_names - kwargs.keys() and fits:
            return style
    ways = "; ".join(style.signature for style in SIGNATURE_STYLES)
    raise ConfigError(
        f"{code.label}: its parameters in {code.file} ({code.signature_text}) fit none of "
        f"the ways to write a reward: {ways}"
    )
