"""Table of reward kinds, and construction of a run's rewards from the config."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import format_value, read_settings, suggest_nearest
from streamrl.rewards.interface.completion import CONVERSATION
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.interface.reward import Reward, RewardContext, RewardSpec
from streamrl.rewards.kinds.code import CodeOptions, CodeReward
from streamrl.rewards.kinds.function import FunctionOptions, FunctionReward
from streamrl.rewards.kinds.judge import JudgeOptions, JudgeReward
from streamrl.rewards.kinds.model import ModelOptions, ModelReward
from streamrl.rewards.kinds.rules import (
    ENVIRONMENT_KIND,
    SYMBOLIC,
    AutoReward,
    DapoOptions,
    EmptyRewardOptions,
    EnvironmentReward,
    Gsm8kOptions,
    LengthOptions,
    PatternOptions,
    RegexOptions,
    SymbolicOptions,
    SymbolicReward,
    build_exact_reward,
    build_length_reward,
    build_matcher_reward,
    build_numeric_reward,
    build_regex_reward,
)
from streamrl.rewards.reward_set import REWARDS, RewardComponent, RewardSet, ScoreSpec


@dataclass(frozen=True)
class RewardKind:
    """A reward kind: one-line summary, type of its options, function that builds the reward.

    can_use_devices: the reward may use the devices of the scorer replica, as a model does.
    """

    summary: str
    options_type: type
    create_reward: Callable[[RewardSpec[Any]], Reward]
    can_use_devices: bool = False


REWARD_KINDS: Mapping[str, RewardKind] = {
    "exact": RewardKind(
        "1 if the answer equals the ground truth as text", PatternOptions, build_exact_reward
    ),
    "numeric": RewardKind(
        "1 if the answer equals the ground truth as a number", PatternOptions, build_numeric_reward
    ),
    "regex": RewardKind(
        "1 if a pattern matches in the completion", RegexOptions, build_regex_reward
    ),
    "length": RewardKind(
        "1 if the length is within bounds, falling to 0 outside", LengthOptions, build_length_reward
    ),
    "gsm8k": RewardKind(
        "GSM8K: 1 if the number after #### equals the ground truth",
        Gsm8kOptions,
        lambda spec: build_matcher_reward("gsm8k", spec.options),
    ),
    "math": RewardKind(
        r"MATH: 1 if the last \boxed{} equals the ground truth in normal form",
        EmptyRewardOptions,
        lambda spec: build_matcher_reward("math"),
    ),
    "dapo_math": RewardKind(
        "DAPO: 1 if the text after the last Answer: equals the ground truth, else -1",
        DapoOptions,
        lambda spec: build_matcher_reward("dapo_math", spec.options),
    ),
    SYMBOLIC: RewardKind(
        "1 if the answer equals the ground truth as mathematics (math-verify)",
        SymbolicOptions,
        SymbolicReward,
    ),
    "auto": RewardKind(
        "rule chosen by the row's data_source, as in verl", SymbolicOptions, AutoReward
    ),
    "code": RewardKind(
        "runs the program in the completion against the row's tests in a sandbox",
        CodeOptions,
        CodeReward,
    ),
    "function": RewardKind(
        "your Python function, in streamrl's, verl's or TRL's signature",
        FunctionOptions,
        FunctionReward,
        can_use_devices=True,
    ),
    "model": RewardKind(
        "score of a sequence-classification model for prompt and completion",
        ModelOptions,
        ModelReward,
        can_use_devices=True,
    ),
    ENVIRONMENT_KIND: RewardKind(
        "score that the run's environment gives an episode",
        EmptyRewardOptions,
        lambda spec: EnvironmentReward(),
    ),
    "judge": RewardKind(
        "score from a language model behind an OpenAI-compatible server", JudgeOptions, JudgeReward
    ),
}
REMOVED_KINDS = {
    "reasoning_gym": "examples/reasoning_gym has it as a function",
    "choice": r"use kind exact with pattern: (?i:answer)(?: is|:)[\s*(]*([A-J])\b",
    "tags": r"use kind regex with pattern: (?s)\A<think>.+</think>\s*<answer>.+</answer>\Z",
}
# Metrics of the combined score use these names: reward/mean, cost/std.
_RESERVED_NAMES = ("mean", "std")
ENTRY_KEYS = frozenset(key.name for key in dataclasses.fields(RewardConfig))


def build_rewards(
    configs: Sequence[RewardConfig],
    context: RewardContext | None = None,
    *,
    score_spec: ScoreSpec = REWARDS,
) -> RewardSet:
    """Build the rewards or costs of a run from the config; `RewardSet.start` starts them.

    score_spec: REWARDS or COSTS. Raises ConfigError if the list is empty, a kind is unknown, a name
        repeats, or the options do not fit the kind.
    """
    section, context = score_spec.section, context or RewardContext()
    if not configs:
        raise ConfigError(f"{section}: empty; a run needs at least one, e.g. [{{kind: exact}}]")
    components = []
    for config, spec in zip(configs, _list_specs(configs, context, score_spec), strict=True):
        _check_entry(config, spec.key, score_spec)
        reward = REWARD_KINDS[config.kind].create_reward(spec)
        components.append(
            RewardComponent(config.component_name, config.weight, config.gate, reward, config.of)
        )
    names = [component.name for component in components]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{section}.name={name}: given {names.count(name)} times; names must be unique"
            )
    return RewardSet(components, score_spec=score_spec)


def may_use_devices(configs: Sequence[RewardConfig]) -> bool:
    """Return whether a reward may use devices of its scorer; a user's function always may."""
    return any(REWARD_KINDS[config.kind].can_use_devices for config in configs)


