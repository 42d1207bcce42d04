"""The rewards of a run, computed side by side for a group and added up."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streamrl.errors import ConfigError, DeadlineError, RewardError
from streamrl.messages import COMPONENT_PREFIX, COST_PREFIX, Array, Prompt, parse_uid

_Task = asyncio.Task[list[float]]


class Reward(Protocol):
    """One way to judge the completions of a prompt."""

    def check(self, prompt: Prompt) -> None:
        """Raise RewardError if this prompt's row lacks what the reward needs."""
        ...

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """One finite number per completion, or RewardError. Never 0 for what went wrong."""
        ...


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
class Component:
    """A reward under the name it is logged as, and its factor in the score."""

    name: str
    weight: float
    reward: Reward


class RewardSet:
    """All rewards of a run, or all costs. `timeout_s` is the deadline of one group."""

    def __init__(
        self, components: Sequence[Component], *, timeout_s: float, judged: Judged = REWARDS
    ) -> None:
        self._components = tuple(components)
        self._timeout_s = timeout_s
        self._judged = judged

    @property
    def names(self) -> tuple[str, ...]:
        """Component names, in the order of the config."""
        return tuple(component.name for component in self._components)

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of each component."""
        return tuple(self._judged.prefix + name for name in self.names)

    def check(self, prompts: Sequence[Prompt], *, place: str = "prompts") -> None:
        """Raise ConfigError for the first prompt that a reward cannot judge.

        `place` is named with the row: the data file, where the prompts are of one.
        """
        for prompt in prompts:
            for component in self._components:
                try:
                    component.reward.check(prompt)
                except RewardError as error:
                    number = parse_uid(prompt.uid)[1] + 1
                    raise ConfigError(
                        f"{place} row {number} (uid {prompt.uid}):"
                        f" {self._judged.word} {component.name}: {error}"
                    ) from error

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> dict[str, Array]:
        """float32 [G] for G completions: each component, and `scores` or `costs`, the weighted sum.

        Raises RewardError, or DeadlineError when the time is over, naming reward and uid. A reward
        that does not react to being cancelled is left behind, not waited for.
        """
        tasks = [
            asyncio.create_task(component.reward.score(prompt, completions))
            for component in self._components
        ]
        try:
            await asyncio.wait(tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            self._raise_failure(prompt, tasks)
        finally:
            for task in tasks:
                task.cancel()
        columns: dict[str, Array] = {}
        word = self._judged.word
        total = np.zeros(len(completions))
        for component, task in zip(self._components, tasks, strict=True):
            where = f"{word} {component.name}, uid {prompt.uid}"
            column = _column(task.result(), len(completions), where)
            columns[self._judged.prefix + component.name] = column
            total += component.weight * column.astype(np.float64)
        where = f"weighted sum, uid {prompt.uid}"
        columns[self._judged.total] = _column(total, len(completions), where)
        return columns

    def _raise_failure(self, prompt: Prompt, tasks: Sequence[_Task]) -> None:
        word = self._judged.word
        ended = {name: task for name, task in zip(self.names, tasks, strict=True) if task.done()}
        failures = {
            name: RewardError("it cancelled itself") if task.cancelled() else task.exception()
            for name, task in ended.items()
        }
        for name, failure in failures.items():
            if isinstance(failure, RewardError):
                raise RewardError(f"{word} {name}, uid {prompt.uid}: {failure}") from failure
            if failure is not None:
                raise failure
        late = [name for name in self.names if name not in ended]
        if late:
            raise DeadlineError(
                f"{word} {', '.join(late)}, uid {prompt.uid}: no result in {self._timeout_s:g} s "
                "(scorer.timeout_s)"
            )


def _column(values: Sequence[float] | Array, size: int, where: str) -> Array:
    if len(values) != size:
        raise RewardError(f"{where}: {len(values)} numbers for {size} completions")
    numbers = np.array(values, np.float64)
    bad = ~(np.abs(numbers) <= np.finfo(np.float32).max)
    if bad.any():
        place = int(np.argmax(bad))
        raise RewardError(f"{where}: completion {place} has {numbers[place]}, not a finite float32")
    return numbers.astype(np.float32)
