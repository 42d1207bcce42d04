"""How a base model is taught: right answers first, then some with slips, until it often fails."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.rows import Row

IGNORED = -100  # transformers' label for "no loss here"
STEPS_PER_LINE = 100


@dataclass(frozen=True)
class Recipe:
    """How long a base model is trained, and on how many slips."""

    num_clean_steps: int = 300
    """Optimizer steps in which every answer is right."""
    num_slip_steps: int = 80
    """Optimizer steps after these, in which some are not; may be 0."""
    slip_rate: float = 0.33
    """How often there is a slip in a slip step; what counts as one is the task's to say."""
    rows_per_step: int = 128
    """Problems in each step."""
    clean_lr: float = 2e-3
    """Highest learning rate of the clean steps, which follow a one-cycle schedule."""
    slip_lr: float = 5e-4
    """Highest learning rate of the slip steps, likewise."""
    num_measured: int = 256
    """Problems of each split on which the pass rate is measured at the end."""


Write = Callable[[Row, random.Random, float], str]
"""What the model is to write for a row, with slips at the given rate."""


@dataclass(frozen=True)
class Lessons:
    """What a task teaches its base model, and how its answers are judged."""

    write: Write
    is_right: Callable[[Row, str], bool]
    max_new_tokens: int
    opening: str = "="
    """What the chat template writes before an answer."""


def prompt_text(row: Row, tokenizer: PreTrainedTokenizerFast) -> str:
    """A row's prompt as the chat template renders it, up to where the model is to write."""
    return str(
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    )


def encode(
    prompts: list[str], completions: list[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [rows, tokens], padded on the right.

    Only the completion and the end-of-sequence token behind it have labels.
    """
    texts = [p + c + tokenizer.eos_token for p, c in zip(prompts, completions, strict=True)]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    prompt_lengths = torch.tensor([len(ids) for ids in tokenizer(prompts).input_ids])
    positions = torch.arange(batch.input_ids.shape[1])
    has_label = (positions >= prompt_lengths.unsqueeze(1)) & batch.attention_mask.bool()
    return batch.input_ids, batch.input_ids.masked_fill(~has_label, IGNORED)


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    write: Write,
    recipe: Recipe,
    *,
    seed: int,
) -> Iterator[float]:
    """Train the model in place; yields each step's loss (nats per token)."""
    rng = random.Random(seed)
    lessons = [(prompt_text(row, tokenizer), row) for row in rows]
    for num_steps, lr, slip_rate in (
        (recipe.num_clean_steps, recipe.clean_lr, 0.0),
        (recipe.num_slip_steps, recipe.slip_lr, recipe.slip_rate),
    ):
        if num_steps == 0:  # no schedule spans no step
            continue
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, lr, total_steps=num_steps, pct_start=0.1
        )
        for _ in range(num_steps):
            batch = rng.sample(lessons, recipe.rows_per_step)
            answers = [write(row, rng, slip_rate) for _, row in batch]
            ids, labels = encode([prompt for prompt, _ in batch], answers, tokenizer)
            model.train()
            yield step(model, optimizer, model(input_ids=ids, labels=labels, use_cache=False).loss)
            schedule.step()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One optimizer step down a loss of the model; returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def report(losses: Iterator[float], *, task: str) -> None:
    """Run the training these losses come from, with a line now and then."""
    start_s = time.monotonic()
    for number, loss in enumerate(losses, 1):
        if number % STEPS_PER_LINE == 0:
            seconds = time.monotonic() - start_s
            print(f"{task}: step {number}, loss {loss:.2f}, {seconds:.0f} s", flush=True)
