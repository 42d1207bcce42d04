"""What a trainer trains: a policy or a critic. A task loads the model and has the loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.algorithms import (
    Algorithm,
    AlgorithmSettings,
    list_required_columns,
    step_loss_denominator,
)
from streamrl.algorithms.math.critic import critic_loss
from streamrl.algorithms.objective import policy_loss, shared_value_loss
from streamrl.dataflow import CRITIC, CRITIC_BY_COLUMN, RETURNS_BY_CRITIC
from streamrl.engines.models.forward import (
    DEFAULT_OPTIONS,
    VALUE_HEAD_PREFIX,
    EntropyMode,
    ModelLoadOptions,
    TokenScores,
    compute_token_logprobs,
    compute_token_values,
    load_model,
    load_value_model,
    run_causal_forward,
    score_tokens,
)
from streamrl.engines.models.two_heads import extract_values, load_two_headed_model
from streamrl.engines.training.collate import TOKEN_COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CRITIC_COLUMNS = {
    role: (column, RETURNS_BY_CRITIC[role]) for column, role in CRITIC_BY_COLUMN.items()
}
"""The columns of a critic: what it said when a group was scored, and what it is to learn."""
ForwardFunction = Callable[..., Any]
LossAndSums = tuple[Tensor, dict[str, Tensor]]
"""Summed loss of a micro-batch, and sums for metrics."""


class TrainingTask(Protocol):
    """A model and its loss. `name` is the role, the prefix of its metrics."""

    @property
    def name(self) -> str: ...

    @property
    def model_path(self) -> str: ...

    @property
    def spec(self) -> Algorithm: ...

    @property
    def settings(self) -> AlgorithmSettings: ...

    @property
    def token_columns(self) -> tuple[str, ...]: ...

    def with_settings(self, settings: AlgorithmSettings) -> "TrainingTask":
        """The same with other settings."""
        ...

    def load_model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """The model to be trained."""
        ...

    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        """Of the rollouts of a batch, in the step of `version`."""
        ...

    def compute_zero_loss(self, forward: ForwardFunction, batch: TensorDict) -> Tensor:
        """A loss of 0 that goes through the same forward and backward."""
        ...

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        """What the summed loss of an update is divided by; 0 if no token counted."""
        ...

    def is_saved(self, name: str) -> bool:
        """Whether a parameter is part of the model others load."""
        ...


@dataclass(frozen=True)
class PolicyTask:
    """The policy, under the token loss of its algorithm."""

    model_path: str
    spec: Algorithm
    settings: AlgorithmSettings
    temperature: float
    name: str = "policy"
    options: ModelLoadOptions = DEFAULT_OPTIONS

    @property
    def token_columns(self) -> tuple[str, ...]:
        """What its loss reads per token."""
        needed = list_required_columns(self.spec, self.settings)
        return tuple(name for name in TOKEN_COLUMNS if name in needed)

    def with_settings(self, settings: AlgorithmSettings) -> "PolicyTask":
        """The same with other settings."""
        return replace(self, settings=settings)

    def load_model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """A causal language model."""
        return load_model(self.model_path, dtype=dtype, options=self.options)

    def score_batch(
        self, forward: ForwardFunction, batch: TensorDict, entropy_mode: EntropyMode = "none"
    ) -> TokenScores:
        """Logprobs and entropies of the tokens of a batch."""
        return compute_token_logprobs(
            forward,
            batch["token_ids"],
            batch["attention_mask"],
            temperature=self.temperature,
            entropy_mode=entropy_mode,
        )

    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        """Token loss, divergence and entropy."""
        scores = self.score_batch(forward, batch, self.entropy_mode)
        return self.compute_loss_from_scores(scores, batch.to_dict(), version=version)

    @property
    def entropy_mode(self) -> EntropyMode:
        """Entropies are reported, and have a gradient if they are part of the loss."""
        return "gradient" if self.settings.entropy_coef else "value"

    def compute_loss_from_scores(
        self, scores: TokenScores, columns: Mapping[str, Tensor], *, version: int
    ) -> LossAndSums:
        """The loss, of what a forward pass says of the tokens."""
        return policy_loss(
            self.spec,
            self.settings,
            columns,
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            version=version,
        )

    def compute_zero_loss(self, forward: ForwardFunction, batch: TensorDict) -> Tensor:
        """0, of the logprobs."""
        return 0 * self.score_batch(forward, batch).logprobs.sum()

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        """As the loss aggregation has it."""
        return step_loss_denominator(self.settings, sums)

    def is_saved(self, name: str) -> bool:
        """All of a language model, but not a critic's head on it."""
        return not name.startswith(VALUE_HEAD_PREFIX)


