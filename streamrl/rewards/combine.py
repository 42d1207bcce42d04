"""Combine the component scores of a completion: weighted sum with gates, or a user's function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import FileFunction, load_referenced_function
from streamrl.messages import Array, Prompt
from streamrl.rewards.interface.checks import format_value, to_finite_float
from streamrl.rewards.interface.config import ScorerConfig
from streamrl.rewards.interface.reward import (
    Reward,
    RewardContext,
    RewardSpec,
    WorkerOptions,
    WorkerReward,
)
from streamrl.rewards.interface.verdict import RewardOutcome, RewardResult

#: Parameters that a user's combine function may declare.
COMBINE_PARAMETERS = ("rewards", "prompt", "completion")
ResultsByComponent = Mapping[str, Sequence[RewardResult]]
ComponentScores = dict[str, float | None]
"""Scores of one completion by component name; None for a component that abstains."""


@dataclass(frozen=True)
class RewardComponent:
    """A named reward with a weight in the combined score.

    name: suffix of the logged metric reward/<name>.
    is_gate: a completion that fails this component has combined score 0.
    """

    name: str
    weight: float
    is_gate: bool
    reward: Reward


class ScoreCombiner(Protocol):
    """Combines the results of all reward components into a single score per completion."""

    async def start(self) -> None:
        """Start worker processes, if needed. Raises ConfigError if `scorer.combine` is unusable."""
        ...

    async def combine_scores(
        self, prompt: Prompt, completions: Sequence[str], results: ResultsByComponent
    ) -> Array:
        """Return the combined score of each completion, float64 [G]. Raises RewardError.

        results: by component name, a result per completion.
        """
        ...

    async def close(self) -> None: ...


class WeightedSumCombiner:
    """Combines component scores as the sum of weight * score in float64; 0 if a gate fails.

    A component that abstains from a completion (returns None) is left out of its sum, as in TRL.
    """

    def __init__(self, components: Sequence[RewardComponent]) -> None:
        self._components = components

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def combine_scores(
        self, prompt: Prompt, completions: Sequence[str], results: ResultsByComponent
    ) -> Array:
        """Return the weighted sum of each completion, float64 [G].

        Raises RewardError if every component with a weight or gate abstains from a completion.
        """
        total = np.zeros(len(completions))
        passes_gates = np.ones(len(completions), np.bool_)
        is_judged = np.zeros(len(completions), np.bool_)
        for component in self._components:
            group = results[component.name]
            has_score = np.array([not result.is_not_judged for result in group])
            scores = np.array([result.score for result in group], np.float64)
            total += component.weight * np.where(has_score, scores, 0.0)
            if component.is_gate:
                passes_gates &= [
                    result.outcome is RewardOutcome.PASS or result.is_not_judged for result in group
                ]
            if component.is_gate or component.weight:
                is_judged |= has_score
        counted = [c for c in self._components if c.is_gate or c.weight]
        if counted and not is_judged.all():
            index, names = int(np.argmin(is_judged)), ", ".join(c.name for c in counted)
            raise RewardError(f"completion {index} has no score: {names} returned None")
        return np.where(passes_gates, total, 0.0)


class FunctionCombiner:
    """Combines component scores with a user's function `combine(rewards, prompt, completion)`.

    The function runs in a worker process and declares any subset of these parameters. rewards: the
    completion's scores by component name, None for a component that abstains.
    """

    def __init__(self, scorer: ScorerConfig) -> None:
        load_combine_function(scorer.combine)
        spec = RewardSpec("combine", WorkerOptions(replicas=1), RewardContext(scorer))
        self._worker_reward = WorkerReward(
            "streamrl.rewards.combine:make_combine_handler", scorer.combine, spec
        )

    async def start(self) -> None:
        await self._worker_reward.start()

    async def close(self) -> None:
        await self._worker_reward.close()

    async def combine_scores(
        self, prompt: Prompt, completions: Sequence[str], results: ResultsByComponent
    ) -> Array:
        """Call the user's function for each completion; return its numbers, float64 [G].

        Raises RewardError if a result is not a number.
        """
        scores = [
            {name: _score_or_none(group[i]) for name, group in results.items()}
            for i in range(len(completions))
        ]
        totals = await self._worker_reward.call_worker((prompt, list(completions), scores))
        return np.array(totals, np.float64)


def _score_or_none(result: RewardResult) -> float | None:
    return None if result.is_not_judged else result.score


def load_combine_function(reference: str) -> tuple[FileFunction, Sequence[str]]:
    """Load the user's function named by `scorer.combine`; return the function and its parameters.

    Raises ConfigError if the file or the function cannot be used.
    """
    code = load_referenced_function(reference, setting="scorer.combine")
    return code, code.select_arguments(COMBINE_PARAMETERS)


def make_combine_handler(reference: str) -> Callable[[Any], list[float] | str]:
    """Return the handler that the worker process of a FunctionCombiner runs.

    The handler maps (prompt, completions, component scores of each completion) to a combined score
    per completion, or to an error message.
    """
    code, parameters = load_combine_function(reference)

    def combine(request: tuple[Prompt, list[str], list[ComponentScores]]) -> list[float] | str:
        prompt, completions, scores = request
        totals = []
        for i, (completion, rewards) in enumerate(zip(completions, scores, strict=True)):
            offered = {"rewards": rewards, "prompt": prompt, "completion": completion}
            value = _call_function(code, {key: offered[key] for key in parameters})
            try:
                totals.append(_require_number(code, value, i))
            except RewardError as error:
                return str(error)
            # The returned object is the user's: inspecting it may raise any exception.
            except BaseException as error:  # noqa: BLE001
                return code.describe_error(error)
        return totals

    return combine


def _call_function(code: FileFunction, arguments: Mapping[str, Any]) -> Any:
    try:
        return code.function(**arguments)
    # User code may raise anything, SystemExit included.
    except BaseException as error:
        raise RewardError(code.describe_error(error)) from error


def _require_number(code: FileFunction, value: Any, index: int) -> float:
    """Return the user function's result as float. Raises RewardError unless a finite number."""
    number = to_finite_float(value)
    if number is None:
        raise RewardError(
            f"{code.name} in {code.file} returned {format_value(value)} for completion {index},"
            " not a number"
        )
    return number


def build_combiner(components: Sequence[RewardComponent], scorer: ScorerConfig) -> ScoreCombiner:
    """Build the combiner for the user's function named by `scorer.combine`.

    Raises ConfigError if the function cannot be used, or if a component sets a weight or a gate,
    which the function would ignore.
    """
    for component in components:
        if component.is_gate or component.weight != 1.0:
            raise ConfigError(
                f"scorer.combine={scorer.combine} replaces the weighted sum: weight and gate of"
                f" reward {component.name} have no effect. Remove them"
            )
    return FunctionCombiner(scorer)
