"""What a trainer trains: a policy or a critic. A task loads the model and has the loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.algorithms import Algorithm, Settings, columns_needed, step_normaliser
from streamrl.algorithms.math.critic import critic_loss
from streamrl.algorithms.objective import policy_loss, shared_value_loss
from streamrl.dataflow import CRITIC, CRITICS, RETURNS
from streamrl.engines.models.forward import (
    DEFAULT_OPTIONS,
    VALUE_HEAD,
    EntropyMode,
    ModelOptions,
    TokenScores,
    causal_forward,
    load_model,
    load_value_model,
    score_tokens,
    token_logprobs,
    token_values,
)
from streamrl.engines.models.two_heads import load_two_headed, values_in
from streamrl.engines.training.collate import TOKEN_COLUMNS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNED = {role: (column, RETURNS[role]) for column, role in CRITICS.items()}
"""The columns of a critic: what it said when a group was scored, and what it is to learn."""
Forward = Callable[..., Any]
Loss = tuple[Tensor, dict[str, Tensor]]
"""Summed loss of a micro-batch, and sums for metrics."""


class Task(Protocol):
    """A model and its loss. `name` is the role, the prefix of its metrics."""

    @property
    def name(self) -> str: ...

    @property
    def model_path(self) -> str: ...

    @property
    def row(self) -> Algorithm: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def token_columns(self) -> tuple[str, ...]: ...

    def with_settings(self, settings: Settings) -> "Task":
        """The same with other settings."""
        ...

    def load(self, dtype: torch.dtype) -> "PreTrainedModel":
        """The model to be trained."""
        ...

    def loss(self, forward: Forward, batch: TensorDict, *, version: int) -> Loss:
        """Of the rollouts of a batch, in the step of `version`."""
        ...

    def blank(self, forward: Forward, batch: TensorDict) -> Tensor:
        """A loss of 0 that goes through the same forward and backward."""
        ...

    def normaliser(self, sums: Mapping[str, float]) -> float:
        """What the summed loss of an update is divided by; 0 if no token counted."""
        ...

    def saves(self, name: str) -> bool:
        """Whether a parameter is part of the model others load."""
        ...


@dataclass(frozen=True)
class PolicyTask:
    """The policy, under the token loss of its algorithm."""

    model_path: str
    row: Algorithm
    settings: Settings
    temperature: float
    name: str = "policy"
    options: ModelOptions = DEFAULT_OPTIONS

    @property
    def token_columns(self) -> tuple[str, ...]:
        """What its loss reads per token."""
        needed = columns_needed(self.row, self.settings)
        return tuple(name for name in TOKEN_COLUMNS if name in needed)

    def with_settings(self, settings: Settings) -> "PolicyTask":
        """The same with other settings."""
        return replace(self, settings=settings)

    def load(self, dtype: torch.dtype) -> "PreTrainedModel":
        """A causal language model."""
        return load_model(self.model_path, dtype=dtype, options=self.options)

    def score(
        self, forward: Forward, batch: TensorDict, entropy_mode: EntropyMode = "none"
    ) -> TokenScores:
        """Logprobs and entropies of the tokens of a batch."""
        return token_logprobs(
            forward,
            batch["token_ids"],
            batch["attention_mask"],
            temperature=self.temperature,
            entropy_mode=entropy_mode,
        )

    def loss(self, forward: Forward, batch: TensorDict, *, version: int) -> Loss:
        """Token loss, divergence and entropy."""
        scores = self.score(forward, batch, self.entropy_mode)
        return self.loss_of(scores, batch.to_dict(), version=version)

    @property
    def entropy_mode(self) -> EntropyMode:
        """Entropies are reported, and have a gradient if they are part of the loss."""
        return "gradient" if self.settings.entropy_coef else "value"

    def loss_of(self, scores: TokenScores, columns: Mapping[str, Tensor], *, version: int) -> Loss:
        """The loss, of what a forward pass says of the tokens."""
        return policy_loss(
            self.row,
            self.settings,
            columns,
            logprobs=scores.logprobs,
            entropy=scores.entropy,
            version=version,
        )

    def blank(self, forward: Forward, batch: TensorDict) -> Tensor:
        """0, of the logprobs."""
        return 0 * self.score(forward, batch).logprobs.sum()

    def normaliser(self, sums: Mapping[str, float]) -> float:
        """As the loss aggregation has it."""
        return step_normaliser(self.settings, sums)

    def saves(self, name: str) -> bool:
        """All of a language model, but not a critic's head on it."""
        return not name.startswith(VALUE_HEAD)


