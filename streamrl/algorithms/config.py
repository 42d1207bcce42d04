"""Settings of the algorithm that trains the policy."""

import copy
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings
from streamrl.algorithms.correction import CorrectionConfig
from streamrl.algorithms.table import ALGORITHMS, DEFAULT_SETTINGS
from streamrl.errors import ConfigError
from streamrl.files.python_module import import_file
from streamrl.files.typed_settings import (
    FIXED_ON_RESUME,
    Conflict,
    above,
    at_least,
    check_conflicts,
    check_settings,
    one_of,
    suggest_nearest,
)

_SPEC_SETTINGS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "advantage_scale",
    "single_rollout",
    "gamma",
)
"""Settings that only an algorithm's functions read; an algorithm may ignore them."""


SINGLE_ROLLOUT_MODES = ("zero", "keep")
ADVANTAGE_SCALES = ("std", "batch", "mean", "none")
TIME_STEPS = ("token", "turn")
LOSS_AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "turn-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
ROUTER_REPLAYS = ("off", "measure", "r2", "r3")
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
WEIGHTED_KL_KINDS = ("k1*", "k3*")
"""Of k2 and abs the weighted gradient is not that of the KL divergence."""
TOP_ENTROPY = "top_entropy"
SHARED_PARAM_LIMITS = {TOP_ENTROPY: (0.0, 1.0)}
"""Limits of the params that every row has."""


