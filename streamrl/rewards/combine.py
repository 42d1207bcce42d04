"""How the components of a completion become its score: weights and gates, or a user's function."""

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

#: What a user's function may ask for, by name.
COMBINE_PARAMETERS = ("rewards", "prompt", "completion")
ResultsByComponent = Mapping[str, Sequence[RewardResult]]
ComponentScores = dict[str, float | None]
"""The number of each component, by name."""


@dataclass(frozen=True)
class RewardComponent:
    """A reward under the name it is logged as, its factor in the score, and whether it is a gate.

    Where a gate is not passed the score is 0.
    """

    name: str
    weight: float
    is_gate: bool
    reward: Reward


class ScoreCombiner(Protocol):
    """Makes one score of the judgements of each completion."""

    async def start(self) -> None:
        """Make ready what it takes. Raises ConfigError for what cannot be used."""
        ...

    async def combine_scores(
        self, prompt: Prompt, completions: Sequence[str], judgements: ResultsByComponent
    ) -> Array:
        """float64 [G]. Raises RewardError."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


class WeightedSumCombiner:
    """The sum of weight times score, and 0 where a gate is not passed. Added in float64.

    A component that says nothing of a completion is left out for it, as in TRL.
    """

    def __init__(self, components: Sequence[RewardComponent]) -> None:
        self._components = components

    async def start(self) -> None:
        """It needs nothing."""

    async def close(self) -> None:
        """It has nothing."""

    async def combine_scores(
        self, prompt: Prompt, completions: Sequence[str], judgements: ResultsByComponent
    ) -> Array:
        """float64 [G]. Raises RewardError if nothing that counts is said of a completion."""
        total = np.zeros(len(completions))
        opened = np.ones(len(completions), np.bool_)
        is_judged = np.zeros(len(completions), np.bool_)
        for component in self._components:
            found = judgements[component.name]
            said = np.array([not one.is_not_judged for one in found])
            scores = np.array([one.score for one in found], np.float64)
            total += component.weight * np.where(said, scores, 0.0)
            if component.is_gate:
                opened &= [one.outcome is RewardOutcome.PASS or one.is_not_judged for one in found]
            if component.is_gate or component.weight:
                is_judged |= said
        counted = [one for one in self._components if one.is_gate or one.weight]
        if counted and not is_judged.all():
            place, names = int(np.argmin(is_judged)), ", ".join(one.name for one in counted)
            raise RewardError(f"completion {place}: {names} returned None, so that it has no score")
        return np.where(opened, total, 0.0)


class FunctionCombiner:
    """A user's `combine(rewards, prompt, completion)`, with those of the parameters it wants.

    rewards has the number of each component by name, None where it says nothing. It runs in a
    worker process.
    """

    def __init__(self, scorer: ScorerConfig) -> None:
        load_combine_function(scorer.combine)
        given = RewardSpec("combine", WorkerOptions(replicas=1), RewardContext(scorer))
        self._worker_reward = WorkerReward(
            "streamrl.rewards.combine:make_combine_handler", scorer.combine, given
        )

    async def start(self) -> None:
        """Start its worker."""
        await self._worker_reward.start()

    async def close(self) -> None:
        """End its worker."""
        await self._worker_reward.close()

    async def combine_scores(
        self, prompt: Prompt, completions: Sequence[str], judgements: ResultsByComponent
    ) -> Array:
        """What the function returns for each completion. Raises RewardError if it is no number."""
        scores = [
            {name: _score_or_none(found[i]) for name, found in judgements.items()}
            for i in range(len(completions))
        ]
        totals = await self._worker_reward.call_worker((prompt, list(completions), scores))
        return np.array(totals, np.float64)


def _score_or_none(judgement: RewardResult) -> float | None:
    return None if judgement.is_not_judged else judgement.score


def load_combine_function(reference: str) -> tuple[FileFunction, Sequence[str]]:
    """The function of `scorer.combine`, and what it asks for.

    Raises ConfigError if it cannot be used.
    """
    code = load_referenced_function(reference, setting="scorer.combine")
    return code, code.select_arguments(COMBINE_PARAMETERS)


def make_combine_handler(reference: str) -> Callable[[Any], list[float] | str]:
    """What the worker answers with: a number per completion, or why there is none."""
    code, asked = load_combine_function(reference)

    def combine(request: tuple[Prompt, list[str], list[ComponentScores]]) -> list[float] | str:
        prompt, completions, scores = request
        totals = []
        for place, (completion, rewards) in enumerate(zip(completions, scores, strict=True)):
            offered = {"rewards": rewards, "prompt": prompt, "completion": completion}
            found = _call_function(code, {key: offered[key] for key in asked})
            try:
                totals.append(_require_number(code, found, place))
            except RewardError as error:
                return str(error)
            # What is returned may be anything, and do anything when it is looked at.
            except BaseException as error:  # noqa: BLE001
                return code.describe_error(error)
        return totals

    return combine


def _call_function(code: FileFunction, arguments: Mapping[str, Any]) -> Any:
    try:
        return code.function(**arguments)
    # Whatever a user's function does wrong, exit() included.
    except BaseException as error:
        raise RewardError(code.describe_error(error)) from error


def _require_number(code: FileFunction, found: Any, place: int) -> float:
    number = to_finite_float(found)
    if number is None:
        raise RewardError(
            f"{code.name} in {code.file} returned {format_value(found)} for completion {place},"
            " not a number"
        )
    return number


def build_combiner(components: Sequence[RewardComponent], scorer: ScorerConfig) -> ScoreCombiner:
    """What `scorer.combine` names. Raises ConfigError if it cannot be used, or weights are set."""
    for component in components:
        if component.is_gate or component.weight != 1.0:
            raise ConfigError(
                f"scorer.combine={scorer.combine}: makes the score, so that weight and gate of"
                f" reward {component.name} mean nothing"
            )
    return FunctionCombiner(scorer)
