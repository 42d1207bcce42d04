"""The kinds of reward, and the rewards of a run from its config."""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.rewards.config import RewardConfig
from streamrl.rewards.exact import ExactReward
from streamrl.rewards.function import FunctionReward
from streamrl.rewards.numeric import NumericReward
from streamrl.rewards.pattern import PatternReward
from streamrl.rewards.reward_set import REWARDS, Component, Judged, Reward, RewardSet


@dataclass(frozen=True)
class Kind:
    """How a kind is made, the options it must be given and those it may be given."""

    make: Callable[[RewardConfig], Reward]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    "exact": Kind(ExactReward, takes=("pattern",)),
    "numeric": Kind(NumericReward, takes=("pattern",)),
    "regex": Kind(PatternReward, needs=("pattern",)),
    "function": Kind(FunctionReward, needs=("path", "function")),
}
# Metrics of the weighted sum: reward/mean, cost/std.
_TAKEN_NAMES = ("mean", "std")
_OPTIONS = ("pattern", "path", "function")


def build_rewards(
    configs: Sequence[RewardConfig], *, timeout_s: float, judged: Judged = REWARDS
) -> RewardSet:
    """The rewards of a run, or its costs; `timeout_s` is the deadline of scoring one group.

    Raises ConfigError: no rewards, an unknown kind, a name given twice, a weight that is not
    finite, an option that is missing or means nothing to the kind, or what the kind refuses.
    """
    section = judged.section
    if not configs:
        raise ConfigError(f"{section}: empty; a run needs at least one, e.g. [{{kind: exact}}]")
    components = []
    for i, config in enumerate(configs):
        try:
            name, reward = _name(config, judged), _kind(config).make(config)
        except ConfigError as error:
            # A reward does not know which one it is, nor that it is a cost.
            raise ConfigError(str(error).replace("rewards.", f"{section}[{i}].", 1)) from None
        components.append(Component(name, config.weight, reward))
    names = [component.name for component in components]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{section}.name={name}: given {names.count(name)} times, must differ"
            )
    return RewardSet(components, timeout_s=timeout_s, judged=judged)


def _name(config: RewardConfig, judged: Judged) -> str:
    """What a component is logged as, after its weight was looked at too."""
    if not math.isfinite(config.weight):
        raise ConfigError(f"rewards.weight={config.weight}: must be finite")
    if config.name and not re.fullmatch(r"[\w.-]+", config.name, re.ASCII):
        raise ConfigError(f"rewards.name={config.name}: letters, digits and _ . - only")
    if config.name in _TAKEN_NAMES:
        metric = judged.prefix + config.name
        raise ConfigError(f"rewards.name={config.name}: {metric} is another metric")
    return config.component


def _kind(config: RewardConfig) -> Kind:
    kind = KINDS.get(config.kind)
    if kind is None:
        near = difflib.get_close_matches(config.kind, KINDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"rewards.kind={config.kind}: must be one of {', '.join(KINDS)}{hint}")
    for option in _OPTIONS:
        value = vars(config)[option]
        if option in kind.needs and not value:
            raise ConfigError(f"rewards.{option}=: kind {config.kind} needs it")
        if value and option not in kind.needs + kind.takes:
            raise ConfigError(
                f"rewards.{option}={value}: means nothing to a reward of kind {config.kind}"
            )
    return kind
