"""What an algorithm is made of: a row of the table, as a type.

A row is pure functions and defaults. Which stages a run has, what is waited for and how a gradient
is normalised all follow from it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamrl.algorithms.correction_config import CorrectionConfig
from streamrl.errors import AlgorithmError
from streamrl.files.python_module import format_failure
from streamrl.messages import COLUMN_SPECS

if TYPE_CHECKING:
    from torch import Tensor

SCOPES = ("group", "step")
RESERVED_COLUMNS = COLUMN_SPECS.keys() | {
    *("attention_mask", "advantages", "group_tokens", "proximal_logprobs", "near"),
    *("num_tokens", "token_rewards", "token_costs"),
}
"""What a batch has, or a row's functions see, beside what the row derives."""


@dataclass(frozen=True)
class AlgorithmSettings:
    """What the user chose, filled up from the row: `AlgorithmConfig` with nothing left open.

    max_length: the longest completion there can be, tokens.
    scope: group or step, see `Algorithm`.
    params: the row's own numbers by name.
    reward_weights: of each reward component, by name.
    """

    group_size: int
    clip_low: float
    clip_high: float
    dual_clip: float | None
    loss_aggregation: str
    advantage_scale: str
    advantage_eps: float
    advantage_unbiased: bool
    single_rollout: str
    whiten_advantages: bool
    gamma: float
    kl_coef: float
    kl_kind: str
    kl_in: str
    kl_target: float | None
    kl_horizon: float
    entropy_coef: float
    overlong_buffer: int
    overlong_factor: float
    mask_truncated: bool
    correction: CorrectionConfig
    epochs: int
    mini_batches: int
    scope: str
    params: Mapping[str, Any]
    max_length: int
    reward_weights: Mapping[str, float]

    @property
    def num_updates(self) -> int:
        """Optimizer updates per step."""
        return self.epochs * self.mini_batches

    def with_adaptive_params(self, dials: Mapping[str, float]) -> "AlgorithmSettings":
        """The same with dials in the place of the fields, or the row's numbers, of their names."""
        own = {name: value for name, value in dials.items() if name in self.params}
        fields: dict[str, Any] = {name: dials[name] for name in dials if name not in own}
        return replace(self, **fields, params={**self.params, **own})

    @property
    def should_recompute_logprobs(self) -> bool:
        """Whether the policy has to see a step's tokens before it is updated with them."""
        from_start = self.correction.proximal == "trainer" and self.num_updates > 1
        return from_start or self.correction.second_moment_threshold is not None


@dataclass(frozen=True)
class TokenLossInput:
    """What a token loss sees of a micro-batch; all [B, T] and 0 where `loss_mask` is false.

    log_ratio: trained policy minus the policy it is clipped against, with the gradient.
    logprobs: of the trained policy, with the gradient.
    derived: what the row's own `derived` functions made.
    """

    log_ratio: "Tensor"
    logprobs: "Tensor"
    advantages: "Tensor"
    loss_mask: "Tensor"
    derived: Mapping[str, "Tensor"] = field(default_factory=dict)


ColumnTensors = Mapping[str, "Tensor"]
GroupFunction = Callable[[ColumnTensors, "Tensor", AlgorithmSettings], "Tensor"]
TokenLossFunction = Callable[[TokenLossInput, AlgorithmSettings], tuple["Tensor", "Tensor"]]
AdaptFunction = Callable[[float, Mapping[str, float], AlgorithmSettings], float]


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    columns: what its functions read, besides `loss_mask` and `num_tokens` [B], the tokens sampled.
        "reward/*" stands for all reward components. Columns are [B] or [B, T].
    advantages: (columns, group_ids [B], settings) -> [B] or [B, T], from whole groups.
    token_loss: (tokens, settings) -> loss [B, T] and where it stops the gradient, bool [B, T].
    defaults: of the fields `AlgorithmConfig` leaves at null.
    params: defaults of numbers only this row has, set under `algorithm.params`.
    limits: of those that have any, the least and the largest they may be.
    scope: "group" if a group is enough for `advantages` and `derived`, "step" if they need all
        groups of the step: the pipeline then waits for them.
    derived: further functions like `advantages`, which they see as a column, for `token_loss`;
        under names of their own.
    dials: how those of `params` that change go on after a step: (value, what the step showed,
        settings) -> value. It showed a mean per rollout: score, and cost where there are costs.
    """

    name: str
    paper: str
    columns: tuple[str, ...]
    advantages: GroupFunction
    token_loss: TokenLossFunction
    defaults: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scope: str = "group"
    derived: Mapping[str, GroupFunction] = field(default_factory=dict)
    dials: Mapping[str, AdaptFunction] = field(default_factory=dict)
    min_group_size: int = 1

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"scope={self.scope!r}: must be one of {', '.join(SCOPES)}")
        functions = (*self.derived.values(), *self.dials.values())
        for function in (self.advantages, self.token_loss, *functions):
            if not inspect.isfunction(function):
                raise ValueError(f"algorithm {self.name}: {function!r} must be a plain function")
        if taken := self.derived.keys() & RESERVED_COLUMNS:
            raise ValueError(f"algorithm {self.name}: derived {sorted(taken)} is streamrl's own")
        self._validate_params()

    def _validate_params(self) -> None:
        for what, names in {"dials": self.dials, "limits": self.limits}.items():
            if alien := names.keys() - self.params.keys():
                raise ValueError(f"algorithm {self.name}: {what} {sorted(alien)} are not in params")
        for name, value in self.params.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value):
                raise ValueError(f"algorithm {self.name}: params {name}={value!r} is no number")
            least, largest = self.limits.get(name, (value, value))
            if not least <= value <= largest:
                limits = f"limits {least}, {largest}"
                raise ValueError(f"algorithm {self.name}: {name}={value} is outside its {limits}")

    def call_function(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What one of the row's functions gives. Raises AlgorithmError naming it and the line."""
        try:
            return function(*arguments)
        # Whatever a user's function does wrong, exit() included.
        except (Exception, SystemExit) as error:
            who = f"algorithm {self.name}: {function.__name__}"
            place = format_failure(function.__code__.co_filename, error)
            raise AlgorithmError(f"{who} at {place}") from error

    def adapt_param(
        self, dial: str, value: float, shown: Mapping[str, float], settings: AlgorithmSettings
    ) -> float:
        """A dial's next value. Raises AlgorithmError if its function gives no finite number."""
        found = self.call_function(self.dials[dial], value, shown, settings)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise AlgorithmError(f"algorithm {self.name}: dial {dial} became {found!r}")
        return float(found)
