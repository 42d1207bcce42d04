"""Train a base model on demonstrations: conversations of many turns, with mistakes among them."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.building import repeat_until_reached
from examples.toy_models.lessons import IGNORED, report_losses, take_optimizer_step
from examples.toy_models.rows import Row, write_rows
from examples.toy_models.small_qwen2 import (
    TURNS_TEMPLATE,
    make_tokenizer,
    make_untrained,
    save_model,
)

Conversation = list[dict[str, str]]
Demonstrate = Callable[[Row, random.Random], Conversation]
"""Function of row and random source that writes a conversation, the row's prompt included."""
Measure = Callable[[Qwen2ForCausalLM, PreTrainedTokenizerFast, list[Row]], dict[str, float]]
"""Function that plays an episode per row and returns statistics."""


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
    hidden_size: int = 64
    """Width of the model."""
    num_measured: int = 256
    """Held-out rows on which the final model is measured."""
    bar: Mapping[str, float] = field(default_factory=dict)
    """Lowest values that a usable model may have, by name of the measured statistic."""


def make_turns_model(
    folder: Path,
    rows: dict[str, list[Row]],
    demonstrate: Demonstrate,
    measure: Measure,
    recipe: DemonstrationRecipe,
    *,
    seed: int,
) -> dict[str, Any]:
    """Write the rows of each split and `base_model/`, trained on demonstrations for `train`.

    Returns the recipe and the measured statistics for the build record.
    """
    (task,) = {row["data_source"] for part in rows.values() for row in part}
    for name, part in rows.items():
        write_rows(part, folder / name)
    print(f"{task}: " + ", ".join(f"{len(part)} {name} rows" for name, part in rows.items()))
    tokenizer = make_tokenizer(chat_template=TURNS_TEMPLATE)

    def attempt(model_seed: int) -> dict[str, float]:
        rng = random.Random(model_seed)
        shown = [
            demonstrate(rng.choice(rows["train"]), rng) for _ in range(recipe.num_demonstrations)
        ]
        model = make_untrained(tokenizer, seed=model_seed, hidden_size=recipe.hidden_size)
        report_losses(train_on_demonstrations(model, tokenizer, shown, recipe, rng), task=task)
        save_model(model, tokenizer, folder / "base_model")
        return measure(model, tokenizer, rows["eval"][: recipe.num_measured])

    reached = repeat_until_reached(attempt, recipe.bar, task=task, seed=seed)
    return {"recipe": asdict(recipe), **reached}


def measure_likeliest(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[Conversation]
) -> float:
    """Return the fraction of conversations whose written tokens are the model's likeliest ones.

    Reinforcement learning soon makes likely answers certain, so a task is solved in about this
    fraction after it. Few right samples are no obstacle, a preferred wrong token is.
    """
    ids, labels = encode_conversations(conversations, tokenizer)
    with torch.inference_mode():
        likeliest = model.eval()(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
    is_reproduced = (likeliest == labels[:, 1:]) | (labels[:, 1:] == IGNORED)
    return is_reproduced.all(1).double().mean().item()


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
    conversations: list[Conversation],
    recipe: DemonstrationRecipe,
    rng: random.Random,
) -> Iterator[float]:
    """Train the model in place; yield the loss of each step (nats per token)."""
    ids, labels = encode_conversations(conversations, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.num_steps, pct_start=0.1
    )
    model.train()
    for _ in range(recipe.num_steps):
        chosen = rng.sample(range(len(conversations)), recipe.demonstrations_per_step)
        width = int((labels[chosen] != IGNORED).any(0).nonzero().max()) + 1
        batch, targets = ids[chosen, :width], labels[chosen, :width]
        loss = model(input_ids=batch, labels=targets, use_cache=False).loss
        yield take_optimizer_step(model, optimizer, loss)
        schedule.step()
