"""Pretrain a base model on right answers, then on answers with slips (deliberate mistakes)."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.rows import Row

IGNORED = -100  # transformers' label for "no loss here"
STEPS_PER_LINE = 100


@dataclass(frozen=True)
class PretrainingRecipe:
    """Steps, learning rates and slips of the pretraining of a base model."""

    num_clean_steps: int = 300
    """Optimizer steps on right answers."""
    num_slip_steps: int = 80
    """Optimizer steps on answers with slips, after the clean steps; may be 0."""
    slip_rate: float = 0.33
    """Rate of slips in a slip step; the task defines a slip."""
    rows_per_step: int = 128
    """Problems per step."""
    clean_lr: float = 2e-3
    """Peak learning rate of the one-cycle schedule of the clean steps."""
    slip_lr: float = 5e-4
    """Peak learning rate of the one-cycle schedule of the slip steps."""
    num_measured: int = 256
    """Problems per split on which the final pass rate is measured."""
    bar: Mapping[str, float] = field(default_factory=dict)
    """Lowest pass rates that a usable model may have, by name."""


Write = Callable[[Row, random.Random, float], str]
"""Function of row, random source and slip rate that writes an answer."""


@dataclass(frozen=True)
class Lessons:
    """Training answers of a task, and the check of sampled ones."""

    write: Write
    is_right: Callable[[Row, str], bool]
    max_new_tokens: int
    opening: str = "="
    """Text of the chat template before an answer."""


def render_prompt(row: Row, tokenizer: PreTrainedTokenizerFast) -> str:
    """Render a row's prompt with the chat template, up to the answer."""
    return str(
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    )


def encode_rows(
    prompts: list[str], completions: list[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, both [rows, tokens], padded on the right.

    Only the completion and its end-of-sequence token have labels.
    """
    texts = [p + c + tokenizer.eos_token for p, c in zip(prompts, completions, strict=True)]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    prompt_lengths = torch.tensor([len(ids) for ids in tokenizer(prompts).input_ids])
    positions = torch.arange(batch.input_ids.shape[1])
    has_label = (positions >= prompt_lengths.unsqueeze(1)) & batch.attention_mask.bool()
    return batch.input_ids, batch.input_ids.masked_fill(~has_label, IGNORED)


def pretrain_model(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    write: Write,
    recipe: PretrainingRecipe,
    *,
    seed: int,
) -> Iterator[float]:
    """Train the model in place; yield the loss of each step (nats per token)."""
    rng = random.Random(seed)
    lessons = [(render_prompt(row, tokenizer), row) for row in rows]
    for num_steps, lr, slip_rate in (
        (recipe.num_clean_steps, recipe.clean_lr, 0.0),
        (recipe.num_slip_steps, recipe.slip_lr, recipe.slip_rate),
    ):
        if num_steps == 0:  # OneCycleLR refuses 0 steps
            continue
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, lr, total_steps=num_steps, pct_start=0.1
        )
        for _ in range(num_steps):
            batch = rng.sample(lessons, recipe.rows_per_step)
            answers = [write(row, rng, slip_rate) for _, row in batch]
            ids, labels = encode_rows([prompt for prompt, _ in batch], answers, tokenizer)
            model.train()
            yield take_optimizer_step(
                model, optimizer, model(input_ids=ids, labels=labels, use_cache=False).loss
            )
            schedule.step()


def take_optimizer_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor
) -> float:
    """Take one optimizer step; return the loss."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def report_losses(losses: Iterator[float], *, task: str) -> None:
    """Consume the losses of a training; print one in STEPS_PER_LINE."""
    start_s = time.monotonic()
    for number, loss in enumerate(losses, 1):
        if number % STEPS_PER_LINE == 0:
            seconds = time.monotonic() - start_s
            print(f"{task}: step {number}, loss {loss:.2f}, {seconds:.0f} s", flush=True)
