"""All rewards of a run: scored concurrently for a group, checked and combined."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from streamrl.dataflow import COST_CALL, REWARD_CALL
from streamrl.errors import ConfigError, RewardError
from streamrl.messages import COMPONENT_PREFIX, COST_PREFIX, Array, Prompt, describe_prompt
from streamrl.rewards.interface.completion import LAST_TURN, Completion
from streamrl.rewards.interface.reward import Reward
from streamrl.rewards.metric_means import MetricSums, add_extra_metrics
from streamrl.rewards.token_scores import PieceFunction, check_places, place_group_scores
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.reward_result import RewardOutcome, RewardResult

ResultsByComponent = Mapping[str, Sequence[RewardResult]]


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
) -> tuple[Array, Array]:
    """Return the sum of weight * score of each of G = `size` completions, 0 if a gate fails.

    Also returns whether each passes all gates, bool [G].

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
    return np.where(passes_gates, total, 0.0), passes_gates


START_TIMEOUT_S = 180.0
"""Deadline to start a reward; long because a reward may load a model."""


@dataclass(frozen=True)
class ScoreSpec:
    """Words that differ between rewards and costs: config section, noun in messages, columns.

    column_prefix: prefix of a component's column. total_column: column of the combined score.
    """

    section: str
    noun: str
    column_prefix: str
    total_column: str


REWARDS = ScoreSpec("rewards", "reward", COMPONENT_PREFIX, "scores")
COSTS = ScoreSpec("costs", "cost", COST_PREFIX, "costs")
SCORE_SPECS = {REWARD_CALL.role: REWARDS, COST_CALL.role: COSTS}
"""Words by the role that scores."""


@dataclass(frozen=True)
class GroupRewardResult:
    """Results of all components for the completions of a prompt.

    components: a result per completion, by component name.
    totals: combined scores, float64 [G].
    passes_gates: bool [G].
    """

    components: ResultsByComponent
    totals: Array
    passes_gates: Array

    @property
    def has_places(self) -> bool:
        """True if a part of a score falls elsewhere than on the last token."""
        return any(r.has_places for results in self.components.values() for r in results)


