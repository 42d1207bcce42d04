"""Teach the base model its sums, then let it see slips until it gets about half of them wrong."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

IGNORED = -100  # transformers' label for "no loss here"
MAX_NEW_TOKENS = 12
# The last of the equal parts, and only if it is one number: "12-3=9" answers 9.
ANSWER = re.compile(r"(?:\A|=)(-?\d+)\Z")

Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How the base model is trained."""

    num_clean_steps: int = 300
    """Optimizer steps in which every worked solution is right."""
    num_slip_steps: int = 80
    """Optimizer steps after these, in which some are not."""
    slip_rate: float = 0.33
    """Share of wrong operations in a slip step; a problem of three numbers has two of them."""
    slips: tuple[int, ...] = (-1, 1)
    """By how much a wrong operation is off."""
    rows_per_step: int = 128
    """Problems in each step."""
    clean_lr: float = 2e-3
    """Highest learning rate of the clean steps, which follow a one-cycle schedule."""
    slip_lr: float = 5e-4
    """Highest learning rate of the slip steps, likewise."""


def worked_solution(question: str, rng: random.Random, recipe: Recipe, slip_rate: float) -> str:
    """What the model learns to write behind `7+5-3=`: one operation at a time, `12-3=9`.

    After a slip it goes on from the wrong number, as a person would.
    """
    first, *later = re.findall(r"[+-]?\d", question)
    total, parts = int(first), []
    for i, term in enumerate(later):
        total += int(term)
        if rng.random() < slip_rate:
            total += rng.choice(recipe.slips)
        parts.append(f"{total}" + "".join(later[i + 1 :]))
    return "=".join(parts)


def answer_of(completion: str) -> int | None:
    """The number a completion ends on; None where it ends on something else."""
    found = ANSWER.search(completion)
    return int(found[1]) if found else None


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
    recipe: Recipe,
    *,
    seed: int,
) -> Iterator[float]:
    """Train the model in place; yields each step's loss (nats per token)."""
    rng = random.Random(seed)
    lessons = [(prompt_text(row, tokenizer), row["prompt"][-1]["content"]) for row in rows]
    for num_steps, lr, slip_rate in (
        (recipe.num_clean_steps, recipe.clean_lr, 0.0),
        (recipe.num_slip_steps, recipe.slip_lr, recipe.slip_rate),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, lr, total_steps=num_steps, pct_start=0.1
        )
        for _ in range(num_steps):
            batch = rng.sample(lessons, recipe.rows_per_step)
            solutions = [worked_solution(q, rng, recipe, slip_rate) for _, q in batch]
            ids, labels = encode([prompt for prompt, _ in batch], solutions, tokenizer)
            yield step(model, optimizer, ids, labels)
            schedule.step()


def texts(
    rows: list[Row], tokenizer: PreTrainedTokenizerFast, recipe: Recipe, *, seed: int
) -> list[str]:
    """A solution of each row as the base model saw them last, slips and all."""
    rng = random.Random(seed)
    return [
        prompt_text(row, tokenizer)
        + worked_solution(row["prompt"][-1]["content"], rng, recipe, recipe.slip_rate)
        for row in rows
    ]


def step(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor
) -> float:
    """One optimizer step on `encode`d rows; returns the loss before it."""
    model.train()
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def pass_rate(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    *,
    num_samples: int = 4,
    seed: int = 0,
) -> float:
    """Share of right answers among `num_samples` completions per row, sampled at temperature 1."""
    prompts = [prompt_text(row, tokenizer) for row in rows]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.eval().generate(
            **batch, max_new_tokens=MAX_NEW_TOKENS, num_return_sequences=num_samples
        )
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    truths = [int(row["reward_model"]["ground_truth"]) for row in rows for _ in range(num_samples)]
    right = [answer_of(text) == truth for text, truth in zip(texts, truths, strict=True)]
    return sum(right) / len(right)
