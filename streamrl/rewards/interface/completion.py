"""Completions as rewards read them: the policy's words, apart from those of its environment."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from streamrl.messages import (
    Array,
    Columns,
    Prompt,
    TokenSource,
    count_samples,
    extract_completions,
    find_first_samples,
    split_token_column,
    sum_over_samples,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Conversation = Sequence[Mapping[str, Any]]
"""Chat messages in OpenAI's form; arguments of tool calls are objects."""
LAST_TURN, SAMPLED, CONVERSATION = "last_turn", "sampled", "conversation"
COMPLETION_PARTS = (LAST_TURN, SAMPLED, CONVERSATION)
"""Parts of a completion that a reward may read; equal for a completion of a single turn."""


@dataclass(frozen=True)
class Completion:
    """Text of a rollout after its prompt.

    turns: what the policy sampled, by turn. turn_ids: the same as token ids, int32 [tokens] each;
        () for a text alone.
    conversation: everything from the first sampled token on, observations and scaffold included.
        Of an episode of several samples, without what later samples repeat.
    environment_score: score of the rollout's environment; None without an environment.
        turn_rewards: its rewards by turn.
    messages: the whole conversation as chat messages, the prompt's included; () without an
        environment.
    """

    turns: tuple[str, ...]
    conversation: str
    environment_score: float | None = None
    messages: Conversation = ()
    turn_ids: tuple[Array, ...] = field(default=(), compare=False)
    turn_rewards: tuple[float, ...] = ()

    @classmethod
    def from_text(cls, text: str, token_ids: Array | None = None) -> "Completion":
        """Wrap the text of a rollout of a single turn."""
        return cls((text,), text, turn_ids=() if token_ids is None else (token_ids,))

    def get_part_ids(self, part: str) -> list[int] | None:
        """Return the sampled tokens of a part; None for a text alone."""
        turns = self.get_part_turns(part)
        return [int(token) for ids in turns for token in ids] if turns else None

    def get_part_turns(self, part: str) -> tuple[Array, ...]:
        """Return the sampled tokens of a part by turn; () for a text alone."""
        return self.turn_ids[-1:] if part == LAST_TURN else self.turn_ids

    def get_part(self, part: str) -> str:
        """Return the text of a part, one of COMPLETION_PARTS; turns are joined by newlines."""
        if part == CONVERSATION:
            return self.conversation
        return self.turns[-1] if part == LAST_TURN else "\n".join(self.turns)

    def get_messages(self, prompt: Prompt, part: str) -> list[dict[str, Any]]:
        """Return the chat messages up to the end of the completion, as far as the part goes.

        CONVERSATION is the episode as it was, with observations, tools and their calls. Any other
        part is one message of the assistant after those of the prompt.
        """
        if part == CONVERSATION and self.messages:
            return [dict(message) for message in self.messages]
        answer = {"role": "assistant", "content": self.get_part(part)}
        return [*(dict(message) for message in prompt.messages), answer]


def encode_conversations(conversations: Sequence[Conversation]) -> Array:
    """Return the column `conversations` of a group, uint8 [B]: JSON, compressed."""
    plain = [[dict(message) for message in messages] for messages in conversations]
    text = json.dumps(plain, ensure_ascii=False, default=str)
    # A tool's output may have lone surrogates, which UTF-8 cannot encode.
    return np.frombuffer(zlib.compress(text.encode("utf-8", "replace"), level=1), np.uint8)


def decode_conversations(column: Array) -> list[Conversation]:
    """Return the chat messages of each rollout."""
    conversations: list[Conversation] = json.loads(zlib.decompress(column.tobytes()))
    return conversations


def decode_completions(
    tokenizer: "PreTrainedTokenizerBase", completions: Sequence[Array]
) -> list[str]:
    """Decode token ids, int32 [tokens] per completion, without special tokens or cleaned spaces."""
    texts = tokenizer.batch_decode(
        [completion.tolist() for completion in completions],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return [str(text) for text in texts]


def decode_rollouts(tokenizer: "PreTrainedTokenizerBase", columns: Columns) -> list[Completion]:
    """Decode the rollouts of a group, without special tokens; samples of an episode as one.

    columns: ROLLOUT_COLUMNS, and EPISODE_COLUMNS if the rollouts have an environment.
    """
    if "turn_ends" not in columns:
        texts = decode_completions(tokenizer, extract_completions(columns))
        sampled_ids = [
            ids[mask]
            for ids, mask in zip(
                split_token_column(columns["token_ids"], columns["lengths"]),
                split_token_column(columns["loss_mask"], columns["lengths"]),
                strict=True,
            )
        ]
        return [*map(Completion.from_text, texts, sampled_ids)]
    samples = count_samples(columns)
    conversations = decode_completions(tokenizer, _extract_conversations(columns, samples))
    starts = np.cumsum(columns["lengths"]) - columns["lengths"]
    turn_starts = np.repeat(starts, columns["num_turns"])
    turn_ids, previous = [], 0
    for start, end in zip(turn_starts, turn_starts + columns["turn_ends"], strict=True):
        sampled = slice(max(start, previous), end)
        turn_ids.append(columns["token_ids"][sampled][columns["loss_mask"][sampled]])
        previous = end
    turns = decode_completions(tokenizer, turn_ids)
    rewards = columns["turn_rewards"].tolist()
    counts = sum_over_samples(columns["num_turns"], samples)
    ends = np.cumsum(counts).tolist()
    return [
        Completion(
            tuple(turns[end - count : end]),
            conversation,
            float(score),
            messages,
            tuple(turn_ids[end - count : end]),
            tuple(rewards[end - count : end]),
        )
        for end, count, conversation, score, messages in zip(
            ends,
            counts.tolist(),
            conversations,
            columns["environment_scores"][find_first_samples(samples)],
            decode_conversations(columns["conversations"]),
            strict=True,
        )
    ]


def _extract_conversations(columns: Columns, samples: Array) -> list[Array]:
    """Return the tokens of each episode, int32 [C], without its prompt and that of later samples.

    samples: number of rollouts of each episode.
    """
    lengths = sum_over_samples(columns["lengths"], samples)
    is_new = columns["token_source"] != TokenSource.PROMPT
    return [
        token_ids[mask]
        for token_ids, mask in zip(
            split_token_column(columns["token_ids"], lengths),
            split_token_column(is_new, lengths),
            strict=True,
        )
    ]
