"""Type of an algorithm, which is a row of the algorithm table.

A row consists of pure functions and defaults. The stages of a run, the groups that training waits
for and the normalization of the loss follow from the row.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamrl.algorithms.correction import CorrectionConfig
from streamrl.algorithms.math.training_metrics import compute_loss_denominator
from streamrl.errors import AlgorithmError
from streamrl.files.python_module import format_failure
from streamrl.messages import (
    COLUMN_SPECS,
    COMPONENT_PREFIX,
    EPISODE_COLUMN,
    PAIRS,
    REF_TOP_IDS,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    SCORE_NORMS,
    TARGETS,
    TOKEN_SCORES,
    TRUNCATIONS,
    TURN_COLUMN,
    FinishReason,
    get_column_spec,
)

if TYPE_CHECKING:
    from torch import Tensor

SCOPES = ("group", "step")
ALL_COMPONENTS = COMPONENT_PREFIX + "*"
RESERVED_COLUMNS = COLUMN_SPECS.keys() | {
    *("attention_mask", "advantages", "group_tokens", "included", "proximal_logprobs", "near"),
    *("policy_weights", "high_entropy", "word_logprobs"),
    *("num_tokens", "token_rewards", "token_costs", "turn_tokens"),
}
"""Names that an algorithm cannot give to derived columns: columns of a batch, or inputs of the
algorithm's functions.
"""


@dataclass(frozen=True)
class AlgorithmSettings:
    """Settings of a run's algorithm: the user's `AlgorithmConfig`, with nulls replaced by defaults.

    max_length: longest possible completion in tokens. scope, reads_score_norms: see `Algorithm`.
    params: the algorithm's own numbers by name. reward_weights: weight of each reward component by
    name. has_episodes: rollouts are the episodes of an environment. splits_episodes: an episode may
    consist of several samples. has_sampling_mask: tokens are sampled from some of the words.
    """

    group_size: int
    clip_low: float
    clip_high: float
    dual_clip: float | None
    loss_aggregation: str
    advantage_scale: str
    single_rollout: str
    whiten_advantages: bool
    gamma: float
    time_step: str
    kl_coef: float
    kl_kind: str
    kl_in: str
    kl_target: float | None
    entropy_coef: float
    overlong_buffer: int
    overlong_factor: float
    mask_truncated: bool
    top_entropy: float | None
    reads_score_norms: bool
    has_episodes: bool
    correction: CorrectionConfig
    epochs: int
    mini_batches: int
    scope: str
    params: Mapping[str, Any]
    max_length: int
    reward_weights: Mapping[str, float]
    splits_episodes: bool = False
    has_sampling_mask: bool = False
    router_replay: str = "off"

    @property
    def masked_reasons(self) -> tuple[int, ...]:
        """Codes of the finish reasons of rollouts that are not trained."""
        reasons = TRUNCATIONS if self.mask_truncated else ()
        if self.has_episodes:
            reasons = (*reasons, FinishReason.TIMEOUT)
        return tuple(reason.value for reason in reasons)

    @property
    def excluded_reasons(self) -> tuple[int, ...]:
        """Those of `masked_reasons` whose rollouts count in no statistic of their group either."""
        return tuple({*self.masked_reasons} - {reason.value for reason in TRUNCATIONS})

    @property
    def num_updates(self) -> int:
        """Optimizer updates per training step."""
        return self.epochs * self.mini_batches

    def with_adaptive_params(self, values: Mapping[str, float]) -> "AlgorithmSettings":
        """Return a copy in which adaptive values replace fields or entries of `params`, by name."""
        params = {name: value for name, value in values.items() if name in self.params}
        fields: dict[str, Any] = {name: values[name] for name in values if name not in params}
        return replace(self, **fields, params={**self.params, **params})

    @property
    def corrects_before_updates(self) -> bool:
        """True if a pass before a step's first update finds masks, weights or norms of scores."""
        by_step = self.reads_score_norms or self.top_entropy is not None
        return by_step or self.correction.corrects_before_updates

    @property
    def should_recompute_logprobs(self) -> bool:
        """True if the policy must recompute a step's logprobs before its first update."""
        is_start_read = self.correction.proximal == "trainer" or self.router_replay == "r2"
        from_start = is_start_read and self.num_updates > 1
        return from_start or self.corrects_before_updates

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        """Return the divisor of a summed loss, given the sums of all its micro-batches and ranks.

        Returns 0 if no token was kept; the caller must then skip the update.
        """
        if not sums.get("num_kept"):
            return 0.0
        return compute_loss_denominator(
            self.loss_aggregation,
            num_tokens=sums["num_tokens"],
            num_sequences=sums["num_rollouts"],
            num_groups=sums["num_groups"],
            num_turns=sums.get("num_turns", 0.0),
            max_length=self.max_length,
        )