def _list_specs(
    configs: Sequence[RewardConfig], context: RewardContext, score_spec: ScoreSpec
) -> list[RewardSpec[Any]]:
    keys = [f"{score_spec.section}[{i}]" for i in range(len(configs))]
    return [
        RewardSpec(config.component_name, _read_options(config, key), context, key)
        for config, key in zip(configs, keys, strict=True)
    ]


def find_split_model(
    configs: Sequence[RewardConfig], score_spec: ScoreSpec, context: RewardContext | None = None
) -> RewardSpec[ModelOptions] | None:
    """Return the reward whose model several ranks of the scorer hold; None if there is none.

    Loads no file and no model. Raises ConfigError for unknown kinds, invalid options, and another
    model beside a split one, since a process belongs to one group of ranks.
    """
    specs = _list_specs(configs, context or RewardContext(), score_spec)
    models = [spec for spec in specs if isinstance(spec.options, ModelOptions)]
    split = next((spec for spec in models if spec.options.world_size > 1), None)
    if split is not None and len(models) > 1:
        raise ConfigError(
            f"{split.key}.world_size={split.options.world_size}: a model on several ranks must be"
            f" the only entry of kind model in {score_spec.section}"
        )
    return split


def _check_entry(config: RewardConfig, key: str, score_spec: ScoreSpec) -> None:
    if config.name and not re.fullmatch(r"[\w.-]+", config.name, re.ASCII):
        raise ConfigError(f"{key}.name={config.name}: letters, digits and _ . - only")
    if config.options.get("step_end") and config.of == CONVERSATION:
        raise ConfigError(f"{key}.of={CONVERSATION}: steps are the policy's words. Set of=sampled")
    if config.component_name in _RESERVED_NAMES:
        metric = score_spec.column_prefix + config.component_name
        raise ConfigError(
            f"{key}.name={config.component_name}: the metric {metric} is reserved for the"
            " combined score. Choose another name"
        )


def _read_options(config: RewardConfig, key: str) -> Any:
    if config.kind not in REWARD_KINDS:
        hint = REMOVED_KINDS.get(config.kind) or suggest_nearest(config.kind, REWARD_KINDS, "kind")
        raise ConfigError(
            f"{key}.kind={config.kind}: no such kind; {hint}; a reward of your own is kind"
            " function, with `path`"
        )
    kind = REWARD_KINDS[config.kind]
    options = [option.name for option in dataclasses.fields(kind.options_type)]
    for name, value in config.options.items():
        if name not in options:
            raise ConfigError(
                f"{key}.{name}={format_value(value)}: not an option of kind {config.kind};"
                f" {suggest_nearest(str(name), [*options, *(ENTRY_KEYS - {'options'})])}"
            )
    return read_settings(kind.options_type, config.options, section=key)
