"""All rewards of a run: scored concurrently for a group, checked and combined."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import COMPONENT_PREFIX, COST_PREFIX, Array, Prompt, describe_prompt
from streamrl.rewards.combine import (
    FunctionCombiner,
    ResultsByComponent,
    RewardComponent,
    sum_weighted,
)
from streamrl.rewards.interface.completion import LAST_TURN, Completion
from streamrl.rewards.interface.reward_result import RewardResult
from streamrl.rewards.metric_means import MetricSums, add_extra_metrics

START_TIMEOUT_S = 180.0
"""Deadline to start a reward; long because a reward may load a model."""
_ScoreTask = asyncio.Task[tuple[Sequence[RewardResult], float]]


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


@dataclass(frozen=True)
class GroupRewardResult:
    """Results of all components for the completions of a prompt.

    components: a result per completion, by component name.
    totals: combined scores, float64 [G].
    seconds: duration for the whole group, by component name.
    """

    components: ResultsByComponent
    totals: Array
    seconds: Mapping[str, float]


@contextmanager
def naming_config_errors(section: str, index: int) -> Iterator[None]:
    """Replace "rewards." in a ConfigError by the config entry's position, such as "costs[1].".

    A reward knows neither its position in the list nor whether it computes a cost.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("rewards.", f"{section}[{index}].", 1)) from None


class RewardSet:
    """All rewards, or all costs, of a run. Every reward enforces its own timeout.

    combiner: replaces the weighted sum of the component scores. score_spec: REWARDS or COSTS.
    """

    def __init__(
        self,
        components: Sequence[RewardComponent],
        combiner: FunctionCombiner | None = None,
        *,
        score_spec: ScoreSpec = REWARDS,
    ) -> None:
        self._components = tuple(components)
        self._combiner = combiner
        self._score_spec = score_spec
        self._outcome_counts: Counter[str] = Counter()
        self._extra_metrics = MetricSums()
        self._last_kill_counts: Counter[str] = Counter()

    @property
    def component_names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self._components)

    @property
    def component_columns(self) -> tuple[str, ...]:
        return tuple(self._score_spec.column_prefix + name for name in self.component_names)

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
        for index, component in enumerate(self._components):
            with naming_config_errors(self._score_spec.section, index):
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
            for index, component in enumerate(self._components):
                with naming_config_errors(self._score_spec.section, index):
                    async with self._start_deadline(component.name):
                        await component.reward.start()
            if self._combiner is not None:
                async with self._start_deadline("combine"):
                    await self._combiner.start()
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
        if self._combiner is not None:
            await self._combiner.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> dict[str, Array]:
        """Score a group; return columns, float32 [G]: one per component, and `scores` or `costs`
        combined.

        Raises RewardError naming the reward and the uid.
        """
        return self.to_columns(await self.judge_texts(prompt, completions))

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
        tasks = [
            asyncio.create_task(self._score_timed(component, prompt, completions))
            for component in self._components
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            self._raise_failure(prompt, tasks)
        finally:
            for task in tasks:
                task.cancel()
        components: dict[str, Sequence[RewardResult]] = {}
        for name, task in zip(self.component_names, tasks, strict=True):
            results, _ = task.result()
            where = f"{self._score_spec.noun} {name}, {describe_prompt(prompt)}"
            _validate_size(results, len(completions), where)
            scores = np.array([0.0 if r.is_not_judged else r.score for r in results])
            _validate_finite(scores, where)
            components[name] = results
        texts = [completion.get_part(LAST_TURN) for completion in completions]
        totals = await self._combine_scores(prompt, texts, components)
        for name, results in components.items():
            self._outcome_counts.update(result.outcome.value for result in results)
            add_extra_metrics(self._extra_metrics, self._score_spec.column_prefix + name, results)
        seconds = {
            name: task.result()[1] for name, task in zip(self.component_names, tasks, strict=True)
        }
        return GroupRewardResult(components, totals, seconds)

    @staticmethod
    async def _score_timed(
        component: RewardComponent, prompt: Prompt, completions: Sequence[Completion]
    ) -> tuple[Sequence[RewardResult], float]:
        started = time.perf_counter()
        results = await component.reward.score_completions(prompt, completions, component.part)
        return results, time.perf_counter() - started

    async def _combine_scores(
        self, prompt: Prompt, completions: Sequence[str], components: ResultsByComponent
    ) -> Array:
        where = f"combined {self._score_spec.noun}, {describe_prompt(prompt)}"
        try:
            if self._combiner is None:
                totals = sum_weighted(self._components, components, len(completions))
            else:
                totals = await self._combiner.combine_scores(prompt, completions, components)
        except RewardError as error:
            raise type(error)(f"{where}: {error}") from error
        _validate_size(totals, len(completions), where)
        return _validate_finite(totals, where)

    def _raise_failure(self, prompt: Prompt, tasks: Sequence[_ScoreTask]) -> None:
        for name, task in zip(self.component_names, tasks, strict=True):
            if not task.done():
                continue
            failure = (
                RewardError("the reward cancelled itself") if task.cancelled() else task.exception()
            )
            if isinstance(failure, RewardError):
                where = f"{self._score_spec.noun} {name}, {describe_prompt(prompt)}"
                raise type(failure)(f"{where}: {failure}") from failure
            if failure is not None:
                raise failure

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


def _validate_size(results: Sequence[RewardResult] | Array, size: int, where: str) -> None:
    if len(results) != size:
        raise RewardError(f"{where}: {len(results)} numbers for {size} completions")


def _validate_finite(numbers: Array, where: str) -> Array:
    bad = ~(np.abs(numbers) <= np.finfo(np.float32).max)
    if bad.any():
        i = int(np.argmax(bad))
        raise RewardError(f"{where}: completion {i} has {numbers[i]}, not a finite float32")
    return numbers