@dataclass(frozen=True)
class TokenLossInput:
    """Inputs of a token loss for a micro-batch; all [B, T], and 0 where `loss_mask` is false.

    log_ratio: logprobs of the trained policy minus those of the policy it is clipped against, with
    gradient. logprobs: of the trained policy, with gradient. derived: results of the row's
    `derived` functions. word_logprobs: of the trained policy, with gradient, at the words of the
    column ref_top_ids, and ref_word_logprobs: the reference's, [B, T, W], if the row has it.
    """

    log_ratio: "Tensor"
    logprobs: "Tensor"
    advantages: "Tensor"
    loss_mask: "Tensor"
    derived: Mapping[str, "Tensor"] = field(default_factory=dict)
    word_logprobs: "Tensor | None" = None
    ref_word_logprobs: "Tensor | None" = None


ColumnTensors = Mapping[str, "Tensor"]
GroupFunction = Callable[[ColumnTensors, "Tensor", AlgorithmSettings], "Tensor"]
LossAndClipped = tuple["Tensor", "Tensor"]
"""Token losses, and the mask of clipped gradients."""
TokenLossFunction = Callable[[TokenLossInput, AlgorithmSettings], LossAndClipped]
AdaptFunction = Callable[[float, Mapping[str, float], AlgorithmSettings], float]


@dataclass(frozen=True)
class Algorithm:
    """A row of the algorithm table.

    - columns: columns that the functions read, besides `loss_mask` and `num_tokens` [B], the number
      of sampled tokens. "reward/*" stands for all reward components. Columns are [B] or [B, T]. A
      row is an episode: several samples of one are joined to a row. Excluded rollouts have no row.
      A column of turns is spread over the sampled tokens of the turn. `token_rewards` [B, T] are
      made of `token_scores` if the row has this column; otherwise the score falls on the last
      sampled token. `score_norms` [B, T] come from a pass before the step's first update, see
      `correct_before_updates`.
    - advantages: (columns, group_ids [B], settings) -> [B] or [B, T], from whole groups.
    - token_loss: (tokens, settings) -> loss [B, T] and a mask of clipped gradients, bool [B, T].
    - defaults: values for fields that `AlgorithmConfig` leaves at null.
    - params: defaults of the row's own numbers, set under `algorithm.params`.
    - limits: (smallest, largest) allowed value of those params that have limits.
    - scope: "group" if `advantages` and `derived` need only whole groups; "step" if they need all
      groups of the step, for which training then waits.
    - derived: further functions like `advantages`, run after it in order. Each also receives the
      column `advantages` and the derived columns before its own; `token_loss` gets all of them.
    - dials: update functions of adaptive params, (value, means, settings) -> new value. `means` has
      the step's mean score per rollout and, in runs with a cost limit (Safe RLHF), the mean cost.
    - min_group_size: fewest rollouts of a group from which `advantages` can be computed.
    - trains_on: rollouts; or targets, completions that the data has, of score 1; or pairs, a chosen
      completion and a rejected one. A pair is a row in which the last token of each completion is
      in `loss_mask`, and has the model's score of the completion as its logprob.
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
    trains_on: str = ROLLOUTS

    def __post_init__(self) -> None:
        for name, known in (("scope", SCOPES), ("trains_on", (ROLLOUTS, TARGETS, PAIRS))):
            if (value := vars(self)[name]) not in known:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(known)}")
        functions = (*self.derived.values(), *self.dials.values())
        for function in (self.advantages, self.token_loss, *functions):
            if not inspect.isfunction(function):
                raise ValueError(f"algorithm {self.name}: {function!r} must be a plain function")
        if reserved := self.derived.keys() & RESERVED_COLUMNS:
            raise ValueError(
                f"algorithm {self.name}: derived {sorted(reserved)} is a reserved name"
            )
        if REF_TOP_IDS in self.columns and "top_k" not in self.params:
            raise ValueError(f"algorithm {self.name}: column {REF_TOP_IDS} needs a param top_k")
        for kind, names in {"dials": self.dials, "limits": self.limits}.items():
            if unknown := names.keys() - self.params.keys():
                raise ValueError(
                    f"algorithm {self.name}: {kind} {sorted(unknown)} are not in params"
                )

    @property
    def is_by_turn(self) -> bool:
        """True if the functions of the row read turns, whatever the step of time is."""
        return TURN_COLUMN in self.columns

    @property
    def reads_score_norms(self) -> bool:
        """True if advantages need a pass of the policy over the step before its first update."""
        return SCORE_NORMS in self.columns

    @property
    def reads_token_scores(self) -> bool:
        """True if it matters where in a rollout its scores fall."""
        return TOKEN_SCORES in self.columns

    def call_function(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of this algorithm's functions and return its result.

        If the function fails, raises AlgorithmError with the function's name and the failing line.
        """
        try:
            return function(*arguments)
        # A user's function may raise anything, or call exit().
        except (Exception, SystemExit) as error:
            failure = format_failure(function.__code__.co_filename, error)
            raise AlgorithmError(
                f"algorithm {self.name}: {function.__name__} at {failure}"
            ) from error

    def adapt_param(
        self, name: str, value: float, means: Mapping[str, float], settings: AlgorithmSettings
    ) -> float:
        """Return the next value of an adaptive parameter from its value and a step's means.

        `means`: mean score per rollout, and mean cost if the run has costs. Raises AlgorithmError
        unless the result is finite.
        """
        result = self.call_function(self.dials[name], value, means, settings)
        if not isinstance(result, int | float) or not math.isfinite(result):
            raise AlgorithmError(
                f"algorithm {self.name}: dial {name} returned {result!r}, expected a finite number"
            )
        return float(result)


