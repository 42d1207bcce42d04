"""The rewards of a run, computed side by side for a group and combined."""

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
    ResultsByComponent,
    RewardComponent,
    ScoreCombiner,
    WeightedSumCombiner,
)
from streamrl.rewards.interface.verdict import RewardResult
from streamrl.rewards.metric_means import ExtraMetricSums

START_TIMEOUT_S = 180.0
"""Deadline of getting one reward ready, s: a model may have to be loaded."""
_ScoreTask = asyncio.Task[tuple[Sequence[RewardResult], float]]


@dataclass(frozen=True)
class ScoreSpec:
    """What is computed of a completion: `noun` for one component, the sum's column `total`."""

    section: str
    noun: str
    column_prefix: str
    total_column: str


REWARDS = ScoreSpec("rewards", "reward", COMPONENT_PREFIX, "scores")
COSTS = ScoreSpec("costs", "cost", COST_PREFIX, "costs")


@dataclass(frozen=True)
class GroupRewardResult:
    """All that was said of the completions of one prompt.

    components: by name, a judgement per completion. totals: float64 [G], what they are combined to.
    seconds: by name, how long the whole group took.
    """

    components: ResultsByComponent
    totals: Array
    seconds: Mapping[str, float]


@contextmanager
def naming_config_errors(section: str, place: int) -> Iterator[None]:
    """A reward does not know which one it is, nor that it is a cost: errors are told here."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("rewards.", f"{section}[{place}].", 1)) from None


class RewardSet:
    """All rewards of a run, or all costs. Each bounds its own time."""

    def __init__(
        self,
        components: Sequence[RewardComponent],
        combination: ScoreCombiner | None = None,
        *,
        judged: ScoreSpec = REWARDS,
    ) -> None:
        self._components = tuple(components)
        self._combiner = combination or WeightedSumCombiner(components)
        self._score_spec = judged
        self._outcome_counts: Counter[str] = Counter()
        self._extra_metrics = ExtraMetricSums()
        self._last_kill_counts: Counter[str] = Counter()

    @property
    def component_names(self) -> tuple[str, ...]:
        """Component names, in the order of the config."""
        return tuple(component.name for component in self._components)

    @property
    def component_columns(self) -> tuple[str, ...]:
        """The column of each component."""
        return tuple(self._score_spec.column_prefix + name for name in self.component_names)

    @property
    def model_bytes(self) -> int:
        """Weights of the models that are asked in the process of the rewards, as stored."""
        return sum(component.reward.model_bytes for component in self._components)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for the first prompt that a reward cannot judge."""
        for prompt in prompts:
            for component in self._components:
                try:
                    component.reward.validate_prompt(prompt)
                except RewardError as error:
                    where = describe_prompt(prompt)
                    word = f"{self._score_spec.noun} {component.name}"
                    raise ConfigError(f"{where}: {word}: {error}") from error

    async def run_preflight(self) -> list[str]:
        """What the user should know before a run; `check` comes after it.

        Raises ConfigError for what cannot be had.
        """
        notes = []
        for place, component in enumerate(self._components):
            with naming_config_errors(self._score_spec.section, place):
                try:
                    async with self._start_deadline(component.name):
                        notes.append(await component.reward.run_preflight())
                except RewardError as error:
                    word = f"{self._score_spec.noun} {component.name}"
                    raise ConfigError(f"{word}: {error}") from error
        return [note for note in notes if note]

    async def start(self) -> None:
        """Make all of them ready. Raises ConfigError or RewardError.

        If one of them cannot be made ready, all are closed again.
        """
        try:
            for place, component in enumerate(self._components):
                with naming_config_errors(self._score_spec.section, place):
                    async with self._start_deadline(component.name):
                        await component.reward.start()
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
            word = self._score_spec.noun
            raise RewardError(f"{word} {name}: not ready in {START_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        """Leave no process behind."""
        for component in self._components:
            await component.reward.close()
        await self._combiner.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> dict[str, Array]:
        """float32 [G] for G completions: each component, and `scores` or `costs` combined.

        Raises RewardError as `judge` does.
        """
        return self.to_columns(await self.judge_group(prompt, completions))

    def to_columns(self, judgement: GroupRewardResult) -> dict[str, Array]:
        """What goes into the queue."""
        columns: dict[str, Array] = {
            self._score_spec.column_prefix + name: np.array(
                [one.score for one in found], np.float32
            )
            for name, found in judgement.components.items()
        }
        return {**columns, self._score_spec.total_column: judgement.totals.astype(np.float32)}

    async def judge_group(self, prompt: Prompt, completions: Sequence[str]) -> GroupRewardResult:
        """All that the rewards say. Raises RewardError naming reward and uid."""
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
            found, _ = task.result()
            where = f"{self._score_spec.noun} {name}, {describe_prompt(prompt)}"
            _validate_size(found, len(completions), where)
            _validate_finite(np.array([0.0 if o.is_not_judged else o.score for o in found]), where)
            components[name] = found
        totals = await self._combine_scores(prompt, completions, components)
        for name, found in components.items():
            self._outcome_counts.update(one.outcome.value for one in found)
            self._extra_metrics.add_results(self._score_spec.column_prefix + name, found)
        seconds = {
            name: task.result()[1] for name, task in zip(self.component_names, tasks, strict=True)
        }
        return GroupRewardResult(components, totals, seconds)

    @staticmethod
    async def _score_timed(
        component: RewardComponent, prompt: Prompt, completions: Sequence[str]
    ) -> tuple[Sequence[RewardResult], float]:
        started = time.perf_counter()
        found = await component.reward.score(prompt, completions)
        return found, time.perf_counter() - started

    async def _combine_scores(
        self, prompt: Prompt, completions: Sequence[str], components: ResultsByComponent
    ) -> Array:
        where = f"combined {self._score_spec.noun}, {describe_prompt(prompt)}"
        try:
            totals = await self._combiner.combine_scores(prompt, completions, components)
        except RewardError as error:
            raise type(error)(f"{where}: {error}") from error
        _validate_size(totals, len(completions), where)
        return _validate_finite(totals, where)

    def _raise_failure(self, prompt: Prompt, tasks: Sequence[_ScoreTask]) -> None:
        for name, task in zip(self.component_names, tasks, strict=True):
            if not task.done():
                continue
            failure = RewardError("it cancelled itself") if task.cancelled() else task.exception()
            if isinstance(failure, RewardError):
                where = f"{self._score_spec.noun} {name}, {describe_prompt(prompt)}"
                raise type(failure)(f"{where}: {failure}") from failure
            if failure is not None:
                raise failure

    def drain_counts(self) -> dict[str, float]:
        """Since the last call: completions by verdict, processes ended by cause, further numbers.

        Of a number that a reward gives besides its score it has the sum, and how many there were.
        """
        verdicts, self._outcome_counts = self._outcome_counts, Counter()
        killed: Counter[str] = Counter()
        for component in self._components:
            killed += component.reward.kill_counts
        ended, self._last_kill_counts = killed - self._last_kill_counts, killed
        counts = {f"verdicts/{verdict}": count for verdict, count in verdicts.items()}
        killed_counts = {f"scorer/killed/{cause}": count for cause, count in ended.items()}
        return {**counts, **killed_counts, **self._extra_metrics.drain_sums()}


def _validate_size(found: Sequence[RewardResult] | Array, size: int, where: str) -> None:
    if len(found) != size:
        raise RewardError(f"{where}: {len(found)} numbers for {size} completions")


def _validate_finite(numbers: Array, where: str) -> Array:
    """The numbers, which a float32 can hold. Raises RewardError for others."""
    bad = ~(np.abs(numbers) <= np.finfo(np.float32).max)
    if bad.any():
        place = int(np.argmax(bad))
        raise RewardError(f"{where}: completion {place} has {numbers[place]}, not a finite float32")
    return numbers