@dataclass
class AlgorithmConfig:
    """Algorithm that trains the policy. Null takes the algorithm's own default."""

    #: Row of the algorithm table; `streamrl config --algorithms` prints all.
    name: str = "grpo"
    #: Python file with your own rows, which take precedence.
    path: str = ""
    #: Rollouts per prompt.
    group_size: Annotated[int, at_least(1), FIXED_ON_RESUME] = 8
    #: Distance below 1 at which the probability ratio is clipped.
    clip_low: Annotated[float | None, above(0)] = None
    #: Distance above 1 at which the probability ratio is clipped.
    clip_high: Annotated[float | None, above(0)] = None
    #: Dual clip c: the loss under a negative advantage A is at most -c A; null: none.
    dual_clip: Annotated[float | None, above(1)] = None
    #: Aggregation of token losses: token-mean, token-sum, turn-mean (the mean over turns of the
    #: mean over their tokens), seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm,
    #: prompt-mean.
    loss_aggregation: Annotated[str | None, one_of(*LOSS_AGGREGATIONS)] = None
    #: Divisor of a group's advantages: std, batch, mean or none.
    advantage_scale: Annotated[str | None, one_of(*ADVANTAGE_SCALES)] = None
    #: Advantage of a group with a single rollout: zero, or keep for its score.
    single_rollout: Annotated[str, one_of(*SINGLE_ROLLOUT_MODES)] = "zero"
    #: Whether advantages are normalized to mean 0 and standard deviation 1 over the step's tokens.
    whiten_advantages: bool | None = None
    #: Discount of rewards per step of time; null: 1, but 0.95 for gigpo and hgpo.
    gamma: Annotated[float | None, at_least(0, 1)] = None
    #: Step of time of returns and generalized advantages: token, or turn (of the policy, between
    #: two observations).
    time_step: Annotated[str, one_of(*TIME_STEPS)] = "token"
    #: Weight of the KL divergence from the reference; 0 runs no reference.
    kl_coef: Annotated[float, at_least(0)] = 0.0
    #: Estimator of the KL divergence: k1, k2, k3 or abs; k1+, k2+, k3+, abs+ with the gradient of
    #: k2; k1*, k3* times the token's ratio of trained over sampling policy, unbiased for tokens of
    #: an older policy (DeepSeek-V3.2).
    kl_kind: Annotated[str | None, one_of(*KL_KINDS, *WEIGHTED_KL_KINDS)] = None
    #: Place of the KL penalty: loss or reward.
    kl_in: Annotated[str | None, one_of("loss", "reward")] = None
    #: Target KL divergence per token; kl_coef adapts to reach it, by at most 20 % in 10,000
    #: rollouts. Null keeps kl_coef fixed.
    kl_target: Annotated[float | None, above(0)] = None
    #: Weight of the entropy bonus in the loss.
    entropy_coef: Annotated[float, at_least(0)] = 0.0
    #: Weight of the pretraining loss on the texts of data.pretrain; 0: none.
    ptx_coef: Annotated[float, at_least(0)] = 0.0
    #: Pretraining texts in each update.
    ptx_rows: Annotated[int, at_least(1)] = 32
    #: Last tokens before the length limit over which the score decreases (DAPO); 0: none.
    overlong_buffer: Annotated[int, at_least(0)] = 0
    #: Total decrease of the score over overlong_buffer.
    overlong_factor: Annotated[float, at_least(0)] = 1.0
    #: Exclude truncated rollouts from the loss; their scores count in baselines, filter and means.
    mask_truncated: bool = False
    #: Experts of a mixture that the trainer uses: off, its own; measure, its own, compared with
    #: the generator's; r2, those of its pass before a step's first update; r3, the generator's.
    router_replay: Annotated[str, one_of(*ROUTER_REPLAYS), FIXED_ON_RESUME] = "off"
    #: Passes over the rollouts of a training step.
    epochs: Annotated[int, at_least(1), FIXED_ON_RESUME] = 1
    #: Optimizer updates per epoch, each with an equal share of the step's groups.
    mini_batches: Annotated[int, at_least(1), FIXED_ON_RESUME] = 1
    #: Numbers by name: the row's own, and top_entropy, the share of the step's tokens, those of the
    #: highest entropy, whose policy loss is trained (Wang et al. 2025: 0.2; one more forward pass).
    params: dict[str, Any] = field(default_factory=dict)
    #: Off-policy correction.
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        if unknown := self.spec.defaults.keys() - DEFAULT_SETTINGS.keys():
            raise ConfigError(
                f"algorithm {self.name}: defaults contain {', '.join(sorted(unknown))}; allowed"
                f" are {', '.join(DEFAULT_SETTINGS)}"
            )
        # Values that the row gives obey the same rules.
        resolved = copy.copy(self)
        vars(resolved).update({key: self._resolve_setting(key) for key in DEFAULT_SETTINGS})
        resolved.params = {**self.spec.params, **self.params}
        check_settings(resolved, "algorithm")
        check_conflicts(resolved, resolved._iter_conflicts(), "algorithm.")

    def _iter_conflicts(self) -> Iterator[Conflict]:
        """Yield the rules on the algorithm's params, and on settings that exclude each other."""
        row, kind = self.spec, str(self.kl_kind)
        limits = {**row.limits, **SHARED_PARAM_LIMITS}
        for key, value in self.params.items():
            known = ", ".join({**row.params, **SHARED_PARAM_LIMITS})
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_finite = is_number and math.isfinite(value)
            bounds = at_least(*limits.get(key, (-math.inf, math.inf)))
            is_unknown = key not in {**row.params, **SHARED_PARAM_LIMITS}
            yield is_unknown, f"params.{key}", f"unknown; params of {self.name}: {known}"
            yield not is_finite, f"params.{key}", "must be a number"
            yield is_finite and not bounds.holds(value), f"params.{key}", str(bounds)
            is_count = is_finite and isinstance(row.params.get(key), int)
            yield is_count and value % 1 != 0, f"params.{key}", "must be a whole number"
        yield (
            self.time_step != "token" and (row.is_by_turn or not row.reads_token_scores),
            "time_step",
            f"has no effect: {self.name} "
            + ("counts time in turns" if row.is_by_turn else "has no returns over time"),
        )
        yield (
            self.router_replay == "r2" and self.epochs * self.mini_batches == 1,
            "router_replay",
            "has no effect: a step has one update, whose experts are those of the first pass. Set"
            " algorithm.router_replay=r3",
        )
        yield (
            self.group_size < row.min_group_size,
            "group_size",
            f"must be at least {row.min_group_size}, because {self.name} compares the rollouts of a"
            " group",
        )
        yield (
            self.kl_in == "reward" and kind.endswith(("+", "*")),
            "kl_kind",
            "'+' and '*' are for the gradient, which kl_in=reward does not use. Set"
            f" algorithm.kl_kind={kind.rstrip('+*')}.",
        )
        yield (
            self.kl_coef and self.kl_in == "reward" and "ref_logprobs" in row.columns,
            "kl_in",
            f"{self.name} compares with the reference in its advantages. Set algorithm.kl_in=loss.",
        )
        yield (
            self.kl_target is not None and not self.kl_coef,
            "kl_target",
            "needs algorithm.kl_coef above 0 as the initial weight",
        )
        for key, shapes_score in (("overlong_buffer", True), ("kl_coef", self.kl_in == "reward")):
            yield (
                shapes_score and vars(self)[key] and any(c.endswith("/*") for c in row.columns),
                key,
                f"{self.name} normalizes every reward separately, so a penalty on the score has no"
                " effect. Set it to 0.",
            )

    def check_unused_settings(self, read: Collection[str]) -> None:
        """Raise ConfigError if the user changed a setting that the algorithm does not read.

        `read`: names of the settings that the algorithm's functions read.
        """
        defaults = {setting.name: setting.default for setting in fields(self)}
        reason = f"has no effect: {self.name} does not use it. Remove it."
        unused = [key for key in _SPEC_SETTINGS if key not in read]
        conflicts = [(vars(self)[key] != defaults[key], key, reason) for key in unused]
        check_conflicts(self, conflicts, "algorithm.")

    @property
    def spec(self) -> Algorithm:
        """Selected algorithm, from the user's file or the table.

        Raises ConfigError if the name is unknown.
        """
        rows = {**ALGORITHMS, **(load_specs(self.path) if self.path else {})}
        if self.name not in rows:
            hint = suggest_nearest(self.name.lower(), rows, "algorithm")
            raise ConfigError(f"algorithm.name={self.name}: no such algorithm; {hint}")
        return rows[self.name]

    @property
    def scope(self) -> str:
        """Groups that training waits for, "group" or "step".

        "group" if groups train as they arrive; "step" if training needs all groups of a step first,
        for advantages, for masks or to divide the groups among several updates.
        """
        needs_step = (
            self._resolve_setting("whiten_advantages")
            or self._resolve_setting("advantage_scale") == "batch"
        )
        several_updates = self.epochs * self.mini_batches > 1
        needs_step = needs_step or several_updates or TOP_ENTROPY in self.params
        looks_first = self.spec.reads_score_norms or self.correction.corrects_before_updates
        needs_step = needs_step or looks_first
        return "step" if needs_step else self.spec.scope

    def _resolve_setting(self, key: str) -> Any:
        """Return the value of a setting; the algorithm's or the general default replaces null."""
        value = vars(self)[key]
        return {**DEFAULT_SETTINGS, **self.spec.defaults}[key] if value is None else value

    def to_settings(
        self,
        *,
        max_length: int,
        reward_weights: Mapping[str, float],
        has_episodes: bool = False,
        splits_episodes: bool = False,
        has_sampling_mask: bool = False,
    ) -> AlgorithmSettings:
        """Return the algorithm's settings with all defaults filled in.

        `max_length`: longest possible completion in tokens. `reward_weights`: weight by component.
        `has_episodes`: do not train episodes that ended at the limit of their time.
        `splits_episodes`: an episode may consist of several samples.
        `has_sampling_mask`: tokens have a sampling mask.
        """
        values = {**vars(self), **DEFAULT_SETTINGS, **self.spec.defaults}
        values |= {key: value for key, value in vars(self).items() if value is not None}
        params = {**self.spec.params, **self.params}
        values |= {TOP_ENTROPY: params.pop(TOP_ENTROPY, None), "params": params}
        values |= {"scope": self.scope}
        values |= {"reads_score_norms": self.spec.reads_score_norms}
        values |= {"max_length": max_length, "reward_weights": dict(reward_weights)}
        values |= {"has_episodes": has_episodes, "splits_episodes": splits_episodes}
        values |= {"has_sampling_mask": has_sampling_mask}
        return AlgorithmSettings(
            **{setting.name: values[setting.name] for setting in fields(AlgorithmSettings)}
        )


@functools.cache
def load_specs(path: str) -> dict[str, Algorithm]:
    """Return the algorithms that a user's Python file defines, by name.

    Raises ConfigError if the file defines no Algorithm.
    """
    module = import_file(path, setting="algorithm.path")
    rows = {row.name: row for row in vars(module).values() if isinstance(row, Algorithm)}
    if not rows:
        raise ConfigError(f"algorithm.path={path}: contains no Algorithm")
    return rows
