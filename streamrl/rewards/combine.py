"""Combine the component scores of a completion: weighted sum with gates, or a user's function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import FileFunction, load_referenced_function
from streamrl.messages import Array, Prompt
from streamrl.rewards.interface.checks import format_value, to_finite_float
from streamrl.rewards.interface.completion import LAST_TURN
from streamrl.rewards.interface.config import ScorerConfig
from streamrl.rewards.interface.reward import (
    Reward,
    RewardContext,
    RewardSpec,
    WorkerOptions,
    WorkerReward,
)
from streamrl.rewards.interface.reward_result import RewardOutcome, RewardResult

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
    part: part of a completion that the reward reads, one of COMPLETION_PARTS.
    """

    name: str
    weight: float
    is_gate: bool
    reward: Reward
    part: str = LAST_TURN


def sum_weighted(
    components: Sequence[RewardComponent], results: ResultsByComponent, size: int
) -> Array:
    """Return the sum of weight * score of each of G = `size` completions; 0 if a gate fails.

    A component that abstains from a completion (returns None) is left out of its sum, as in TRL.
    Raises RewardError if every component with a weight or gate abstains from a completion.
    """
    total = np.zeros(size)
    passes_gates, is_judged = np.ones(size, np.bool_), np.zeros(size, np.bool_)
    for component in components:
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
    counted = [component.name for component in components if component.is_gate or component.weight]
    if counted and not is_judged.all():
        index = int(np.argmin(is_judged))
        raise RewardError(f"completion {index} has no score: {', '.join(counted)} returned None")
    return np.where(passes_gates, total, 0.0)


class FunctionCombiner(WorkerReward):
    """Combines component scores with a user's function `combine(rewards, prompt, completion)`.

    The function runs in a worker process and declares any subset of these parameters. rewards: the
    completion's scores by component name, None for a component that abstains. Raises ConfigError if
    the function cannot be used, or if a component sets a weight or a gate, which the function would
    ignore.
    """

    def __init__(self, components: Sequence[RewardComponent], scorer: ScorerConfig) -> None:
        for component in components:
            if component.is_gate or component.weight != 1.0:
                raise ConfigError(
                    f"scorer.combine={scorer.combine} replaces the weighted sum: weight and gate of"
                    f" reward {component.name} have no effect. Remove them"
                )
        load_combine_function(scorer.combine)
        spec = RewardSpec("combine", WorkerOptions(replicas=1), RewardContext(scorer))
        super().__init__("streamrl.rewards.combine:make_combine_handler", scorer.combine, spec)

    async def combine_scores(
        self, prompt: Prompt, completions: Sequence[str], results: ResultsByComponent
    ) -> Array:
        """Call the user's function for each completion's text; return its numbers, float64 [G].

        Raises RewardError if a result is not a number.
        """
        scores = [
            {
                name: None if group[i].is_not_judged else group[i].score
                for name, group in results.items()
            }
            for i in range(len(completions))
        ]
        totals = await self.call_worker((prompt, list(completions), scores))
        return np.array(totals, np.float64)


def load_combine_function(reference: str) -> tuple[FileFunction, Sequence[str]]:
    """Load the user's function named by `scorer.combine`; return the function and its parameters.

    Raises ConfigError if the file or the function cannot be used.
    """
    code = load_referenced_function(reference, setting="scorer.combine")
    code.check_not_async()
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
            try:
                value = code.function(**{key: offered[key] for key in parameters})
            # User code may raise anything, SystemExit included.
            except BaseException as error:
                raise RewardError(code.describe_error(error)) from error
            try:
                number = to_finite_float(value)
                if number is None:
                    where = f"{code.name} in {code.file}"
                    shown = format_value(value)
                    return f"{where} returned {shown} for completion {i}, not a number"
            # The returned object is the user's: inspecting it may raise any exception.
            except BaseException as error:  # noqa: BLE001
                return code.describe_error(error)
            totals.append(number)
        return totals

    return combine
