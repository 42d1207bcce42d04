"""Which algorithm trains the policy, as the user writes it."""

import difflib
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings
from streamrl.algorithms.correction_config import CorrectionConfig
from streamrl.algorithms.math.kl import KL_KINDS
from streamrl.algorithms.options import ADVANTAGE_SCALES, LOSS_AGGREGATIONS, SINGLE_ROLLOUT_MODES
from streamrl.algorithms.table import ALGORITHMS, DEFAULT_SETTINGS
from streamrl.errors import ConfigError
from streamrl.files.python_module import import_file

_SPEC_SETTINGS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "advantage_scale",
    "advantage_eps",
    "advantage_unbiased",
    "single_rollout",
    "gamma",
)
"""What only the functions of a row read: it may have none that does."""


@dataclass
class AlgorithmConfig:
    """Which algorithm trains the policy. Null takes the algorithm's own default."""

    #: A row of the table; `streamrl algorithms` prints it.
    name: str = "grpo"
    #: A Python file with rows of your own, looked at first.
    path: str = ""
    #: Rollouts per prompt.
    group_size: int = 8
    #: How far below 1 the probability ratio still has a gradient.
    clip_low: float | None = None
    #: How far above 1 the probability ratio still has a gradient.
    clip_high: float | None = None
    #: Bound c of the loss under a negative advantage A, -c A; null for none.
    dual_clip: float | None = None
    #: How token losses become one: token-mean, seq-mean-token-mean, seq-mean-token-sum, ...-norm,
    #: prompt-mean.
    loss_aggregation: str | None = None
    #: What a group's advantages are divided by: std, batch, mean or none.
    advantage_scale: str | None = None
    #: Added to the deviation that divides.
    advantage_eps: float = 1e-6
    #: Whether that deviation divides by n - 1, or else by n.
    advantage_unbiased: bool = True
    #: What a group of one gets: zero, or keep for its score.
    single_rollout: str = "zero"
    #: Whether advantages are shifted and scaled to mean 0, deviation 1 over the step's tokens.
    whiten_advantages: bool | None = None
    #: Discount per token of later rewards.
    gamma: float = 1.0
    #: Weight of the divergence from the reference; 0 runs no reference at all.
    kl_coef: float = 0.0
    #: Estimator of that divergence: k1, k2, k3, abs, k1+, k2+, k3+, abs+.
    kl_kind: str | None = None
    #: Where it enters: loss or reward.
    kl_in: str | None = None
    #: Divergence per token that its weight is to follow, from kl_coef on; null keeps the weight.
    kl_target: float | None = None
    #: Rollouts in which that weight changes by a fifth at most.
    kl_horizon: float = 10_000.0
    #: Weight of the entropy bonus in the loss.
    entropy_coef: float = 0.0
    #: Weight of the pretraining loss on the texts of data.pretrain; 0 for none.
    ptx_coef: float = 0.0
    #: Texts in each update.
    ptx_rows: int = 32
    #: Tokens before the longest completion in which the score falls (DAPO); 0 for none.
    overlong_buffer: int = 0
    #: By how much it falls in all.
    overlong_factor: float = 1.0
    #: Leave rollouts that were cut off out of the loss; their scores still count in the group.
    mask_truncated: bool = False
    #: How often every rollout of a step is trained.
    epochs: int = 1
    #: Optimizer updates per epoch, each with as many of the step's groups.
    mini_batches: int = 1
    #: The row's own numbers by name.
    params: dict[str, Any] = field(default_factory=dict)
    #: What is done about off-policy tokens.
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        row = self.spec
        if self.group_size < row.min_group_size:
            raise ConfigError(
                f"algorithm.group_size={self.group_size}: {self.name} compares the rollouts of a"
                f" group; needs at least {row.min_group_size}"
            )
        self._check_numbers()
        self._check_choices()
        self._check_params()
        self._check_combinations()

    def _check_numbers(self) -> None:
        minima = {"group_size": 1, "kl_coef": 0, "entropy_coef": 0, "gamma": 0}
        minima |= {"ptx_coef": 0, "ptx_rows": 1}
        minima |= {"overlong_buffer": 0, "overlong_factor": 0, "epochs": 1, "mini_batches": 1}
        for key, least in minima.items():
            if vars(self)[key] < least:
                raise ConfigError(f"algorithm.{key}={vars(self)[key]}: must be at least {least}")
        if self.gamma > 1:
            raise ConfigError(f"algorithm.gamma={self.gamma}: must be at most 1, it is a discount")
        bounds = {"clip_low": 0, "clip_high": 0, "dual_clip": 1, "advantage_eps": 0}
        bounds |= {"kl_target": 0, "kl_horizon": 0}
        for key, bound in bounds.items():
            value = self._resolve_setting(key) if key in DEFAULT_SETTINGS else vars(self)[key]
            if value is not None and value <= bound:
                raise ConfigError(f"algorithm.{key}={value}: must be above {bound}")

    def _check_choices(self) -> None:
        choices: Mapping[str, tuple[str, ...]] = {
            "loss_aggregation": LOSS_AGGREGATIONS,
            "advantage_scale": ADVANTAGE_SCALES,
            "single_rollout": SINGLE_ROLLOUT_MODES,
            "kl_kind": KL_KINDS,
            "kl_in": ("loss", "reward"),
        }
        if alien := self.spec.defaults.keys() - DEFAULT_SETTINGS.keys():
            raise ConfigError(
                f"algorithm {self.name}: defaults have {', '.join(sorted(alien))}; a row may set"
                f" {', '.join(DEFAULT_SETTINGS)}"
            )
        for key, allowed in choices.items():
            value = self._resolve_setting(key) if key in DEFAULT_SETTINGS else vars(self)[key]
            if value not in allowed:
                raise ConfigError(f"algorithm.{key}={value}: must be one of {', '.join(allowed)}")

    def _check_params(self) -> None:
        known = self.spec.params
        for key, value in self.params.items():
            if key not in known:
                has = ", ".join(known) or "none"
                raise ConfigError(f"algorithm.params.{key}={value}: {self.name} has {has}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value):
                raise ConfigError(f"algorithm.params.{key}={value!r}: must be a number")
            least, largest = self.spec.limits.get(key, (-math.inf, math.inf))
            if not least <= value <= largest:
                most = f" and at most {largest}" if largest < math.inf else ""
                raise ConfigError(f"algorithm.params.{key}={value}: must be at least {least}{most}")

    def _check_combinations(self) -> None:
        kind, place = self._resolve_setting("kl_kind"), self._resolve_setting("kl_in")
        if place == "reward" and kind.endswith("+"):
            raise ConfigError(
                f"algorithm.kl_kind={kind}: has a gradient of its own, which kl_in=reward never"
                f" takes; {kind.removesuffix('+')} has the same value"
            )
        if self.kl_target is not None and not self.kl_coef:
            raise ConfigError(
                f"algorithm.kl_target={self.kl_target}: algorithm.kl_coef=0 is no weight to begin"
                " with"
            )
        if any(name.endswith("/*") for name in self.spec.columns):
            shaped: dict[str, float] = {"overlong_buffer": self.overlong_buffer}
            shaped |= {"kl_coef": self.kl_coef} if place == "reward" else {}
            for key, value in shaped.items():
                if value:
                    raise ConfigError(
                        f"algorithm.{key}={value}: {self.name} takes every reward by itself, there"
                        " is no one score to be lowered"
                    )
        aggregation = self._resolve_setting("loss_aggregation")
        if aggregation == "prompt-mean" and not self.correction.count_rejected:
            raise ConfigError(
                "algorithm.correction.count_rejected=False: prompt-mean divides by all tokens of"
                " a group, before it is known which of them are rejected"
            )

    def check_unused_settings(self, read: Collection[str]) -> None:
        """Raise ConfigError if a setting was changed that is not among those the row reads."""
        defaults = {one.name: one.default for one in fields(self)}
        for key in _SPEC_SETTINGS:
            value = vars(self)[key]
            if value != defaults[key] and key not in read:
                raise ConfigError(f"algorithm.{key}={value}: {self.name} does not use it")

    @property
    def spec(self) -> Algorithm:
        """The algorithm. Raises ConfigError if there is none of that name."""
        rows = {**ALGORITHMS, **(load_specs(self.path) if self.path else {})}
        if self.name not in rows:
            near = difflib.get_close_matches(self.name.lower(), rows, n=1, cutoff=0.0)
            raise ConfigError(
                f"algorithm.name={self.name}: no such algorithm; did you mean {near[0]}?"
            )
        return rows[self.name]

    @property
    def scope(self) -> str:
        """Group if a group may be trained as it comes, step if its advantages need the step."""
        whole = (
            self._resolve_setting("whiten_advantages")
            or self._resolve_setting("advantage_scale") == "batch"
        )
        several = self.epochs * self.mini_batches > 1
        ranked = self.correction.second_moment_threshold is not None
        return "step" if whole or several or ranked else self.spec.scope

    def _resolve_setting(self, key: str) -> Any:
        value = vars(self)[key]
        return {**DEFAULT_SETTINGS, **self.spec.defaults}[key] if value is None else value

    def to_settings(
        self, *, max_length: int, reward_weights: Mapping[str, float]
    ) -> AlgorithmSettings:
        """The settings with the row's defaults filled in.

        `max_length`: the longest completion there can be. `reward_weights`: of each component.
        """
        filled = {**vars(self), **DEFAULT_SETTINGS, **self.spec.defaults}
        filled |= {key: value for key, value in vars(self).items() if value is not None}
        filled |= {"params": {**self.spec.params, **self.params}, "scope": self.scope}
        filled |= {"max_length": max_length, "reward_weights": dict(reward_weights)}
        return AlgorithmSettings(
            **{one.name: filled[one.name] for one in fields(AlgorithmSettings)}
        )


@functools.cache
def load_specs(path: str) -> dict[str, Algorithm]:
    """The rows of a user's Python file, by name. Raises ConfigError if there are none."""
    module = import_file(path, setting="algorithm.path")
    rows = {row.name: row for row in vars(module).values() if isinstance(row, Algorithm)}
    if not rows:
        raise ConfigError(f"algorithm.path={path}: has no Algorithm")
    return rows