@dataclass(frozen=True)
class TwoHeadedTask(PolicyTask):
    """The policy and its critic as two heads of one model, under the sum of their losses."""

    value_clip: float | None = None
    value_coef: float = 1.0

    @property
    def token_columns(self) -> tuple[str, ...]:
        """What the two losses read per token."""
        return (*super().token_columns, "values")

    def load(self, dtype: torch.dtype) -> "PreTrainedModel":
        """A causal language model with a value per token."""
        return load_two_headed(self.model_path, dtype=dtype, options=self.options)

    def loss(self, forward: Forward, batch: TensorDict, *, version: int) -> Loss:
        """That of the policy and, weighed, that of the critic, of one forward pass."""
        scores, values = self._both(forward, batch)
        columns = batch.to_dict()
        loss, sums = self.loss_of(scores, columns, version=version)
        value_loss, value_sums = shared_value_loss(
            self.settings, columns, values, clip=self.value_clip
        )
        return loss + self.value_coef * value_loss, sums | value_sums

    def blank(self, forward: Forward, batch: TensorDict) -> Tensor:
        """0, of both heads."""
        scores, values = self._both(forward, batch)
        return 0 * (scores.logprobs.sum() + values.sum())

    def _both(self, forward: Forward, batch: TensorDict) -> tuple[TokenScores, Tensor]:
        ids, attention = batch["token_ids"], batch["attention_mask"]
        output = causal_forward(forward, ids)
        scores = score_tokens(
            output.logits,
            ids,
            attention,
            temperature=self.temperature,
            entropy_mode=self.entropy_mode,
        )
        return scores, values_in(output, attention)


@dataclass(frozen=True)
class CriticTask:
    """A critic, under the clipped value loss; `clip` None for none."""

    model_path: str
    row: Algorithm
    settings: Settings
    clip: float | None
    name: str = CRITIC
    options: ModelOptions = DEFAULT_OPTIONS

    @property
    def token_columns(self) -> tuple[str, ...]:
        """What its loss reads per token."""
        return ("token_ids", "loss_mask", LEARNED[self.name][0])

    def with_settings(self, settings: Settings) -> "CriticTask":
        """The same with other settings."""
        return replace(self, settings=settings)

    def load(self, dtype: torch.dtype) -> "PreTrainedModel":
        """A model with a value per token."""
        return load_value_model(self.model_path, dtype=dtype, options=self.options)

    def loss(self, forward: Forward, batch: TensorDict, *, version: int) -> Loss:
        """Half the squared distance to the returns."""
        old, returns = (batch[name] for name in LEARNED[self.name])
        values = token_values(forward, batch["token_ids"], batch["attention_mask"])
        known = {"loss_mask": batch["loss_mask"], "values": old, "returns": returns}
        return critic_loss(known, values, clip=self.clip)

    def blank(self, forward: Forward, batch: TensorDict) -> Tensor:
        """0, of the values."""
        return 0 * token_values(forward, batch["token_ids"], batch["attention_mask"]).sum()

    def normaliser(self, sums: Mapping[str, float]) -> float:
        """The tokens that count."""
        return sums.get("num_tokens", 0.0)

    def saves(self, name: str) -> bool:
        """All of it."""
        return True
