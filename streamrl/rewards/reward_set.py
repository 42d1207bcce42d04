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
from streamrl.rewards.combine import Combination, Component, Judgements, WeightedSum
from streamrl.rewards.interface.verdict import Judgement
from streamrl.rewards.metric_means import NumberSums

START_TIMEOUT_S = 180.0
"""Deadline of getting one reward ready, s: a model may have to be loaded."""
_Task = asyncio.Task[tuple[Sequence[Judgement], float]]


@dataclass(frozen=True)
class Judged:
    """What is computed of a completion: `word` for one component, the sum's column `total`."""

    section: str
    word: str
    prefix: str
    total: str


REWARDS = Judged("rewards", "reward", COMPONENT_PREFIX, "scores")
COSTS = Judged("costs", "cost", COST_PREFIX, "costs")


@dataclass(frozen=True)
class GroupJudgement:
    """All that was said of the completions of one prompt.

    components: by name, a judgement per completion. totals: float64 [G], what they are combined to.
    seconds: by name, how long the whole group took.
    """

    components: Judgements
    totals: Array
    seconds: Mapping[str, float]


@contextmanager
def named(section: str, place: int) -> Iterator[None]:
    """A reward does not know which one it is, nor that it is a cost: errors are told here."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("rewards.", f"{section}[{place}].", 1)) from None


class RewardSet:
    """All rewards of a run, or all costs. Each bounds its own time."""

    def __init__(
        self,
        components: Sequence[Component],
        combination: Combination | None = None,
        *,
        judged: Judged = REWARDS,
    ) -> None:
        self._components = tuple(components)
        self._combination = combination or WeightedSum(components)
        self._judged = judged
        self._verdicts: Counter[str] = Counter()
        self._numbers = NumberSums()
        self._killed_before: Counter[str] = Counter()

    @property
    def names(self) -> tuple[str, ...]:
        """Component names, in the order of the config."""
        return tuple(component.name for component in self._components)

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of each component."""
        return tuple(self._judged.prefix + name for name in self.names)

    @property
    def model_bytes(self) -> int:
        """Weights of the models that are asked in the process of the rewards, as stored."""
        return sum(component.reward.model_bytes for component in self._components)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError for the first prompt that a reward cannot judge."""
        for prompt in prompts:
            for component in self._components:
                try:
                    component.reward.check(prompt)
                except RewardError as error:
                    where = describe_prompt(prompt)
                    word = f"{self._judged.word} {component.name}"
                    raise ConfigError(f"{where}: {word}: {error}") from error

    async def preflight(self) -> list[str]:
        """What the user should know before a run; `check` comes after it.

        Raises ConfigError for what cannot be had.
        """
        notes = []
        for place, component in enumerate(self._components):
            with named(self._judged.section, place):
                try:
                    async with self._ready_in_time(component.name):
                        notes.append(await component.reward.preflight())
                except RewardError as error:
                    word = f"{self._judged.word} {component.name}"
                    raise ConfigError(f"{word}: {error}") from error
        return [note for note in notes if note]

    async def start(self) -> None:
        """Make all of them ready. Raises ConfigError or RewardError.

        If one of them cannot be made ready, all are closed again.
        """
        try:
            for place, component in enumerate(self._components):
                with named(self._judged.section, place):
                    async with self._ready_in_time(component.name):
                        await component.reward.start()
            async with self._ready_in_time("combine"):
                await self._combination.start()
        except BaseException:
            await self.close()
            raise

    @asynccontextmanager
    async def _ready_in_time(self, name: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                yield
        except TimeoutError:
            word = self._judged.word
            raise RewardError(f"{word} {name}: not ready in {START_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        """Leave no process behind."""
        for component in self._components:
            await component.reward.close()
        await self._combination.close()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> dict[str, Array]:
        """float32 [G] for G completions: each component, and `scores` or `costs` combined.

        Raises RewardError as `judge` does.
        """
        return self.columns_of(await self.judge(prompt, completions))

    def columns_of(self, judgement: GroupJudgement) -> dict[str, Array]:
        """What goes into the queue."""
        columns: dict[str, Array] = {
            self._judged.prefix + name: np.array([one.score for one in found], np.float32)
            for name, found in judgement.components.items()
        }
        return {**columns, self._judged.total: judgement.totals.astype(np.float32)}

    async def judge(self, prompt: Prompt, completions: Sequence[str]) -> GroupJudgement:
        """All that the rewards say. Raises RewardError naming reward and uid."""
        tasks = [
            asyncio.create_task(self._timed(component, prompt, completions))
            for component in self._components
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            self._raise_failure(prompt, tasks)
        finally:
            for task in tasks:
                task.cancel()
        components: dict[str, Sequence[Judgement]] = {}
        for name, task in zip(self.names, tasks, strict=True):
            found, _ = task.result()
            where = f"{self._judged.word} {name}, {describe_prompt(prompt)}"
            _check_size(found, len(completions), where)
            _check_finite(np.array([0.0 if o.is_absent else o.score for o in found]), where)
            components[name] = found
        totals = await self._combined(prompt, completions, components)
        for name, found in components.items():
            self._verdicts.update(one.verdict.value for one in found)
            self._numbers.add(self._judged.prefix + name, found)
        seconds = {name: task.result()[1] for name, task in zip(self.names, tasks, strict=True)}
        return GroupJudgement(components, totals, seconds)

    @staticmethod
    async def _timed(
        component: Component, prompt: Prompt, completions: Sequence[str]
    ) -> tuple[Sequence[Judgement], float]:
        started = time.perf_counter()
        found = await component.reward.score(prompt, completions)
        return found, time.perf_counter() - started

    async def _combined(
        self, prompt: Prompt, completions: Sequence[str], components: Judgements
    ) -> Array:
        where = f"combined {self._judged.word}, {describe_prompt(prompt)}"
        try:
            totals = await self._combination.totals(prompt, completions, components)
        except RewardError as error:
            raise type(error)(f"{where}: {error}") from error
        _check_size(totals, len(completions), where)
        return _check_finite(totals, where)

    def _raise_failure(self, prompt: Prompt, tasks: Sequence[_Task]) -> None:
        for name, task in zip(self.names, tasks, strict=True):
            if not task.done():
                continue
            failure = RewardError("it cancelled itself") if task.cancelled() else task.exception()
            if isinstance(failure, RewardError):
                where = f"{self._judged.word} {name}, {describe_prompt(prompt)}"
                raise type(failure)(f"{where}: {failure}") from failure
            if failure is not None:
                raise failure

    def drain_counts(self) -> dict[str, float]:
        """Since the last call: completions by verdict, processes ended by cause, further numbers.

        Of a number that a reward gives besides its score it has the sum, and how many there were.
        """
        verdicts, self._verdicts = self._verdicts, Counter()
        killed: Counter[str] = Counter()
        for component in self._components:
            killed += component.reward.killed
        ended, self._killed_before = killed - self._killed_before, killed
        counts = {f"verdicts/{verdict}": count for verdict, count in verdicts.items()}
        killed_counts = {f"scorer/killed/{cause}": count for cause, count in ended.items()}
        return {**counts, **killed_counts, **self._numbers.drain()}


def _check_size(found: Sequence[Judgement] | Array, size: int, where: str) -> None:
    if len(found) != size:
        raise RewardError(f"{where}: {len(found)} numbers for {size} completions")


def _check_finite(numbers: Array, where: str) -> Array:
    """The numbers, which a float32 can hold. Raises RewardError for others."""
    bad = ~(np.abs(numbers) <= np.finfo(np.float32).max)
    if bad.any():
        place = int(np.argmax(bad))
        raise RewardError(f"{where}: completion {place} has {numbers[place]}, not a finite float32")
    return numbers
