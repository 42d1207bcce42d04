"""Reward model of the arithmetic task, trained on pairs of a right and a wrong answer."""

import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from examples.arithmetic.training import LESSONS, is_right, write_solution
from examples.toy_models.base_model import sample_completions
from examples.toy_models.rows import Row
from examples.toy_models.small_qwen2 import save_model
from examples.toy_models.training import TrainingRecipe

RECIPE = TrainingRecipe(num_steps=400, lr=1e-3, bar={"eval_ranking": 0.85})
NUM_LAYERS = 4
# Some training answers have random signs, because the policy can sample any text.
SIGNS = "0123456789+-="


def deepen(base_model: Path, folder: Path, *, seed: int) -> None:
    """Write the base model with additional layers and a head, randomly initialized, to a folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForSequenceClassification.from_pretrained(
            base_model,
            num_labels=1,
            num_hidden_layers=NUM_LAYERS,
            layer_types=["full_attention"] * NUM_LAYERS,
        )
    save_model(model, PreTrainedTokenizerFast.from_pretrained(base_model), folder)


def write_pair(row: Row, rng: random.Random) -> Row:
    """Return a row of a right answer and a wrong one: with a slip, cut, or garbled."""
    right = wrong = write_solution(row, rng, 0.0)
    while is_right(row, wrong):
        wrong = write_wrong(row, rng)
    return {"prompt": row["prompt"], "chosen": right, "rejected": wrong}


def write_wrong(row: Row, rng: random.Random) -> str:
    """Return an answer that is seldom right."""
    kind = rng.random()
    if kind < 0.8:
        return write_solution(row, rng, 0.5)
    text = write_solution(row, rng, 0.0)
    if kind < 0.85:
        return text[: rng.randrange(len(text))]
    letters = list(text)
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(letters) + 1)
        letters[start : start + rng.randrange(2)] = rng.choice(SIGNS)
    return "".join(letters)[: LESSONS.max_new_tokens]


def render_conversation(row: Row, answer: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Render the row's prompt and an answer with the chat template."""
    messages = [*row["prompt"], {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def compute_logits(
    model: Qwen2ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> Tensor:
    """Return the logit of "right" for each conversation, [texts]."""
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    return model(batch.input_ids, attention_mask=batch.attention_mask).logits.squeeze(1)


def measure_ranking(
    model: Qwen2ForSequenceClassification,
    policy: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
) -> float:
    """Return the fraction of pairs of right and wrong answers to a problem ranked correctly.

    The answers are samples of the policy.
    """
    answers = sample_completions(policy, tokenizer, rows, max_new_tokens=LESSONS.max_new_tokens)
    above = []
    for row, texts in zip(rows, answers, strict=True):
        with torch.inference_mode():
            logits = compute_logits(
                model.eval(),
                tokenizer,
                [render_conversation(row, text, tokenizer) for text in texts],
            )
        right = torch.tensor([is_right(row, text) for text in texts])
        above += (logits[right, None] > logits[None, ~right]).flatten().tolist()
    return sum(above) / max(len(above), 1)