@dataclass(frozen=True)
class TwoHeadedTask(PolicyTask):
    """The policy and its critic as two heads of one model, under the sum of their losses."""

    value_clip: float | None = None
    value_coef: float = 1.0

    @property
    def token_columns(self) -> tuple[str, ...]:
        """What the two losses read per token."""
        return (*super().token_columns, "values")

    def load_model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """A causal language model with a value per token."""
        return load_two_headed_model(self.model_path, dtype=dtype, options=self.options)

    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        """That of the policy and, weighed, that of the critic, of one forward pass."""
        scores, values = self._score_both_heads(forward, batch)
        columns = batch.to_dict()
        loss, sums = self.compute_loss_from_scores(scores, columns, version=version)
        value_loss, value_sums = shared_value_loss(
            self.settings, columns, values, clip=self.value_clip
        )
        return loss + self.value_coef * value_loss, sums | value_sums

    def compute_zero_loss(self, forward: ForwardFunction, batch: TensorDict) -> Tensor:
        """0, of both heads."""
        scores, values = self._score_both_heads(forward, batch)
        return 0 * (scores.logprobs.sum() + values.sum())

    def _score_both_heads(
        self, forward: ForwardFunction, batch: TensorDict
    ) -> tuple[TokenScores, Tensor]:
        ids, attention = batch["token_ids"], batch["attention_mask"]
        output = run_causal_forward(forward, ids)
        scores = score_tokens(
            output.logits,
            ids,
            attention,
            temperature=self.temperature,
            entropy_mode=self.entropy_mode,
        )
        return scores, extract_values(output, attention)


@dataclass(frozen=True)
class CriticTask:
    """A critic, under the clipped value loss; `clip` None for none."""

    model_path: str
    spec: Algorithm
    settings: AlgorithmSettings
    clip: float | None
    name: str = CRITIC
    options: ModelLoadOptions = DEFAULT_OPTIONS

    @property
    def token_columns(self) -> tuple[str, ...]:
        """What its loss reads per token."""
        return ("token_ids", "loss_mask", CRITIC_COLUMNS[self.name][0])

    def with_settings(self, settings: AlgorithmSettings) -> "CriticTask":
        """The same with other settings."""
        return replace(self, settings=settings)

    def load_model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """A model with a value per token."""
        return load_value_model(self.model_path, dtype=dtype, options=self.options)

    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        """Half the squared distance to the returns."""
        old, returns = (batch[name] for name in CRITIC_COLUMNS[self.name])
        values = compute_token_values(forward, batch["token_ids"], batch["attention_mask"])
        known = {"loss_mask": batch["loss_mask"], "values": old, "returns": returns}
        return critic_loss(known, values, clip=self.clip)

    def compute_zero_loss(self, forward: ForwardFunction, batch: TensorDict) -> Tensor:
        """0, of the values."""
        return 0 * compute_token_values(forward, batch["token_ids"], batch["attention_mask"]).sum()

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        """The tokens that count."""
        return sums.get("num_tokens", 0.0)

    def is_saved(self, name: str) -> bool:
        """All of it."""
        return True