class RewardSet:
    """All rewards, or all costs, of a run. Every reward enforces its own timeout.

    score_spec: REWARDS or COSTS.
    """

    def __init__(
        self, components: Sequence[RewardComponent], *, score_spec: ScoreSpec = REWARDS
    ) -> None:
        self._components = tuple(components)
        self._score_spec = score_spec
        self._outcome_counts: Counter[str] = Counter()
        self._extra_metrics = MetricSums()
        self._last_kill_counts: Counter[str] = Counter()

    @property
    def component_names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self._components)

    @property
    def model_bytes(self) -> int:
        return sum(component.reward.model_bytes for component in self._components)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for the first prompt that a reward cannot score."""
        for prompt in prompts:
            for component in self._components:
                try:
                    component.reward.validate_prompt(prompt)
                except RewardError as error:
                    where = describe_prompt(prompt)
                    label = f"{self._score_spec.noun} {component.name}"
                    raise ConfigError(f"{where}: {label}: {error}") from error

    async def run_preflight(self) -> list[str]:
        """Check all rewards, before `check_prompts`; return notes. Raises ConfigError."""
        notes = []
        for component in self._components:
            try:
                async with self._start_deadline(component.name):
                    notes.append(await component.reward.run_preflight())
            except RewardError as error:
                label = f"{self._score_spec.noun} {component.name}"
                raise ConfigError(f"{label}: {error}") from error
        return [note for note in notes if note]

    async def start(self) -> None:
        """Start all rewards; close them again if a start fails. Raises ConfigError, RewardError."""
        try:
            for component in self._components:
                async with self._start_deadline(component.name):
                    await component.reward.start()
        except BaseException:
            await self.close()
            raise

    @asynccontextmanager
    async def _start_deadline(self, name: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                yield
        except TimeoutError:
            noun = self._score_spec.noun
            raise RewardError(f"{noun} {name}: not ready in {START_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        for component in self._components:
            await component.reward.close()

    def to_columns(self, group_result: GroupRewardResult) -> dict[str, Array]:
        """Return the scores of a group as columns, float32 [G]: one per component, and combined."""
        columns: dict[str, Array] = {
            self._score_spec.column_prefix + name: np.array(
                [result.score for result in results], np.float32
            )
            for name, results in group_result.components.items()
        }
        return {**columns, self._score_spec.total_column: group_result.totals.astype(np.float32)}

    async def judge_texts(self, prompt: Prompt, completions: Sequence[str]) -> GroupRewardResult:
        """Score completions of a single turn, as `judge_group` does."""
        return await self.judge_group(prompt, [*map(Completion.from_text, completions)])

    async def judge_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> GroupRewardResult:
        """Score the completions of a group with all rewards, concurrently, and combine the scores.

        Raises RewardError naming the reward and the uid.
        """
        scored = await map_concurrently(
            lambda component: self._score_component(component, prompt, completions),
            self._components,
            most=len(self._components),
        )
        components = dict(zip(self.component_names, scored, strict=True))
        totals, passes_gates = self._combine_scores(prompt, components, len(completions))
        for name, results in components.items():
            self._outcome_counts.update(result.outcome.value for result in results)
            add_extra_metrics(self._extra_metrics, self._score_spec.column_prefix + name, results)
        return GroupRewardResult(components, totals, passes_gates)

    def count_prompt(self, is_right: Array) -> float:
        """Add a prompt to the means of prompts whose completions are all right, or all wrong.

        `is_right` bool [G]. Returns the share of right completions.
        """
        self._extra_metrics.add("rollout/all_right_frac", float(is_right.all()))
        self._extra_metrics.add("rollout/all_wrong_frac", float(not is_right.any()))
        return float(is_right.mean())

    def place_scores(
        self,
        group_result: GroupRewardResult,
        completions: Sequence[Completion],
        measure_pieces: PieceFunction,
    ) -> Array:
        """Return the combined scores of a group by sampled token, as `place_group_scores` does."""
        weights = {part.name: (part.weight, part.part) for part in self._components}
        results, passes = group_result.components, group_result.passes_gates
        return place_group_scores(results, weights, passes, completions, measure_pieces)

    async def _score_component(
        self, component: RewardComponent, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[RewardResult]:
        """Return the results of a component, checked."""
        task = asyncio.current_task()
        where = f"{self._score_spec.noun} {component.name}, {describe_prompt(prompt)}"
        try:
            results = await component.reward.score_completions(prompt, completions, component.part)
        except RewardError as error:
            raise type(error)(f"{where}: {error}") from error
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            raise RewardError(f"{where}: the reward cancelled itself") from None
        scores = np.array([0.0 if r.is_not_judged else r.score for r in results])
        _validate_finite(scores, where)
        for i, result in enumerate(results):
            try:
                if result.has_places and self._score_spec is COSTS:
                    raise RewardError("has scores of parts; a cost falls on the last token")
                check_places(result, completions[i], component.part)
            except RewardError as error:
                raise RewardError(f"{where}: completion {i} {error}") from None
        return results

    def _combine_scores(
        self, prompt: Prompt, components: ResultsByComponent, size: int
    ) -> tuple[Array, Array]:
        where = f"combined {self._score_spec.noun}, {describe_prompt(prompt)}"
        try:
            totals, passes_gates = sum_weighted(self._components, components, size)
        except RewardError as error:
            raise type(error)(f"{where}: {error}") from error
        return _validate_finite(totals, where), passes_gates

    def drain_counts(self) -> dict[str, float]:
        """Return the counts since the last call by metric name, and reset them.

        Counts completions by outcome and killed processes by cause, and includes the sum and the
        count of every extra metric (see metric_means.py).
        """
        outcomes, self._outcome_counts = self._outcome_counts, Counter()
        total_kills: Counter[str] = Counter()
        for component in self._components:
            total_kills += component.reward.kill_counts
        new_kills, self._last_kill_counts = total_kills - self._last_kill_counts, total_kills
        counts = {f"verdicts/{outcome}": count for outcome, count in outcomes.items()}
        kill_counts = {f"scorer/killed/{cause}": count for cause, count in new_kills.items()}
        return {**counts, **kill_counts, **self._extra_metrics.drain_sums()}


def _validate_finite(numbers: Array, where: str) -> Array:
    bad = ~(np.abs(numbers) <= np.finfo(np.float32).max)
    if bad.any():
        i = int(np.argmax(bad))
        raise RewardError(f"{where}: completion {i} has {numbers[i]}, not a finite float32")
    return numbers
