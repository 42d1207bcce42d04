"""Group filters (dynamic sampling): reject scored groups instead of training on them.

If all rollouts of a group have the same reward, every advantage is zero. DAPO (Yu et al. 2025,
arXiv 2503.14476, section 3.2) rejects such groups and samples other prompts instead.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from omegaconf import MISSING

from streamrl.algorithms.math.masks import has_equal_scores
from streamrl.errors import ConfigError, RewardError
from streamrl.files.typed_settings import at_least, check_rules, read_settings
from streamrl.messages import COMPONENT_PREFIX, Columns, Prompt, describe_prompt
from streamrl.user_code.checks import format_value
from streamrl.user_code.python_module import load_function

AUTO_OVERSAMPLE = "auto"
#: Parameters that a user's filter function may declare.
FILTER_PARAMETERS = ("prompt", "scores", "rewards")


@dataclass
class FilterConfig:
    """Config section `filter`: which scored groups to reject and replace (dynamic sampling).

    kind: none; equal_rewards: reject groups with equal rewards; mean_outside: reject groups with a
        mean reward outside the open interval (low, high); function: a user's function decides.
    max_filter_rounds: end the run with an error once a single step has filtered this many steps'
        worth of groups.
    oversample: prompts admitted per group of a step before the filter has decided, at most 32;
        auto: the recent number of scored groups per accepted group.
    options: options of the kind: low and high, or path and function; may also be given directly
        in the section.
    """

    kind: str = "none"
    max_filter_rounds: Annotated[int, at_least(1)] = 10
    oversample: int | float | str = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in FILTER_KINDS:
            options = ", ".join(FILTER_KINDS)
            raise ConfigError(f"filter.kind={self.kind}: must be one of {options}")
        if self.kind == "none" and self.options:
            raise ConfigError(
                f"filter.{next(iter(self.options))} has no effect with filter.kind=none;"
                " mean_outside takes low and high, function takes path and function"
            )
        read_settings(FILTER_KINDS[self.kind].options_type, self.options, section="filter")
        check_rules(self, "filter.")
        self._check_oversample()

    def _check_oversample(self) -> None:
        value = self.oversample
        is_number = not isinstance(value, str) and math.isfinite(value) and value >= 1
        if value != AUTO_OVERSAMPLE and not is_number:
            raise ConfigError(
                f"filter.oversample={value}: must be a number of at least 1, or {AUTO_OVERSAMPLE}"
            )
        if value != 1 and not self.is_enabled:
            raise ConfigError(
                f"filter.oversample={value} has no effect with filter.kind=none: every sampled"
                " group is trained"
            )

    @property
    def is_enabled(self) -> bool:
        return self.kind != "none"

    @property
    def oversample_factor(self) -> float | None:
        """Prompts admitted per trained group; None for auto."""
        return None if isinstance(self.oversample, str) else float(self.oversample)


@dataclass
class EmptyFilterOptions:
    """Options of filter kinds without options: none, equal_rewards."""


@dataclass
class MeanOutsideOptions:
    """Options of filter kind `mean_outside`.

    low: lower end of the interval, exclusive.
    high: upper end of the interval, exclusive.
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
    """Options of filter kind `function`.

    path: the Python file.
    function: name of the function in that file.
    """

    path: str = MISSING
    function: str = MISSING


GroupFilter = Callable[[Prompt, Columns], str | None]
"""Returns the reason to reject a scored group, or None to accept it. Raises RewardError.

The columns are `scores` and `reward/<name>`, float32 [G], and possibly `finish_reason`.
"""


def accept_group(prompt: Prompt, columns: Columns) -> str | None:
    return None


def reject_equal_rewards(prompt: Prompt, columns: Columns) -> str | None:
    scores = columns["scores"].astype(np.float64)
    if len(scores) == 1 or not has_equal_scores(scores.min(), scores.max()):
        return None
    return f"all {len(scores)} rewards are {np.float32(scores.min()):zg}"


def make_mean_filter(options: MeanOutsideOptions) -> GroupFilter:
    low, high = options.low, options.high

    def reject_mean_outside(prompt: Prompt, columns: Columns) -> str | None:
        # fmean sums exactly: the result does not depend on the order of the rollouts.
        mean = statistics.fmean(columns["scores"].tolist())
        return (
            None
            if low < mean < high
            else f"mean reward {mean:zg} is not inside ({low:zg}, {high:zg})"
        )

    return reject_mean_outside


def make_function_filter(options: FunctionFilterOptions) -> GroupFilter:
    """Return the filter that rejects groups for which the user's function returns False.

    The function is `keep(prompt, scores, rewards)` with any subset of these parameters. scores: a
    float per rollout. rewards: a list of floats per named reward, None where that reward abstains.
    The call runs in the caller's thread without a deadline: no models, no network.
    """
    label = f"filter.function={options.function}"
    code = load_function(options.path, options.function, setting="filter.path", label=label)
    code.check_not_async()
    parameters = code.select_arguments(FILTER_PARAMETERS)

    def reject_unkept(prompt: Prompt, columns: Columns) -> str | None:
        rewards = {
            name.removeprefix(COMPONENT_PREFIX): [
                None if math.isnan(x) else x for x in column.tolist()
            ]
            for name, column in columns.items()
            if name.startswith(COMPONENT_PREFIX)
        }
        offered = {"prompt": prompt, "scores": columns["scores"].tolist(), "rewards": rewards}
        where = f"filter, {describe_prompt(prompt)}"
        try:
            keep = code.function(**{name: offered[name] for name in parameters})
        # User code may raise anything, SystemExit included.
        except (Exception, SystemExit) as error:
            raise RewardError(f"{where}: {code.describe_error(error)}") from error
        returned = f"{code.name} in {code.file} returned"
        if not isinstance(keep, bool | np.bool_):
            raise RewardError(f"{where}: {returned} {format_value(keep)}, not True or False")
        return None if keep else f"{returned} False"

    return reject_unkept


@dataclass(frozen=True)
class FilterKind:
    """A filter kind: function that builds the filter from its options, and type of the options."""

    create_filter: Callable[[Any], GroupFilter]
    options_type: type


FILTER_KINDS: Mapping[str, FilterKind] = {
    "none": FilterKind(lambda _: accept_group, EmptyFilterOptions),
    "equal_rewards": FilterKind(lambda _: reject_equal_rewards, EmptyFilterOptions),
    "mean_outside": FilterKind(make_mean_filter, MeanOutsideOptions),
    "function": FilterKind(make_function_filter, FunctionFilterOptions),
}


def build_group_filter(config: FilterConfig, excluded_reasons: Sequence[int] = ()) -> GroupFilter:
    """Build the filter of a run. Raises ConfigError for an unusable file or function.

    The filter judges a group by its included rollouts: `excluded_reasons` are the codes of the
    finish reasons of the others. It rejects a group of several of which at most one is included,
    and so none can be compared.
    """
    kind = FILTER_KINDS[config.kind]
    options: Any = read_settings(kind.options_type, config.options, section="filter")
    judge_group = kind.create_filter(options)
    if not (config.is_enabled and excluded_reasons):
        return judge_group

    def judge_included(prompt: Prompt, columns: Columns) -> str | None:
        included = ~np.isin(columns["finish_reason"], excluded_reasons)
        count, size = int(included.sum()), len(included)
        if count < min(2, size):
            return f"{count} of {size} rollouts count; the others timed out or were truncated"
        return judge_group(prompt, {name: column[included] for name, column in columns.items()})

    return judge_included
