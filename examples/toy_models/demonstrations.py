"""Train a base model on demonstrations: conversations of many turns, with mistakes among them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.lessons import IGNORED, take_optimizer_step
from examples.toy_models.rows import Row

Conversation = list[dict[str, str]]
Demonstrate = Callable[[Row, random.Random], Conversation]
"""Function of row and random source that writes a conversation, the row's prompt included."""


@dataclass(frozen=True)
class DemonstrationRecipe:
    """Demonstrations, steps and learning rate of the training of a base model."""

    num_demonstrations: int = 8192
    """Different demonstrations, each drawn for a row of the split `train`."""
    num_steps: int = 300
    """Optimizer steps."""
    demonstrations_per_step: int = 128
    lr: float = 3e-3
    """Peak learning rate of a one-cycle schedule."""
    num_measured: int = 256
    """Rows per split on which the final model is measured."""


def encode_conversation(
    messages: Conversation, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Return token ids and labels; only the assistant's turns and their EOS tokens have labels.

    Writes the tokens of TURNS_TEMPLATE directly: rendering thousands of conversations message by
    message, to find where turns start and end, takes longer than training on them.
    """
    vocabulary = tokenizer.get_vocab()
    ids, labels = [tokenizer.bos_token_id], [IGNORED]
    for message in messages:
        is_written = message["role"] == "assistant"
        end = tokenizer.eos_token if is_written else "\n"
        piece = [vocabulary[sign] for sign in (*message["content"], end)]
        ids += piece
        labels += piece if is_written else [IGNORED] * len(piece)
    return ids, labels


def encode_conversations(
    conversations: list[Conversation], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, both [conversations, tokens], padded on the right."""
    encoded = [encode_conversation(messages, tokenizer) for messages in conversations]
    ids, labels = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
        for rows, padding in zip(
            zip(*encoded, strict=True), (tokenizer.pad_token_id, IGNORED), strict=True
        )
    )
    return ids, labels


def train_on_demonstrations(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    demonstrate: Demonstrate,
    recipe: DemonstrationRecipe,
    *,
    seed: int,
) -> Iterator[float]:
    """Train the model in place; yield the loss of each step (nats per token)."""
    rng = random.Random(seed)
    conversations = [demonstrate(rng.choice(rows), rng) for _ in range(recipe.num_demonstrations)]
    ids, labels = encode_conversations(conversations, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.num_steps, pct_start=0.1
    )
    model.train()
    for _ in range(recipe.num_steps):
        chosen = rng.sample(range(recipe.num_demonstrations), recipe.demonstrations_per_step)
        width = int((labels[chosen] != IGNORED).any(0).nonzero().max()) + 1
        batch, targets = ids[chosen, :width], labels[chosen, :width]
        loss = model(input_ids=batch, labels=targets, use_cache=False).loss
        yield take_optimizer_step(model, optimizer, loss)
        schedule.step()
