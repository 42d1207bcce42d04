"""Tasks of a model: how to load it, score groups with it and, for trained models, its loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from streamrl.algorithms import Algorithm, AlgorithmSettings, list_required_columns
from streamrl.algorithms.math.losses import critic_loss
from streamrl.algorithms.objective import correct_before_updates, policy_loss, shared_value_loss
from streamrl.dataflow import CRITIC, CRITIC_BY_COLUMN, POLICY, REF_LOGPROBS, RETURNS_BY_CRITIC
from streamrl.engines.models.chunked_head import EntropyMode, TopWords, run_scoring_forward
from streamrl.engines.models.forward import (
    DEFAULT_OPTIONS,
    VALUE_HEADS,
    ModelLoadOptions,
    TokenScores,
    compute_row_logits,
    compute_token_logprobs,
    compute_token_values,
    iter_layers,
    load_model,
    load_reward_model,
    load_skeleton,
    load_two_headed_model,
    load_value_model,
    load_value_skeleton,
    shift_right,
    shift_scores,
)
from streamrl.engines.models.router_replay import Routing, enable_router_replay
from streamrl.engines.training.collate import TOKEN_COLUMNS
from streamrl.messages import EPISODE_COLUMN, REF_TOP_IDS, REF_TOP_LOGPROBS


class SampleJoiner:
    """Joins the samples of an episode, rows that follow each other, to one row.

    episode: int64 [B], the number of each row's episode, ascending from 0; None if each row is one.
    """

    def __init__(self, episode: Tensor | None) -> None:
        self._slots: Tensor | None = None
        if episode is None:
            return
        samples = torch.bincount(episode)
        self._firsts = samples.cumsum(0) - samples
        self._most_samples = int(samples.max())
        if self._most_samples > 1:
            position = torch.arange(len(episode), device=episode.device) - self._firsts[episode]
            self._slots = episode * self._most_samples + position

    def __call__(self, column: Tensor) -> Tensor:
        """Return [E] for [B], and [E, K T] for [B, T], where K is the largest number of samples.

        Rows of an episode must have equal entries in [B]. Episodes of fewer samples are padded with
        zeros. Gradients flow through [B, T]. Further dimensions stay.
        """
        if self._slots is None:
            return column
        if column.ndim == 1:
            return column[self._firsts]
        num_episodes, (width, *rest) = len(self._firsts), column.shape[1:]
        joined = column.new_zeros(num_episodes * self._most_samples, width, *rest)
        joined[self._slots] = column
        return joined.reshape(num_episodes, self._most_samples * width, *rest)

    def split(self, column: Tensor) -> Tensor:
        """Return [B, T] for the column [E, K T] of joined rows."""
        if self._slots is None:
            return column
        return column.reshape(len(self._firsts) * self._most_samples, -1)[self._slots]


CRITIC_COLUMNS = {
    role: (column, RETURNS_BY_CRITIC[role]) for column, role in CRITIC_BY_COLUMN.items()
}
"""Names, by critic, of its column of values at scoring time and its column of returns to learn."""
ForwardFunction = Callable[..., Any]
LossAndSums = tuple[Tensor, dict[str, Tensor]]
"""Summed loss of a micro-batch, and sums for the metrics of the step."""


@dataclass(frozen=True)
class ModelTask(ABC):
    """Base of the tasks: a model of the Hugging Face directory `model_path` that scores groups.

    loader: one of the functions of `forward` that load models.
    """

    loader: ClassVar[Callable[..., PreTrainedModel]]
    model_path: str
    options: ModelLoadOptions = field(default=DEFAULT_OPTIONS, kw_only=True)

    def load_model(self, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
        """Load the model; with `on_meta` without the weights that its directory stores."""
        options = replace(self.options, on_meta=on_meta)
        return self.loader(self.model_path, dtype=dtype, options=options)

    @abstractmethod
    def compute_column(self, forward: ForwardFunction, batch: TensorDict, column: str) -> Tensor:
        """Return the entries of a queue column that the model computes for a micro-batch.

        They are [B, T], or [B] of a model that scores whole rows.
        """

    def compute_columns(
        self, forward: ForwardFunction, batch: TensorDict, columns: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the columns of a scoring call, by name; wide ones are [B, T, W]."""
        (column,) = columns
        return {column: self.compute_column(forward, batch, column)}

    def is_own(self, name: str) -> bool:
        """Return whether a published parameter is one of this model, not of a model around it."""
        return True


@dataclass(frozen=True)
class RewardModelTask(ModelTask):
    """Scores rows with a sequence-classification model of one label; [B], the logits."""

    loader = staticmethod(load_reward_model)

    def compute_column(self, forward: ForwardFunction, batch: TensorDict, column: str) -> Tensor:
        return compute_row_logits(forward, batch["token_ids"], batch["attention_mask"])


