"""The algorithms, a row each: what it needs, its advantages, its token loss, its defaults.

A new algorithm is one function or two, one row and one test. What `AlgorithmConfig` leaves at null
is taken from the row.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from streamrl.algorithms.advantages import SCALES, group_relative
from streamrl.algorithms.kl import KINDS
from streamrl.algorithms.losses import MODES, clipped_surrogate, outside_clip
from streamrl.errors import ConfigError
from streamrl.messages import ROLLOUT_COLUMNS


@dataclass(frozen=True)
class Settings:
    """What the user chose, filled up from the row: `AlgorithmConfig` with nothing left open."""

    group_size: int
    clip_low: float
    clip_high: float
    dual_clip: float | None
    loss_aggregation: str
    advantage_scale: str
    advantage_eps: float
    kl_coef: float
    kl_kind: str
    entropy_coef: float


@dataclass(frozen=True)
class Algorithm:
    """A row.

    columns: what it needs besides the columns every rollout has.
    advantages: (those columns that are per rollout, each [B]; group_ids [B]; settings) -> [B].
    token_loss: (log_ratio [B, T], advantages [B, 1], loss_mask [B, T], settings) -> loss [B, T]
        and where it stops the gradient, bool [B, T].
    defaults: of the fields `AlgorithmConfig` leaves at null.
    """

    name: str
    paper: str
    columns: tuple[str, ...]
    advantages: Callable[[Mapping[str, Tensor], Tensor, Settings], Tensor]
    token_loss: Callable[[Tensor, Tensor, Tensor, Settings], tuple[Tensor, Tensor]]
    defaults: Mapping[str, Any]
    min_group_size: int = 1


@dataclass
class AlgorithmConfig:
    """Which algorithm trains the policy. Null takes the algorithm's own default."""

    #: A row of the table.
    name: str = "grpo"
    #: Rollouts per prompt.
    group_size: int = 8
    #: How far below 1 the probability ratio still has a gradient.
    clip_low: float | None = None
    #: How far above 1 the probability ratio still has a gradient.
    clip_high: float | None = None
    #: Bound c of the loss under a negative advantage A, -c A; null for none.
    dual_clip: float | None = None
    #: How token losses become one: token-mean, seq-mean-token-mean, seq-mean-token-sum, ...-norm.
    loss_aggregation: str | None = None
    #: What a group's advantages are divided by: std or none.
    advantage_scale: str | None = None
    #: Added to the deviation that divides.
    advantage_eps: float = 1e-6
    #: Weight of the divergence from the reference in the loss; 0 runs no reference at all.
    kl_coef: float = 0.0
    #: Estimator of that divergence: k1, k2, k3, abs, k1+, k3+, abs+.
    kl_kind: str = "k3"
    #: Weight of the entropy bonus in the loss.
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ALGORITHMS:
            near = difflib.get_close_matches(self.name, ALGORITHMS, n=1, cutoff=0.0)
            raise ConfigError(
                f"algorithm.name={self.name}: no such algorithm; did you mean {near[0]}?"
            )
        if self.group_size < self.row.min_group_size:
            raise ConfigError(
                f"algorithm.group_size={self.group_size}: {self.name} compares the rollouts of a"
                f" group; needs at least {self.row.min_group_size}"
            )
        self._check_numbers()
        self._check_choices()

    def _check_numbers(self) -> None:
        minima = {"group_size": 1, "kl_coef": 0, "entropy_coef": 0}
        for key, least in minima.items():
            if vars(self)[key] < least:
                raise ConfigError(f"algorithm.{key}={vars(self)[key]}: must be at least {least}")
        bounds = {"clip_low": 0, "clip_high": 0, "dual_clip": 1, "advantage_eps": 0}
        for key, bound in bounds.items():
            value = vars(self)[key]
            if value is not None and value <= bound:
                raise ConfigError(f"algorithm.{key}={value}: must be above {bound}")

        if self.clip_low is not None and self.clip_low > 1:
            raise ConfigError(
                f"algorithm.clip_low={self.clip_low}: must be at most 1, as ratios are above 0"
            )

    def _check_choices(self) -> None:
        choices = {"loss_aggregation": MODES, "advantage_scale": SCALES, "kl_kind": KINDS}
        for key, allowed in choices.items():
            value = vars(self)[key]
            if value is not None and value not in allowed:
                raise ConfigError(f"algorithm.{key}={value}: must be one of {', '.join(allowed)}")

    @property
    def row(self) -> Algorithm:
        """The algorithm."""
        return ALGORITHMS[self.name]

    @property
    def settings(self) -> Settings:
        """The settings with the row's defaults filled in."""
        chosen = {key: value for key, value in vars(self).items() if value is not None}
        values = {**self.row.defaults, **chosen}
        return Settings(**{field.name: values[field.name] for field in fields(Settings)})


def columns_needed(config: AlgorithmConfig) -> tuple[str, ...]:
    """The columns a group must have before it is trained on."""
    reference = ("ref_logprobs",) if config.kl_coef else ()
    return (*ROLLOUT_COLUMNS, *config.row.columns, *reference)


def _group_relative(columns: Mapping[str, Tensor], group_ids: Tensor, settings: Settings) -> Tensor:
    return group_relative(
        columns["scores"], group_ids, scale=settings.advantage_scale, eps=settings.advantage_eps
    )


def _clipped(
    log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    low, high = settings.clip_low, settings.clip_high
    loss = clipped_surrogate(
        log_ratio, advantages, clip_low=low, clip_high=high, dual_clip=settings.dual_clip
    )
    return loss, outside_clip(log_ratio, advantages, clip_low=low, clip_high=high)


GRPO = Algorithm(
    name="grpo",
    paper="Shao et al. 2024, DeepSeekMath, arXiv:2402.03300",
    columns=("scores",),
    advantages=_group_relative,
    token_loss=_clipped,
    # The paper's mean over rollouts of the mean over their tokens. verl's default is token-mean.
    defaults={
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "loss_aggregation": "seq-mean-token-mean",
        "advantage_scale": "std",
    },
    min_group_size=2,
)
DAPO = Algorithm(
    name="dapo",
    paper="Yu et al. 2025, DAPO, arXiv:2503.14476",
    columns=("scores",),
    advantages=_group_relative,
    token_loss=_clipped,
    defaults={
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "loss_aggregation": "token-mean",
        "advantage_scale": "std",
    },
    min_group_size=2,
)
ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in (GRPO, DAPO)}
