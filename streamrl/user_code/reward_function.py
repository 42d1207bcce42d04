"""Reward functions of users: signature styles, and the handler of workers."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import FileFunction, load_function
from streamrl.messages import Prompt
from streamrl.user_code.checks import format_returned, to_finite_float
from streamrl.user_code.reward_result import RewardOutcome, RewardResult
from streamrl.user_code.service_gate import Outage, is_outage

CallArguments = dict[str, Any]
CompletionDetails = Mapping[str, Sequence[Any] | None]
"""Arguments by DETAIL_PARAMETERS, with an entry per completion; None where they are unknown."""
DETAIL_PARAMETERS = ("completion_ids", "completion_turns")
"""Parameters of functions of any signature: sampled token ids, and texts of the policy's turns."""


@dataclass(frozen=True)
class SignatureStyle:
    """A supported signature of reward functions, recognized by parameter names.

    function: usual name of such a function, for messages.
    parameters: parameters that a function may declare.
    markers: those of them that identify the style; a function must take them.
    build_arguments: makes the arguments of a call from a prompt and its completions.
    is_per_group: a call receives all completions of a prompt, else a single completion.
    takes_columns: a function may declare any column of the row, too, and may return None for a
        completion.
    """

    function: str
    parameters: tuple[str, ...]
    markers: tuple[str, ...]
    build_arguments: Callable[[Prompt, Sequence[str]], CallArguments]
    is_per_group: bool = False
    takes_columns: bool = False

    @property
    def signature(self) -> str:
        return f"{self.function}({', '.join(self.parameters)}{', **columns' * self.takes_columns})"


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
    """Repeat every column of the row per completion; a chat completion is a list of messages."""
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
        "score",
        ("prompt", "completion"),
        markers=("prompt", "completion"),
        build_arguments=_build_streamrl_arguments,
    ),
    SignatureStyle(
        "compute_score",
        ("data_source", "solution_str", "ground_truth", "extra_info"),
        markers=("solution_str", "ground_truth"),
        build_arguments=_build_verl_arguments,
    ),
    SignatureStyle(
        "compute_score",
        ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
        markers=("solution_strs", "ground_truths"),
        build_arguments=_build_verl_batch_arguments,
        is_per_group=True,
    ),
    SignatureStyle(
        "f",
        ("prompts", "completions"),
        markers=("completions",),
        build_arguments=_build_trl_arguments,
        is_per_group=True,
        takes_columns=True,
    ),
)


@dataclass(frozen=True)
class FunctionCallSpec:
    """Parameters of a user's reward function, picklable for use outside the worker.

    location: function name and file.
    style: signature of a SignatureStyle.
    required: parameters without a default.
    has_var_kwargs: the function takes **kwargs.
    kwargs: constant arguments from the config.
    """

    location: str
    style: str
    parameters: frozenset[str]
    required: frozenset[str]
    has_var_kwargs: bool
    kwargs: tuple[tuple[str, Any], ...]

    def build_arguments(
        self, prompt: Prompt, completions: Sequence[str], details: CompletionDetails
    ) -> CallArguments:
        """Build the keyword arguments of a call. Raises RewardError if the row lacks a column."""
        (style,) = (style for style in SIGNATURE_STYLES if style.signature == self.style)
        own = {name: values for name, values in details.items() if values is not None}
        if not style.is_per_group:
            own = {name: values[0] for name, values in own.items()}
        offered = {**style.build_arguments(prompt, completions), **own, **dict(self.kwargs)}
        missing = self.required - offered.keys()
        if missing:
            raise RewardError(
                f"{self.location} needs {', '.join(sorted(missing))}; "
                f"the row has {', '.join(sorted(offered))}"
            )
        if self.has_var_kwargs:
            return {
                name: x for name, x in offered.items() if name in self.parameters or name not in own
            }
        return {name: value for name, value in offered.items() if name in self.parameters}


@dataclass(frozen=True)
class FunctionSource:
    """Location of a reward function: a name in a file.

    kwargs: constant arguments of every call. key: config key of the reward's entry, for messages.
    """

    path: str
    name: str
    kwargs: tuple[tuple[str, Any], ...] = ()
    key: str = "rewards[0]"


