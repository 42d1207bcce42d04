"""A reward model of sums: from the base model that writes them, taught to tell right from wrong."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from examples.arithmetic.training import LESSONS, is_right, worked_solution
from examples.toy_models.base_model import sample
from examples.toy_models.lessons import step
from examples.toy_models.rows import Row

# Of what an answer is made; a model under training by this one's judgement writes anything.
SIGNS = "0123456789+-="


@dataclass(frozen=True)
class Recipe:
    """How the reward model is trained."""

    num_steps: int = 400
    """Optimizer steps."""
    rows_per_step: int = 128
    """Problems in each step, with an answer each."""
    lr: float = 1e-3
    """Highest learning rate, of a one-cycle schedule."""


def untrained(base_model: Path, *, seed: int) -> Qwen2ForSequenceClassification:
    """The base model with a head of one number in place of its tokens, at random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForSequenceClassification.from_pretrained(base_model, num_labels=1)


def an_answer(row: Row, rng: random.Random) -> str:
    """Right about every second time; else with slips, cut short, or with signs that do not fit."""
    kind = rng.random()
    text = worked_solution(row, rng, 0.6 if kind < 0.35 else 0.0)
    if kind < 0.75:
        return text
    if kind < 0.8:
        return text[: rng.randrange(len(text))]
    letters = list(text)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(letters) + 1)
        letters[place : place + rng.randrange(2)] = rng.choice(SIGNS)
    return "".join(letters)[: LESSONS.max_new_tokens]


def conversation(row: Row, answer: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The row's prompt and an answer, as the chat template renders them."""
    messages = [*row["prompt"], {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def logits_of(
    model: Qwen2ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> Tensor:
    """The model's number for each conversation, [texts]: how likely it is right, as a logit."""
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    return model(batch.input_ids, attention_mask=batch.attention_mask).logits.squeeze(1)


def train(
    model: Qwen2ForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    recipe: Recipe,
    *,
    seed: int,
) -> Iterator[float]:
    """Train the model in place; yields each step's loss (nats per answer)."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.num_steps, pct_start=0.1
    )
    for _ in range(recipe.num_steps):
        judged = [(row, an_answer(row, rng)) for row in rng.sample(rows, recipe.rows_per_step)]
        right = torch.tensor([float(is_right(row, answer)) for row, answer in judged])
        model.train()
        logits = logits_of(model, tokenizer, [conversation(*one, tokenizer) for one in judged])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, right)
        yield step(model, optimizer, loss)
        schedule.step()


def ranking(
    model: Qwen2ForSequenceClassification,
    policy: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
) -> float:
    """How often it puts a right above a wrong answer that the policy gives to the same problem."""
    answers = sample(policy, tokenizer, rows, max_new_tokens=LESSONS.max_new_tokens)
    above = []
    for row, texts in zip(rows, answers, strict=True):
        with torch.inference_mode():
            found = logits_of(
                model.eval(), tokenizer, [conversation(row, text, tokenizer) for text in texts]
            )
        right = torch.tensor([is_right(row, text) for text in texts])
        above += (found[right, None] > found[None, ~right]).flatten().tolist()
    return sum(above) / max(len(above), 1)
