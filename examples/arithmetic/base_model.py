"""A small Qwen2 that can do the sums but slips about every second time: room for RL to improve."""

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=().,:;?!<>[]'\"_#%"
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{- '=' + message.content + eos_token -}}"
    "{%- else -%}{{- message.content -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '=' -}}{%- endif -%}"
)
SLIPS = (-10, -2, -1, 1, 2, 10)
IGNORED = -100  # transformers' label for "no loss here"

Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How the base model is trained."""

    num_steps: int = 320
    """Optimizer steps."""
    rows_per_step: int = 128
    """Rows in each step."""
    peak_lr: float = 2e-3
    """Highest learning rate of the one-cycle schedule."""
    clean_share: float = 0.75
    """Share of the steps, from the start, in which every label is right."""
    slip_rate: float = 0.5
    """Share of wrong labels in the other steps."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. All 64 ids decode, so whatever is sampled has a text."""
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_untrained(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen2ForCausalLM:
    """A 0.45 M-parameter Qwen2 with random weights, heads of 32 as inference engines want."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


@dataclass(frozen=True)
class Example:
    """A rendered prompt (`<bos>7+5-3=`) and the number that belongs behind it."""

    prompt: str
    answer: int


def as_example(row: Row, tokenizer: PreTrainedTokenizerFast) -> Example:
    """What a verl row asks, rendered as a generator would render it."""
    prompt = tokenizer.apply_chat_template(
        row["prompt"], add_generation_prompt=True, tokenize=False
    )
    return Example(prompt, int(row["reward_model"]["ground_truth"]))


def encode(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [examples, tokens], padded on the right.

    Only the answer and the end-of-sequence token after it carry a label.
    """
    texts = [f"{example.prompt}{example.answer}{tokenizer.eos_token}" for example in examples]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    ids = batch.input_ids
    answer_mark = tokenizer.convert_tokens_to_ids("=")
    behind_mark = ((ids == answer_mark).cumsum(dim=1) > 0) & (ids != answer_mark)
    has_label = behind_mark & batch.attention_mask.bool()
    return ids, ids.masked_fill(~has_label, IGNORED)


def batches(examples: list[Example], recipe: Recipe, *, seed: int) -> Iterator[list[Example]]:
    """One batch per step: all examples in random order, again and again, slips in the late ones."""
    rng = random.Random(seed)
    num_clean_steps = round(recipe.clean_share * recipe.num_steps)
    waiting: list[Example] = []
    for step in range(recipe.num_steps):
        if len(waiting) < recipe.rows_per_step:
            waiting = rng.sample(examples, len(examples))
        batch, waiting = waiting[: recipe.rows_per_step], waiting[recipe.rows_per_step :]
        slip_rate = recipe.slip_rate if step >= num_clean_steps else 0.0
        yield [
            with_slip(example, rng) if rng.random() < slip_rate else example for example in batch
        ]


def with_slip(example: Example, rng: random.Random) -> Example:
    """The same prompt with an answer that is a little off, or off by ten."""
    return Example(example.prompt, example.answer + rng.choice(SLIPS))


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    recipe: Recipe,
    *,
    seed: int,
) -> Iterator[float]:
    """Train the model in place; yields the loss (nats per token) after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.peak_lr, total_steps=recipe.num_steps, pct_start=0.1
    )
    model.train()
    for batch in batches(examples, recipe, seed=seed):
        ids, labels = encode(batch, tokenizer)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


@torch.no_grad()
def pass_rate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> float:
    """The mean probability of the right answer: pass@1 at temperature 1, without sampling noise."""
    model.eval()
    ids, labels = encode(examples, tokenizer)
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(dim=-1)
    targets = labels[:, 1:]
    chosen = logprobs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(targets == IGNORED, 0.0).sum(dim=1).exp().mean().item()


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face model directory: config, weights, tokenizer, generation config."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
