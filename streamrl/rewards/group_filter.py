"""Dynamic sampling: which scored groups are taken out of the stream instead of being trained.

A group whose rollouts all got the same reward has no advantage to learn from. DAPO (Yu et al.
2025, arXiv 2503.14476, section 3.2) takes it out and samples another prompt in its place.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from omegaconf import MISSING

from streamrl.errors import ConfigError, RewardError
from streamrl.files.python_module import load_function
from streamrl.files.typed_settings import read_settings
from streamrl.messages import COMPONENT_PREFIX, Columns, Prompt, describe_prompt
from streamrl.rewards.interface.checks import format_value

AUTO_OVERSAMPLE = "auto"
#: What a user's function may ask for, by name.
FILTER_PARAMETERS = ("prompt", "scores", "rewards")


@dataclass
class FilterConfig:
    """Which scored groups are taken out and replaced (dynamic sampling).

    kind: none; equal_rewards: all rewards of the group are equal; mean_outside: their mean does not
        lie inside the open interval (low, high); function: what the user's function says.
    max_filter_rounds: the run ends with an error when this many steps' worth of groups were
        filtered for one step.
    oversample: prompts that are admitted for each place of a step while nobody knows what the
        filter makes of them, 32 at most; auto: as many as it took lately for one group to be kept.
    options: of the kind, low and high, or path and function; they may stand beside these.
    """

    kind: str = "none"
    max_filter_rounds: int = 10
    oversample: int | float | str = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in FILTER_KINDS:
            raise ConfigError(f"filter.kind={self.kind}: must be one of {', '.join(FILTER_KINDS)}")
        if self.kind == "none" and self.options:
            raise ConfigError(
                f"filter.{next(iter(self.options))}: means nothing to filter.kind=none;"
                " mean_outside takes low and high, function takes path and function"
            )
        read_settings(FILTER_KINDS[self.kind].options_type, self.options, section="filter")
        if self.max_filter_rounds < 1:
            raise ConfigError(
                f"filter.max_filter_rounds={self.max_filter_rounds}: must be 1 or more"
            )
        self._check_oversample()

    def _check_oversample(self) -> None:
        value = self.oversample
        is_number = not isinstance(value, str) and math.isfinite(value) and value >= 1
        if value != AUTO_OVERSAMPLE and not is_number:
            raise ConfigError(
                f"filter.oversample={value}: must be a number from 1 on, or {AUTO_OVERSAMPLE}"
            )
        if value != 1 and not self.is_enabled:
            raise ConfigError(
                f"filter.oversample={value}: means nothing to filter.kind=none: all groups that"
                " are sampled are trained"
            )

    @property
    def is_enabled(self) -> bool:
        """Whether groups may be taken out."""
        return self.kind != "none"

    @property
    def oversample_factor(self) -> float | None:
        """Prompts for a place; None for auto."""
        return None if isinstance(self.oversample, str) else float(self.oversample)


@dataclass
class EmptyFilterOptions:
    """Of a kind that has none."""


@dataclass
class MeanOutsideOptions:
    """Options of kind mean_outside.

    low: where the interval begins.
    high: where the interval ends.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        for key in ("low", "high"):
            if not math.isfinite(vars(self)[key]):
                raise ConfigError(f"{key}={vars(self)[key]}: must be finite")
        if self.low >= self.high:
            raise ConfigError(f"low={self.low}: must be below high={self.high}")


@dataclass
class FunctionFilterOptions:
    """Options of kind function.

    path: the Python file.
    function: the function's name in it.
    """

    path: str = MISSING
    function: str = MISSING


class GroupFilter(Protocol):
    """Says of a scored group whether it is taken out."""

    def explain_rejection(self, prompt: Prompt, columns: Columns) -> str | None:
        """Why the group is taken out, in words, or None: it stays.

        `columns` holds `scores` and `reward/<name>`, float32 [G], and may hold others. Raises
        RewardError if that cannot be said.
        """
        ...


class KeepAllFilter:
    """Kind `none`: every group stays."""

    def explain_rejection(self, prompt: Prompt, columns: Columns) -> str | None:
        """Never any."""
        return None


