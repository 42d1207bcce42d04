"""Build a task's rows and base model, trained on demonstrations, and measure the model."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.building import repeat_until_reached
from examples.toy_models.rows import Row, write_rows
from examples.toy_models.small_qwen2 import (
    make_tokenizer,
    make_turns_tokenizer,
    make_untrained,
    save_model,
)
from examples.toy_models.training import TrainingRecipe, train_on_rows

Conversation = list[dict[str, str]]
Demonstrate = Callable[[Row, random.Random, float], Conversation]
"""Function of a row, random source and slip rate that writes the row's prompt and what follows."""
Measure = Callable[
    [Qwen2ForCausalLM, PreTrainedTokenizerFast, dict[str, list[Row]]], dict[str, float]
]
"""Function of model, tokenizer and rows by split that returns statistics."""


@dataclass(frozen=True)
class Lessons:
    """Training answers of a task of one turn, and the check of sampled ones."""

    write: Callable[[Row, random.Random, float], str]
    """Function of a row, random source and slip rate that writes an answer."""
    is_right: Callable[[Row, str], bool]
    max_new_tokens: int
    opening: str = "="
    """Text of the chat template before an answer."""

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        return make_tokenizer(self.opening)

    def demonstrate(self, row: Row, rng: random.Random, slip_rate: float) -> Conversation:
        return [
            *row["prompt"],
            {"role": "assistant", "content": self.write(row, rng, slip_rate)},
        ]

    def measure(
        self,
        model: Qwen2ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        rows: dict[str, list[Row]],
    ) -> dict[str, float]:
        """Return the pass rate of each split, and that of the likeliest answers of `eval`."""
        rates = {
            name: measure_pass_rate(model, tokenizer, part, self) for name, part in rows.items()
        }
        greedy = measure_pass_rate(model, tokenizer, rows["eval"], self, num_samples=0)
        return {**rates, "eval_greedy": greedy}


@dataclass(frozen=True)
class TurnLessons:
    """Demonstrations of a task of several turns, and the measurement of a model."""

    demonstrate: Demonstrate
    measure: Measure

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        return make_turns_tokenizer()


def make_base_model(
    folder: Path,
    rows: dict[str, list[Row]],
    lessons: Lessons | TurnLessons,
    recipe: TrainingRecipe,
    *,
    seed: int,
) -> dict[str, Any]:
    """Write the rows of each split, `demonstrations`, and the models `untrained` and `base_model`.

    Returns the recipe and the measured statistics for the build record.
    """
    (task,) = {row["data_source"] for part in rows.values() for row in part}
    for name, part in rows.items():
        write_rows(part, folder / name)
    print(f"{task}: " + ", ".join(f"{len(part)} {name} rows" for name, part in rows.items()))
    tokenizer = lessons.make_tokenizer()
    measured = {name: part[: recipe.num_measured] for name, part in rows.items()}

    def attempt(model_seed: int) -> dict[str, float]:
        shown = write_demonstrations(rows["train"], lessons.demonstrate, recipe, seed=model_seed)
        write_rows(shown, folder / "demonstrations")
        untrained = make_untrained(tokenizer, seed=model_seed, hidden_size=recipe.hidden_size)
        save_model(untrained, tokenizer, folder / "untrained")
        trained = folder / "base_model"
        train_on_rows(folder / "untrained", shown, trained, recipe, seed=model_seed)
        model = Qwen2ForCausalLM.from_pretrained(trained)
        return lessons.measure(model, tokenizer, measured)

    reached = repeat_until_reached(attempt, recipe.bar, task=task, seed=seed)
    return {"recipe": asdict(recipe), **reached}


def write_demonstrations(
    rows: list[Row], demonstrate: Demonstrate, recipe: TrainingRecipe, *, seed: int
) -> list[Row]:
    """Return the demonstrations of all steps in order; a step shows different rows.

    Only the last fifth of the steps has slips: a model that knows the right answers, and has then
    seen some slips, is one that RL soon corrects.
    """
    rng, first_with_slips = random.Random(seed), recipe.num_steps * 4 // 5
    return [
        {"messages": demonstrate(row, rng, recipe.slip_rate * (step >= first_with_slips))}
        for step in range(recipe.num_steps)
        for row in rng.sample(rows, recipe.rows_per_step)
    ]


def sample_completions(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    *,
    max_new_tokens: int,
    num_samples: int = 4,
    seed: int = 0,
) -> list[list[str]]:
    """Sample `num_samples` completions per row at temperature 1; 0 decodes the likeliest one."""
    num_texts = max(num_samples, 1)
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, tokenize=False
    )
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.eval().generate(
            **batch,
            max_new_tokens=max_new_tokens,
            num_return_sequences=num_texts,
            do_sample=num_samples > 0,
        )
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return [texts[i : i + num_texts] for i in range(0, len(texts), num_texts)]


def measure_pass_rate(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    lessons: Lessons,
    *,
    num_samples: int = 4,
) -> float:
    """Return the fraction of right answers among the samples; 0 takes the likeliest answer."""
    completions = sample_completions(
        model,
        tokenizer,
        rows,
        max_new_tokens=lessons.max_new_tokens,
        num_samples=num_samples,
    )
    right = [
        lessons.is_right(row, text)
        for row, texts in zip(rows, completions, strict=True)
        for text in texts
    ]
    return sum(right) / len(right)