def _match_style(code: FileFunction, source: FunctionSource) -> SignatureStyle:
    kwargs = dict(source.kwargs)
    for key in kwargs:
        if key not in code.parameters and not code.has_var_keyword:
            raise ConfigError(
                f"{source.key}.kwargs.{key}: {code.name} in {code.file} has no such parameter"
            )
    for style in SIGNATURE_STYLES:
        others = code.required_names - kwargs.keys() - {*style.parameters, *DETAIL_PARAMETERS}
        fits = style.takes_columns or not others
        if fits and {*style.markers} <= code.keyword_names - kwargs.keys():
            return style
    signatures = "; ".join(style.signature for style in SIGNATURE_STYLES)
    raise ConfigError(
        f"{code.label}: its parameters in {code.file} ({code.signature_text}) match none of "
        f"the supported signatures: {signatures}"
    )


RewardRequest = tuple[Prompt, Sequence[str], CompletionDetails]
RewardResponse = list[RewardResult] | FunctionCallSpec | Outage | str
PASS_SCORE = 1.0
"""Lowest score that passes if the result has no `acc`."""
PLACE_KEYS = ("turns", "tokens", "spans")
"""Keys of a result dict for scores of turns, sampled tokens and spans of characters."""
RESULT_KEYS = ("score", "acc", "pred", "answer", *PLACE_KEYS)
"""Reserved keys of a result dict; other keys with numbers become extra metrics."""
MAX_METRICS_PER_RESULT = 50


def make_reward_handler(source: FunctionSource) -> Callable[[RewardRequest | None], Any]:
    """Load the user's function; return the handler that calls the function in this worker.

    The handler maps (prompt, completions) to a list of results, to an error message if the function
    returned an invalid value, or to an Outage if it did not reach a service. The handler maps None
    to the FunctionCallSpec, and is async if the function is.
    """
    user = UserFunction(source)
    return user.judge_async if user.code.is_async else user.judge