class EqualRewardsFilter:
    """Kind `equal_rewards`: takes out a group of two or more whose scores are exactly equal."""

    def explain_rejection(self, prompt: Prompt, columns: Columns) -> str | None:
        """Such as "all 8 rewards are 1"."""
        scores = columns["scores"]
        if len(scores) == 1 or (scores != scores[0]).any():
            return None
        return f"all {len(scores)} rewards are {float(scores[0]):zg}"


class MeanOutsideFilter:
    """Kind `mean_outside`: takes out a group whose mean score is not inside (low, high)."""

    def __init__(self, options: MeanOutsideOptions) -> None:
        self._low, self._high = options.low, options.high

    def explain_rejection(self, prompt: Prompt, columns: Columns) -> str | None:
        """Such as "mean reward 0 is not inside (0, 1)". The mean is float64."""
        # fmean adds exactly, so the order of the rollouts never decides.
        mean = statistics.fmean(columns["scores"].tolist())
        if self._low < mean < self._high:
            return None
        return f"mean reward {mean:zg} is not inside ({self._low:zg}, {self._high:zg})"


class FunctionFilter:
    """Kind `function`: takes out a group of which the user's function does not say True.

    The function is `keep(prompt, scores, rewards)`, with those of the parameters that it wants:
    scores is a list with a float per rollout, rewards has such a list for each named reward, with
    None where that says nothing. It runs in the caller's thread with no deadline, so it should be
    quick: no model, no network.
    """

    def __init__(self, options: FunctionFilterOptions) -> None:
        said = f"filter.function={options.function}"
        self._file_function = load_function(
            options.path, options.function, setting="filter.path", said=said
        )
        self._parameters = self._file_function.select_arguments(FILTER_PARAMETERS)

    def explain_rejection(self, prompt: Prompt, columns: Columns) -> str | None:
        """That the function said so. Raises RewardError if it fails, or returns no bool."""
        kept = self._call_function(prompt, columns)
        if not isinstance(kept, bool | np.bool_):
            raise RewardError(
                f"filter, {describe_prompt(prompt)}: {self._function_location} returned"
                f" {format_value(kept)},"
                " not True or False"
            )
        return None if kept else f"{self._function_location} returned False"

    @property
    def _function_location(self) -> str:
        return f"{self._file_function.name} in {self._file_function.file}"

    def _call_function(self, prompt: Prompt, columns: Columns) -> Any:
        rewards = {
            name.removeprefix(COMPONENT_PREFIX): [
                None if math.isnan(x) else x for x in column.tolist()
            ]
            for name, column in columns.items()
            if name.startswith(COMPONENT_PREFIX)
        }
        offered = {"prompt": prompt, "scores": columns["scores"].tolist(), "rewards": rewards}
        try:
            return self._file_function.function(
                **{name: offered[name] for name in self._parameters}
            )
        # Whatever a user's function does wrong, exit() included.
        except (Exception, SystemExit) as error:
            where = f"filter, {describe_prompt(prompt)}"
            raise RewardError(f"{where}: {self._file_function.describe_error(error)}") from error


@dataclass(frozen=True)
class FilterKind:
    """How a filter of a kind is made of its options."""

    create_filter: Callable[[Any], GroupFilter]
    options_type: type


FILTER_KINDS: Mapping[str, FilterKind] = {
    "none": FilterKind(lambda _: KeepAllFilter(), EmptyFilterOptions),
    "equal_rewards": FilterKind(lambda _: EqualRewardsFilter(), EmptyFilterOptions),
    "mean_outside": FilterKind(MeanOutsideFilter, MeanOutsideOptions),
    "function": FilterKind(FunctionFilter, FunctionFilterOptions),
}


def build_group_filter(config: FilterConfig) -> GroupFilter:
    """The filter of a run.

    Raises ConfigError, for kind function, if the file or the function cannot be used.
    """
    kind = FILTER_KINDS[config.kind]
    return kind.create_filter(read_settings(kind.options_type, config.options, section="filter"))