@dataclass(frozen=True)
class TrainingTask(ModelTask):
    """Base of the tasks of trained roles: a model and its loss under the algorithm `spec`.

    name: policy or the critic's; the prefix of the metrics. token_columns: columns with an entry
    per token that the loss reads.
    """

    spec: Algorithm
    settings: AlgorithmSettings
    name: str = field(default=POLICY, kw_only=True)

    @property
    @abstractmethod
    def token_columns(self) -> tuple[str, ...]: ...

    @abstractmethod
    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        """Return the summed loss of a micro-batch and its sums for metrics.

        `version` is the policy version that the training step starts from.
        """

    def compute_zero_loss(self, forward: ForwardFunction, batch: TensorDict) -> Tensor:
        """Return a loss of 0 for an idle rank.

        Its forward and backward pass run the same collectives as those of `compute_loss`.
        """
        return 0 * self.compute_column(forward, batch, REF_LOGPROBS).sum()

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        """Return the divisor of an update's summed loss; 0 if all its tokens are masked.

        `sums` are those of `compute_loss`, added over all micro-batches of the update.
        """
        return sums.get("num_tokens", 0.0)


@dataclass(frozen=True)
class PolicyTask(TrainingTask):
    """Trains the policy with the loss of the algorithm, or scores as a reference.

    top_words: words per token whose logprobs the loss compares with the reference's.
    """

    loader = staticmethod(load_model)
    temperature: float
    top_words: TopWords | None = None

    @property
    def token_columns(self) -> tuple[str, ...]:
        needed = list_required_columns(self.spec, self.settings)
        return tuple(name for name in TOKEN_COLUMNS if name in needed)

    def score_batch(
        self, forward: ForwardFunction, batch: TensorDict, entropy_mode: EntropyMode = "none"
    ) -> TokenScores:
        """Run the model and return logprobs and entropies of the batch's tokens."""
        return compute_token_logprobs(
            forward,
            batch["token_ids"],
            batch["attention_mask"],
            temperature=self.temperature,
            entropy_mode=entropy_mode,
            sampling_mask=batch.get("sampling_mask"),
            words=batch.get(REF_TOP_IDS, None),
            routing=self.make_routing(batch),
        )

    def load_model(self, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
        model = super().load_model(dtype, on_meta=on_meta)
        if self.settings.router_replay != "off":
            enable_router_replay(model, iter_layers(model))
        return model

    def make_routing(self, batch: TensorDict) -> Routing | None:
        """Return the experts that routers replay or compare; without them, own ones are kept."""
        mode = self.settings.router_replay
        if mode == "off":
            return None
        return Routing(batch.get("routed_experts"), replays=mode != "measure")

    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        scores = self.score_batch(forward, batch, self.entropy_mode)
        return self.compute_loss_from_scores(scores, batch.to_dict(), version=version)

    @property
    def entropy_mode(self) -> EntropyMode:
        """Mode of entropies: with a gradient only if the loss contains an entropy bonus."""
        return "gradient" if self.settings.entropy_coef else "value"

    @property
    def precomputed_modes(self) -> tuple[EntropyMode, ...]:
        """Modes of the passes before a step's first update, besides logprobs."""
        modes: dict[EntropyMode, bool] = {
            "value": self.settings.top_entropy is not None,
            "collision": self.settings.reads_score_norms,
        }
        return tuple(mode for mode, is_read in modes.items() if is_read)

    def compute_loss_from_scores(
        self, scores: TokenScores, columns: Mapping[str, Tensor], *, version: int
    ) -> LossAndSums:
        """Return the policy's summed loss and sums for metrics, given logprobs and entropies.

        The loss sees the samples of an episode, all of which are in the batch, as one row.
        """
        join = SampleJoiner(columns.get(EPISODE_COLUMN))
        if scores.word_logprobs is not None:
            columns = {**columns, "word_logprobs": scores.word_logprobs}
        loss, sums = policy_loss(
            self.spec,
            self.settings,
            {name: join(column) for name, column in columns.items()},
            logprobs=join(scores.logprobs),
            entropy=join(scores.entropy),
            version=version,
        )
        return loss, sums | (scores.routing.sums if scores.routing else {})

    def correct_before_updates(
        self, logprobs: Tensor, columns: Mapping[str, Tensor], *, version: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and tokens kept, [B, T], and sums of the weights before a first update."""
        join = SampleJoiner(columns.get(EPISODE_COLUMN))
        joined = {name: join(column) for name, column in columns.items()}
        weights, near, sums = correct_before_updates(
            self.settings, joined, join(logprobs), version=version
        )
        return join.split(weights), join.split(near), sums

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        return self.settings.compute_loss_denominator(sums)

    def compute_column(self, forward: ForwardFunction, batch: TensorDict, column: str) -> Tensor:
        return self.score_batch(forward, batch).logprobs

    def compute_columns(
        self, forward: ForwardFunction, batch: TensorDict, columns: Sequence[str]
    ) -> dict[str, Tensor]:
        if REF_TOP_IDS not in columns:
            return super().compute_columns(forward, batch, columns)
        ids, attention = batch["token_ids"], batch["attention_mask"]
        scores = compute_token_logprobs(
            forward, ids, attention, temperature=self.temperature, words=self.top_words
        )
        assert scores.word_ids is not None and scores.word_logprobs is not None
        by_name = {REF_TOP_IDS: scores.word_ids, REF_TOP_LOGPROBS: scores.word_logprobs}
        return {REF_LOGPROBS: scores.logprobs, **by_name}

    def is_own(self, name: str) -> bool:
        return not name.startswith(VALUE_HEADS)


@dataclass(frozen=True)
class PairTask(PolicyTask):
    """Trains a reward model on pairs: the score of a completion is the logprob of its last token.

    A head that the directory lacks starts at 0.
    """

    loader = staticmethod(partial(load_reward_model, makes_head=True))

    def score_batch(
        self, forward: ForwardFunction, batch: TensorDict, entropy_mode: EntropyMode = "none"
    ) -> TokenScores:
        ids, attention = batch["token_ids"], batch["attention_mask"]
        scores = compute_row_logits(forward, ids, attention)[:, None]
        is_last = torch.arange(ids.shape[1], device=ids.device) == attention.sum(-1, True) - 1
        return TokenScores(scores * is_last, torch.zeros(ids.shape, device=ids.device))

    def compute_loss_from_scores(
        self, scores: TokenScores, columns: Mapping[str, Tensor], *, version: int
    ) -> LossAndSums:
        loss, sums = super().compute_loss_from_scores(scores, columns, version=version)
        chosen, rejected = scores.logprobs.detach().sum(-1).view(-1, 2).T
        return loss, sums | {"right_pairs": (chosen > rejected).sum()}

    def is_own(self, name: str) -> bool:
        return True


@dataclass(frozen=True)
class TwoHeadedTask(PolicyTask):
    """Trains policy and critic as two heads of a shared model, with the sum of their losses.

    HybridFlow calls this AC-share.
    """

    loader = staticmethod(load_two_headed_model)
    value_clip: float | None = None
    value_coef: float = 1.0

    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        scores, values = self._score_both_heads(forward, batch)
        columns = batch.to_dict()
        loss, sums = self.compute_loss_from_scores(scores, columns, version=version)
        join = SampleJoiner(columns.get(EPISODE_COLUMN))
        episodes = {name: join(column) for name, column in columns.items()}
        value_loss, value_sums = shared_value_loss(
            self.settings, episodes, join(values), clip=self.value_clip
        )
        return loss + self.value_coef * value_loss, sums | value_sums

    def compute_zero_loss(self, forward: ForwardFunction, batch: TensorDict) -> Tensor:
        scores, values = self._score_both_heads(forward, batch)
        return 0 * (scores.logprobs.sum() + values.sum())

    def compute_column(self, forward: ForwardFunction, batch: TensorDict, column: str) -> Tensor:
        scores, values = self._score_both_heads(forward, batch)
        return scores.logprobs if column == REF_LOGPROBS else values

    def _score_both_heads(
        self, forward: ForwardFunction, batch: TensorDict
    ) -> tuple[TokenScores, Tensor]:
        """Run the model once; return the tokens' logprobs and entropies, and their values."""
        ids, attention = batch["token_ids"], batch["attention_mask"]
        routing = self.make_routing(batch)
        output = run_scoring_forward(
            forward,
            ids,
            attention,
            temperature=self.temperature,
            entropy_mode=self.entropy_mode,
            sampling_mask=batch.get("sampling_mask"),
            routing=routing,
        )
        assert output.state_values is not None, "the model has two heads"
        scores = shift_scores(output, attention)._replace(routing=routing)
        return scores, shift_right(output.state_values, attention)


@dataclass(frozen=True)
class CriticTask(TrainingTask):
    """Trains a critic with PPO's value loss, clipped to the range `clip` (None: not clipped).

    shares_policy: the published model is a policy with a value head, and this one a copy of its
    body and value head that only computes values.
    """

    loader = staticmethod(load_value_model)
    clip: float | None
    name: str = field(default=CRITIC, kw_only=True)
    shares_policy: bool = field(default=False, kw_only=True)

    @property
    def token_columns(self) -> tuple[str, ...]:
        return ("token_ids", "loss_mask", CRITIC_COLUMNS[self.name][0])

    def compute_loss(
        self, forward: ForwardFunction, batch: TensorDict, *, version: int
    ) -> LossAndSums:
        column, returns_column = CRITIC_COLUMNS[self.name]
        old, returns = batch[column], batch[returns_column]
        values = self.compute_column(forward, batch, column)
        columns = {"loss_mask": batch["loss_mask"], "values": old, "returns": returns}
        return critic_loss(columns, values, clip=self.clip)

    def compute_column(self, forward: ForwardFunction, batch: TensorDict, column: str) -> Tensor:
        return compute_token_values(forward, batch["token_ids"], batch["attention_mask"])

    def is_own(self, name: str) -> bool:
        return name not in self._policy_only_names

    @cached_property
    def _policy_only_names(self) -> set[str]:
        """Names of the parameters that a shared policy has and its critic lacks."""
        if not self.shares_policy:
            return set()
        policy, critic = (
            {name for name, _ in load(self.model_path).named_parameters(remove_duplicate=False)}
            for load in (load_skeleton, load_value_skeleton)
        )
        return policy - critic
