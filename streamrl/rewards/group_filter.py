"""Group filters (dynamic sampling): reject scored groups instead of training on them.

If all rollouts of a group have the same reward, every advantage is zero. DAPO (Yu et al. 2025,
arXiv 2503.14476, section 3.2) rejects such groups and samples other prompts instead.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from streamrl.errors import RewardError
from streamrl.files.python_module import load_function
from streamrl.files.typed_settings import at_least, check_conflicts, one_of
from streamrl.messages import COMPONENT_PREFIX, Columns, Prompt, describe_prompt, has_equal_scores
from streamrl.user_code.checks import format_returned

AUTO_OVERSAMPLE = "auto"
#: Parameters that a user's filter function may declare.
FILTER_PARAMETERS = ("prompt", "scores", "rewards")


@dataclass
class FilterConfig:
    """Config section `filter`: which scored groups to reject and replace (dynamic sampling).

    kind: none; equal_rewards: reject groups with equal rewards; function: a function of yours
        decides.
    max_filter_rounds: end the run with an error once a single step has filtered this many steps'
        worth of groups.
    oversample: prompts admitted per group of a step before the filter has decided, at most 32;
        auto: the recent number of scored groups per accepted group.
    path: Python file of kind function.
    function: name of the function in that file.
    """

    kind: Annotated[str, one_of("none", "equal_rewards", "function")] = "none"
    max_filter_rounds: Annotated[int, at_least(1)] = 10
    oversample: int | float | str = 1
    path: str = ""
    function: str = ""

    def __post_init__(self) -> None:
        is_function, factor = self.kind == "function", self.oversample
        is_number = not isinstance(factor, str) and 1 <= factor < math.inf
        no_effect = f"has no effect with filter.kind={self.kind}"
        name_rule = "missing" if is_function else no_effect
        factor_rule = f"must be a number of at least 1, or {AUTO_OVERSAMPLE}"
        conflicts = (
            (bool(self.path) != is_function, "path", name_rule),
            (bool(self.function) != is_function, "function", name_rule),
            (not is_number and factor != AUTO_OVERSAMPLE, "oversample", factor_rule),
            (not self.is_enabled and factor != 1, "oversample", no_effect),
        )
        check_conflicts(self, conflicts, "filter.")

    @property
    def is_enabled(self) -> bool:
        return self.kind != "none"

    @property
    def oversample_factor(self) -> float | None:
        """Prompts admitted per trained group; None for auto."""
        return None if isinstance(self.oversample, str) else float(self.oversample)


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


def make_function_filter(path: str, function: str) -> GroupFilter:
    """Return the filter that rejects groups for which the user's function returns False.

    The function is `keep(prompt, scores, rewards)` with any subset of these parameters. scores: a
    float per rollout. rewards: a list of floats per named reward, None where that reward abstains.
    The call runs in the caller's thread without a deadline: no models, no network.
    """
    label = f"filter.function={function}"
    code = load_function(path, function, setting="filter.path", label=label)
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
            raise RewardError(f"{where}: {returned} {format_returned(keep)}, not True or False")
        return None if keep else f"{returned} False"

    return reject_unkept


def build_group_filter(config: FilterConfig, excluded_reasons: Sequence[int] = ()) -> GroupFilter:
    """Build the filter of a run. Raises ConfigError for an unusable file or function.

    The filter judges a group by its included rollouts: `excluded_reasons` are the codes of the
    finish reasons of the others. It rejects a group of several of which at most one is included,
    and so none can be compared.
    """
    if not config.is_enabled:
        return accept_group
    judge_group: GroupFilter = reject_equal_rewards
    if config.kind == "function":
        judge_group = make_function_filter(config.path, config.function)
    if not excluded_reasons:
        return judge_group

    def judge_included(prompt: Prompt, columns: Columns) -> str | None:
        included = ~np.isin(columns["finish_reason"], excluded_reasons)
        count, size = int(included.sum()), len(included)
        if count < min(2, size):
            return f"{count} of {size} rollouts count; the others timed out or were truncated"
        return judge_group(prompt, {name: column[included] for name, column in columns.items()})

    return judge_included
