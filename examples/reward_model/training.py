"""Reward model of the arithmetic task, trained on top of the frozen base model."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from examples.arithmetic.training import LESSONS, is_right, write_solution
from examples.toy_models.base_model import sample_completions
from examples.toy_models.lessons import IGNORED, encode_rows, render_prompt, take_optimizer_step
from examples.toy_models.rows import Row

# Some training answers have random signs, because the policy can sample any text.
SIGNS = "0123456789+-="
NUM_LAYERS = 5
EXPECTS, COMPARES = 3, 4
"""Layers (from 1) with an auxiliary loss on their outputs."""


@dataclass(frozen=True)
class RewardModelRecipe:
    """Hyperparameters of the training.

    rows_per_step: problems per optimizer step, with an answer each.
    lr: peak learning rate of the one-cycle schedule.
    num_measured: problems per split on which the final ranking is measured.
    bar: lowest ranking that a usable model may have, by name.
    """

    num_steps: int = 1100
    rows_per_step: int = 64
    lr: float = 2e-3
    num_measured: int = 256
    bar: Mapping[str, float] = field(default_factory=dict)


RECIPE = RewardModelRecipe(bar={"eval_ranking": 0.85})


class AuxiliaryHeads(torch.nn.Module):
    """Heads of the auxiliary losses, discarded after training.

    The label of an answer is a single bit, too weak a signal. A layer therefore also predicts the
    expected and the written sign at each position, and the next layer predicts their equality.
    """

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.expected = torch.nn.Linear(width, num_tokens)
        self.written = torch.nn.Linear(width, num_tokens)
        self.agree = torch.nn.Linear(width, 1)


def build_untrained(
    base_model: Path, *, seed: int
) -> tuple[Qwen2ForSequenceClassification, AuxiliaryHeads]:
    """Return the frozen base model with additional layers and a head, randomly initialized."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForSequenceClassification.from_pretrained(
            base_model,
            num_labels=1,
            num_hidden_layers=NUM_LAYERS,
            layer_types=["full_attention"] * NUM_LAYERS,
        )
        hints = AuxiliaryHeads(model.config.hidden_size, model.config.vocab_size)
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[: EXPECTS - 1]:
        layer.requires_grad_(False)
    return model, hints


def sample_answer(row: Row, rng: random.Random) -> str:
    """Return a sample answer: about half are right, others have slips, are cut or garbled."""
    kind = rng.random()
    if kind < 0.85:
        return write_solution(row, rng, 0.5 if kind < 0.7 else 0.0)
    text = write_solution(row, rng, 0.0)
    if kind < 0.88:
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


def train_reward_model(
    model: Qwen2ForSequenceClassification,
    hints: AuxiliaryHeads,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    recipe: RewardModelRecipe,
    *,
    seed: int,
) -> Iterator[float]:
    """Train model and hints in place; yield the loss (nats) of each step."""
    rng = random.Random(seed)
    modules = torch.nn.ModuleList([model, hints])
    trainable = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=recipe.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.num_steps, pct_start=0.1
    )
    for _ in range(recipe.num_steps):
        batch = rng.sample(rows, recipe.rows_per_step)
        answers = [sample_answer(row, rng) for row in batch]
        right = torch.tensor(
            [is_right(row, text) for row, text in zip(batch, answers, strict=True)]
        )
        clean = [write_solution(row, rng, 0.0) for row in batch]
        prompts = [render_prompt(row, tokenizer) for row in batch]
        ids, labels = encode_rows(prompts * 2, answers + clean, tokenizer)
        model.train()
        yield take_optimizer_step(
            modules, optimizer, compute_loss(model, hints, ids, labels != IGNORED, right)
        )
        schedule.step()


def compute_loss(
    model: Qwen2ForSequenceClassification,
    hints: AuxiliaryHeads,
    ids: Tensor,
    is_answer: Tensor,
    right: Tensor,
) -> Tensor:
    """Return the classification loss plus the auxiliary losses.

    The auxiliary losses count up to the first token where an answer differs from the clean one.
    ids, is_answer: [2 * rows, tokens], answers first, then clean answers. right: bool [rows].
    """
    written, expected = ids.chunk(2)
    is_answer = is_answer[: len(written)]
    is_token = written != model.config.pad_token_id
    same = (written == expected).long().cumprod(1).bool()
    follows = is_answer & torch.nn.functional.pad(same, (1, 0), value=True)[:, :-1]
    out = model.model(written, attention_mask=is_token.long(), output_hidden_states=True)
    expects, compares = out.hidden_states[EXPECTS], out.hidden_states[COMPARES]
    last = out.last_hidden_state[torch.arange(len(written)), is_token.sum(1) - 1]
    cross_entropy = torch.nn.functional.cross_entropy
    bit = torch.nn.functional.binary_cross_entropy_with_logits
    return (
        bit(model.score(last).squeeze(1), right.float())
        + 2 * bit(hints.agree(compares[follows]).squeeze(1), same[follows].float())
        + cross_entropy(hints.expected(expects[follows]), expected[follows])
        + cross_entropy(hints.written(expects[is_answer]), written[is_answer])
    )


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
