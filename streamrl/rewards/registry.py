"""The kinds of reward, and the rewards of a run from its config."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import nearest, read_settings
from streamrl.rewards.combine import Component, build_combination
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.interface.extract import PatternOptions
from streamrl.rewards.interface.reward import Given, Reward, Surroundings
from streamrl.rewards.kinds.code import CodeOptions, CodeReward
from streamrl.rewards.kinds.exact import exact_reward
from streamrl.rewards.kinds.function import FunctionOptions, function_reward, registered_reward
from streamrl.rewards.kinds.judge import JudgeOptions, judge_reward
from streamrl.rewards.kinds.model import ModelOptions, model_reward
from streamrl.rewards.kinds.numeric import numeric_reward
from streamrl.rewards.kinds.regex import RegexOptions, regex_reward
from streamrl.rewards.kinds.rules import (
    AutoReward,
    ChoiceOptions,
    DapoOptions,
    Gsm8kOptions,
    LengthOptions,
    NoOptions,
    SymbolicOptions,
    SymbolicReward,
    TagsOptions,
    rule_reward,
)
from streamrl.rewards.reward_set import REWARDS, Judged, RewardSet, named
from streamrl.rewards.user_code.plugins import installed


@dataclass(frozen=True)
class Kind:
    """A kind in one line, its options, and how it is made of them.

    on_device: whether it may compute on the devices of its replica, as a model does.
    """

    summary: str
    options: type
    make: Callable[[Given[Any]], Reward]
    on_device: bool = False


KINDS: Mapping[str, Kind] = {
    "exact": Kind(
        "1 where the answer is the ground truth to the letter",
        PatternOptions,
        lambda given: exact_reward(given.options),
    ),
    "numeric": Kind(
        "1 where the answer is the ground truth as a number",
        PatternOptions,
        lambda given: numeric_reward(given.options),
    ),
    "regex": Kind(
        "1 where a pattern occurs in the completion",
        RegexOptions,
        lambda given: regex_reward(given.options),
    ),
    "gsm8k": Kind(
        "GSM8K: 1 where the number behind #### is the ground truth",
        Gsm8kOptions,
        partial(rule_reward, "gsm8k"),
    ),
    "math": Kind(
        r"MATH: 1 where the last \boxed{} is the ground truth in normal form",
        NoOptions,
        partial(rule_reward, "math"),
    ),
    "dapo_math": Kind(
        "DAPO: 1 where what follows the last Answer: is the ground truth, else -1",
        DapoOptions,
        partial(rule_reward, "dapo_math"),
    ),
    "symbolic": Kind(
        "1 where math-verify finds the answer equal to the ground truth",
        SymbolicOptions,
        SymbolicReward,
    ),
    "choice": Kind(
        "1 where the letter that is chosen is the ground truth",
        ChoiceOptions,
        partial(rule_reward, "choice"),
    ),
    "tags": Kind(
        "1 where tags stand as they should, such as <think> and <answer>",
        TagsOptions,
        partial(rule_reward, "tags"),
    ),
    "length": Kind(
        "1 where the length lies between two bounds, falling to 0 beyond",
        LengthOptions,
        partial(rule_reward, "length"),
    ),
    "auto": Kind(
        "the rule of the row's data_source, as verl has them",
        SymbolicOptions,
        AutoReward,
    ),
    "code": Kind(
        "the program in the completion, run against the row's tests in a sandbox",
        CodeOptions,
        CodeReward,
    ),
    "function": Kind(
        "a Python function of yours, in streamrl's, verl's or TRL's signature",
        FunctionOptions,
        function_reward,
        on_device=True,
    ),
    "model": Kind(
        "what a sequence-classification model gives to prompt and completion",
        ModelOptions,
        model_reward,
        on_device=True,
    ),
    "judge": Kind(
        "the number a language model gives, behind an OpenAI-compatible server",
        JudgeOptions,
        judge_reward,
    ),
}
# Metrics of the weighted sum: reward/mean, cost/std.
_TAKEN_NAMES = ("mean", "std")
OWN_KEYS = frozenset(own.name for own in dataclasses.fields(RewardConfig))


def build_rewards(
    configs: Sequence[RewardConfig],
    around: Surroundings | None = None,
    *,
    judged: Judged = REWARDS,
) -> RewardSet:
    """The rewards of a run, or its costs, not yet started; `around`: the other settings they read.

    Raises ConfigError: no rewards, an unknown kind, a name given twice, a weight that is not
    finite, an option that is missing or means nothing to the kind, or what the kind refuses.
    """
    section, around = judged.section, around or Surroundings()
    if not configs:
        raise ConfigError(f"{section}: empty; a run needs at least one, e.g. [{{kind: exact}}]")
    components = []
    for i, config in enumerate(configs):
        with named(section, i):
            _check(config, judged)
            reward = _make(config, around)
        components.append(Component(config.component, config.weight, config.gate, reward))
    names = [component.name for component in components]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{section}.name={name}: given {names.count(name)} times, must differ"
            )
    is_combined = judged is REWARDS and around.scorer.combine
    combination = build_combination(components, around.scorer) if is_combined else None
    return RewardSet(components, combination, judged=judged)


def may_use_devices(configs: Sequence[RewardConfig]) -> bool:
    """Whether any of them may compute on the devices of its replica: all that is not a rule of
    streamrl's may.
    """
    return any(one.kind not in KINDS or KINDS[one.kind].on_device for one in configs)


def check_options(configs: Sequence[RewardConfig], judged: Judged) -> None:
    """Raise ConfigError for an option of a kind of streamrl's that cannot be; loads nothing."""
    for i, config in enumerate(configs):
        if kind := KINDS.get(config.kind):
            with named(judged.section, i):
                _check_keys(config, kind)
                read_settings(kind.options, config.options, section="rewards")


def _check(config: RewardConfig, judged: Judged) -> None:
    if not math.isfinite(config.weight):
        raise ConfigError(f"rewards.weight={config.weight}: must be finite")
    if config.name and not re.fullmatch(r"[\w.-]+", config.name, re.ASCII):
        raise ConfigError(f"rewards.name={config.name}: letters, digits and _ . - only")
    if config.component in _TAKEN_NAMES:
        metric = judged.prefix + config.component
        raise ConfigError(f"rewards.name={config.component}: {metric} is another metric")


def _make(config: RewardConfig, around: Surroundings) -> Reward:
    kind, name = KINDS.get(config.kind), config.component
    if kind is not None:
        _check_keys(config, kind)
        options: Any = read_settings(kind.options, config.options, section="rewards")
        return kind.make(Given(name, options, around))
    if config.options.get("path") or config.kind in installed():
        own = read_settings(FunctionOptions, config.options, section="rewards")
        return registered_reward(config.kind, Given(name, own, around))
    known = [*KINDS, *installed()]
    hint = nearest(config.kind, known).replace("key", "kind")
    raise ConfigError(
        f"rewards.kind={config.kind}: must be one of {', '.join(known)}, or one that the file named"
        f" by `path` registers; {hint}"
    )


def _check_keys(config: RewardConfig, kind: Kind) -> None:
    """Raise ConfigError for a key that means nothing here; it may be meant for the entry itself."""
    options = [option.name for option in dataclasses.fields(kind.options)]
    for key, value in config.options.items():
        if key not in options:
            raise ConfigError(
                f"rewards.{key}={value}: means nothing to a reward of kind {config.kind};"
                f" {nearest(str(key), [*options, *(OWN_KEYS - {'options'})])}"
            )