class UserFunction:
    """A user's reward function, loaded in a worker.

    Raises ConfigError if the file or the function cannot be used, a keyword is not a parameter, or
    the parameters match no style in SIGNATURE_STYLES.
    """

    def __init__(self, source: FunctionSource) -> None:
        label = f"{source.key}.function={source.name}"
        code = load_function(source.path, source.name, setting=f"{source.key}.path", label=label)
        self.code = code
        self._style = _match_style(code, source)
        self.call_spec = FunctionCallSpec(
            location=f"{code.name} in {code.file}",
            style=self._style.signature,
            parameters=frozenset(code.parameters),
            required=frozenset(code.required_names),
            has_var_kwargs=code.has_var_keyword,
            kwargs=source.kwargs,
        )

    def judge(self, request: RewardRequest | None) -> RewardResponse:
        if request is None:
            return self.call_spec
        try:
            results = [self._call(call) for call in self._build_calls(request)]
        except RewardError as error:
            return self._to_outage(error)
        return self._parse_results(results, request)

    async def judge_async(self, request: RewardRequest | None) -> RewardResponse:
        if request is None:
            return self.call_spec
        tasks = [asyncio.create_task(self._await(call)) for call in self._build_calls(request)]
        try:
            results = await asyncio.gather(*tasks)
        except RewardError as error:
            return self._to_outage(error)
        finally:
            for task in tasks:
                task.cancel()
        return self._parse_results(results, request)

    def _to_outage(self, error: RewardError) -> Outage:
        """Return an error as an outage if it is one, else raise it."""
        if not is_outage(error):
            raise error
        return Outage(self.call_spec.location, str(error), down_s=0.0)

    def _build_calls(self, request: RewardRequest) -> list[CallArguments]:
        prompt, completions, details = request
        if self._style.is_per_group:
            return [self.call_spec.build_arguments(prompt, completions, details)]
        return [
            self.call_spec.build_arguments(
                prompt,
                [text],
                {name: values and [values[i]] for name, values in details.items()},
            )
            for i, text in enumerate(completions)
        ]

    def _call(self, arguments: CallArguments) -> Any:
        try:
            return self.code.function(**arguments)
        # User code may raise anything, SystemExit included.
        except BaseException as error:
            raise RewardError(self.code.describe_error(error)) from error

    async def _await(self, arguments: CallArguments) -> Any:
        result: Awaitable[Any] = self._call(arguments)
        try:
            return await result
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise RewardError(self.code.describe_error(error)) from error

    def _parse_results(
        self, results: Sequence[Any], request: RewardRequest
    ) -> list[RewardResult] | str:
        """Convert returned values to results; return an error message for an invalid value."""
        _, completions, _ = request
        try:
            if self._style.is_per_group:
                results = self._split_results(results[0], len(completions))
            return [self._parse_result(result, i) for i, result in enumerate(results)]
        except RewardError as error:
            return str(error)
        # The returned object is the user's: inspecting it may raise any exception.
        except BaseException as error:  # noqa: BLE001
            return self.code.describe_error(error)

    def _split_results(self, results: Any, size: int) -> Sequence[Any]:
        if hasattr(results, "tolist"):  # numpy array or torch tensor
            results = results.tolist()
        if not isinstance(results, list | tuple) or len(results) != size:
            raise self._make_result_error(results, f", not a list of {size} numbers")
        return results

    def _make_result_error(self, result: Any, problem: str) -> RewardError:
        return RewardError(f"{self.call_spec.location} returned {format_returned(result)}{problem}")

    def _parse_result(self, result: Any, index: int) -> RewardResult:
        """Convert the value returned for completion `index`: a number, or a dict with "score".

        Optional keys: `acc` is the pass flag, `pred` or `answer` the extracted answer. `turns`,
        `tokens` and `spans` place a part of the score; without "score" they are all of it.
        """
        if result is None and self._style.takes_columns:
            return RewardResult.make_not_judged()
        fields: Mapping[str, Any] = result if isinstance(result, dict) else {"score": result}
        places = {
            key: self._parse_places(fields[key], key, index) for key in PLACE_KEYS if key in fields
        }
        placed = math.fsum(x[-1] for scores in places.values() for x in scores)
        score = to_finite_float(fields.get("score", placed if places else None))
        if score is None:
            problem = f" for completion {index}, not a finite number"
            raise self._make_result_error(result, problem)
        passes = fields.get("acc", score >= PASS_SCORE)
        if not isinstance(passes, Real | np.bool_):
            problem = f" for completion {index}: acc must be true or false"
            raise self._make_result_error(result, problem)
        answer = fields.get("pred", fields.get("answer"))
        return RewardResult(
            score,
            RewardOutcome.PASS if passes else RewardOutcome.WRONG,
            # join() makes a plain str: the pool does not unpickle str subclasses of the user.
            answer=None if answer is None else "".join([str(answer), ""]),
            extra_metrics=_collect_extra_metrics(fields),
            turn_scores=tuple(x for (x,) in places.get("turns", ())),
            token_scores=tuple(x for (x,) in places.get("tokens", ())),
            span_scores=tuple(
                (int(start), int(end), x) for start, end, x in places.get("spans", ())
            ),
        )

    def _parse_places(self, scores: Any, key: str, index: int) -> list[tuple[float, ...]]:
        """Return the entries of a place key as tuples that end with the score."""
        size = 3 if key == "spans" else 1
        if hasattr(scores, "tolist"):
            scores = scores.tolist()
        rows = (
            [x if size > 1 else [x] for x in scores] if isinstance(scores, list | tuple) else [[]]
        )
        parsed = [tuple(map(to_finite_float, x)) for x in rows if isinstance(x, list | tuple)]
        entries = [tuple(x for x in row if x is not None) for row in parsed]
        are_whole = all(int(x) == x for entry in entries for x in entry[: size - 1])
        is_complete = len(entries) == len(rows) and all(len(entry) == size for entry in entries)
        if not (is_complete and are_whole and (rows or key == "spans")):
            wanted = "numbers" if size == 1 else "(start, end, score)"
            problem = f" for completion {index}: {key} must be a list of {wanted}"
            raise self._make_result_error(scores, problem)
        return entries


def _collect_extra_metrics(fields: Mapping[Any, Any]) -> tuple[tuple[str, float], ...]:
    numbers = (
        (str(name), to_finite_float(value))
        for name, value in fields.items()
        if name not in RESULT_KEYS
    )
    metrics = [("".join([name]), number) for name, number in numbers if number is not None]
    acc = to_finite_float(fields.get("acc"))
    acc_metric = [] if acc is None else [("acc", acc)]
    return tuple([*acc_metric, *metrics][:MAX_METRICS_PER_RESULT])