def list_required_columns(row: Algorithm, settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the columns that a group must have before training can start on it.

    Reward components and token scores are not listed: they arrive together with the scores. The
    trainer computes norms of scores itself.
    """
    others = (ALL_COMPONENTS, TURN_COLUMN, TOKEN_SCORES, SCORE_NORMS)
    columns = [n for n in row.columns if n not in others]
    reference = ("ref_logprobs",) if settings.kl_coef else ()
    episode = _list_episode_columns(row, settings)
    wide = ("sampling_mask",) if settings.has_sampling_mask else ()
    wide = (*wide, *(("routed_experts",) if settings.router_replay in ("measure", "r3") else ()))
    return tuple(dict.fromkeys((*ROLLOUT_COLUMNS, "scores", *columns, *reference, *episode, *wide)))


def _list_episode_columns(row: Algorithm, settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the columns that tell episodes and their turns apart, as far as they are read.

    Rollouts without an environment have no such columns: each is a turn.
    """
    by_turn = "turn" in (settings.time_step, settings.loss_aggregation.removesuffix("-mean"))
    reads_turns = settings.has_episodes and (by_turn or row.is_by_turn)
    turns = ("num_turns", TURN_COLUMN) if reads_turns else ()
    return (*turns, EPISODE_COLUMN) if settings.splits_episodes else turns


def list_derivation_columns(row: Algorithm, settings: AlgorithmSettings) -> tuple[str, ...]:
    """Return the columns that `derive_group_columns` reads to compute advantages and the like.

    Wide columns are for the loss alone.
    """
    columns: list[str] = []
    for name in row.columns:
        is_all = name == ALL_COMPONENTS
        columns += [COMPONENT_PREFIX + c for c in settings.reward_weights] if is_all else [name]
    columns = [n for n in columns if n != TURN_COLUMN and not get_column_spec(n).is_wide]
    penalty = settings.kl_coef and settings.kl_in == "reward"
    kl = ("generator_logprobs", "ref_logprobs") if penalty else ()
    episode = _list_episode_columns(row, settings)
    always = ("lengths", "loss_mask", "finish_reason", "scores")
    return tuple(dict.fromkeys((*always, *columns, *kl, *episode)))
