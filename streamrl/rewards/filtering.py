"""Dynamic sampling: which scored groups are taken out of the stream instead of being trained.

A group whose rollouts all got the same reward has no advantage to learn from. DAPO (Yu et al.
2025, arXiv 2503.14476, section 3.2) takes it out and samples another prompt in its place.
"""

import inspect
import math
import reprlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Protocol

import numpy as np

from streamrl.errors import ConfigError, RewardError
from streamrl.messages import COMPONENT_PREFIX, Columns, Prompt
from streamrl.rewards.user_function import find_function, required_parameters
from streamrl.user_module import failure_place

#: What a user's function may ask for, by name.
OFFERED = ("prompt", "scores", "rewards")


@dataclass
class FilterConfig:
    """Which scored groups are taken out and replaced (dynamic sampling).

    kind: none; equal_rewards: all rewards of the group are equal; mean_outside: their mean does not
        lie inside the open interval (low, high); function: what the user's function says.
    low: kind mean_outside: where the interval begins.
    high: kind mean_outside: where the interval ends.
    path: kind function: the Python file.
    function: kind function: the function's name in it.
    max_filter_rounds: the run ends with an error when this many steps' worth of groups were
        filtered for one step.
    """

    kind: str = "none"
    low: float = 0.0
    high: float = 1.0
    path: str = ""
    function: str = ""
    max_filter_rounds: int = 10

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"filter.kind={self.kind}: must be one of {', '.join(KINDS)}")
        for key in ("low", "high"):
            if not math.isfinite(vars(self)[key]):
                raise ConfigError(f"filter.{key}={vars(self)[key]}: must be finite")
        if self.low >= self.high:
            raise ConfigError(f"filter.low={self.low}: must be below filter.high={self.high}")
        for key in ("path", "function"):
            value = vars(self)[key]
            if self.kind == "function" and not value:
                raise ConfigError(f"filter.{key}=: kind function needs it")
            if self.kind != "function" and value:
                raise ConfigError(
                    f"filter.{key}={value}: means nothing to a filter of kind {self.kind}"
                )
        if self.max_filter_rounds < 1:
            raise ConfigError(
                f"filter.max_filter_rounds={self.max_filter_rounds}: must be 1 or more"
            )


class GroupFilter(Protocol):
    """Says of a scored group whether it is taken out."""

    def reason(self, prompt: Prompt, columns: Columns) -> str | None:
        """Why the group is taken out, in words, or None: it stays.

        `columns` holds `scores` and `reward/<name>`, float32 [G], and may hold others. Raises
        RewardError if that cannot be said.
        """
        ...


class EqualRewardsFilter:
    """Kind `equal_rewards`: takes out a group of two or more whose scores are exactly equal."""

    def reason(self, prompt: Prompt, columns: Columns) -> str | None:
        """Such as "all 8 rewards are 1"."""
        scores = columns["scores"]
        if len(scores) == 1 or (scores != scores[0]).any():
            return None
        return f"all {len(scores)} rewards are {float(scores[0]):zg}"


class MeanOutsideFilter:
    """Kind `mean_outside`: takes out a group whose mean score is not inside (low, high)."""

    def __init__(self, config: FilterConfig) -> None:
        self._low, self._high = config.low, config.high

    def reason(self, prompt: Prompt, columns: Columns) -> str | None:
        """Such as "mean reward 0 is not inside (0, 1)". The mean is float64."""
        # fmean adds exactly, so the order of the rollouts never decides.
        mean = statistics.fmean(columns["scores"].tolist())
        if self._low < mean < self._high:
            return None
        return f"mean reward {mean:zg} is not inside ({self._low:zg}, {self._high:zg})"


class FunctionFilter:
    """Kind `function`: takes out a group of which the user's function does not say True.

    The function is `keep(prompt, scores, rewards)`, with those of the parameters that it wants:
    scores is a list with a float per rollout, rewards has such a list for each named reward. It
    runs in the caller's thread with no deadline, so it should be quick: no model, no network.
    """

    def __init__(self, config: FilterConfig) -> None:
        self._name = config.function
        self._path, self._function, parameters = find_function(
            config.path, config.function, section="filter"
        )
        self._asked = _asked(config, parameters)
        if inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"filter.function={self._name}: in {config.path} it is async")

    def reason(self, prompt: Prompt, columns: Columns) -> str | None:
        """That the function said so. Raises RewardError if it fails, or returns no bool."""
        kept = self._call(prompt, columns)
        if not isinstance(kept, bool | np.bool_):
            found = " ".join(reprlib.repr(kept).split())
            raise RewardError(
                f"filter, uid {prompt.uid}: {self._name} in {self._path} returned {found}, "
                "not True or False"
            )
        return None if kept else f"{self._name} in {self._path} returned False"

    def _call(self, prompt: Prompt, columns: Columns) -> Any:
        rewards = {
            name.removeprefix(COMPONENT_PREFIX): column.tolist()
            for name, column in columns.items()
            if name.startswith(COMPONENT_PREFIX)
        }
        offered = {"prompt": prompt, "scores": columns["scores"].tolist(), "rewards": rewards}
        try:
            return self._function(**{name: offered[name] for name in self._asked})
        # Whatever a user's function does wrong, exit() included.
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"filter, uid {prompt.uid}: {self._name} at {failure_place(self._path, error)}"
            ) from error


def _asked(config: FilterConfig, parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
    """Those of OFFERED that the function takes. Raises ConfigError if it must have another."""
    unnamed = {name for name, p in parameters.items() if p.kind is Parameter.POSITIONAL_ONLY}
    refused = unnamed | (required_parameters(parameters) - set(OFFERED))
    if refused:
        raise ConfigError(
            f"filter.function={config.function}: in {config.path} it asks for "
            f"{', '.join(name for name in parameters if name in refused)}; "
            f"it is given, by name, any of {', '.join(OFFERED)}"
        )
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        return OFFERED
    named = {name for name, p in parameters.items() if p.kind is not Parameter.VAR_POSITIONAL}
    return tuple(name for name in OFFERED if name in named)


KINDS: Mapping[str, Callable[[FilterConfig], GroupFilter | None]] = {
    "none": lambda _: None,
    "equal_rewards": lambda _: EqualRewardsFilter(),
    "mean_outside": MeanOutsideFilter,
    "function": FunctionFilter,
}


def build_filter(config: FilterConfig) -> GroupFilter | None:
    """The filter of a run, or None where nothing is filtered.

    Raises ConfigError, for kind function, if the file or the function cannot be used.
    """
    return KINDS[config.kind](config)
