"""Build a task's rows and base model, and measure its pass rates."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.lessons import (
    Lessons,
    PretrainingRecipe,
    pretrain_model,
    render_prompt,
    report_losses,
)
from examples.toy_models.rows import Row, write_rows
from examples.toy_models.small_qwen2 import make_tokenizer, make_untrained, save_model


def make_base_model(
    folder: Path,
    rows: dict[str, list[Row]],
    lessons: Lessons,
    recipe: PretrainingRecipe,
    *,
    seed: int,
) -> dict[str, Any]:
    """Write the rows of each split and `base_model/`, trained on the split `train`.

    Returns the recipe and the pass rates for the build record.
    """
    (task,) = {row["data_source"] for part in rows.values() for row in part}
    for name, part in rows.items():
        write_rows(part, folder / name)
    print(f"{task}: " + ", ".join(f"{len(part)} {name} rows" for name, part in rows.items()))
    tokenizer = make_tokenizer(lessons.opening)
    model = make_untrained(tokenizer, seed=seed)
    report_losses(
        pretrain_model(model, tokenizer, rows["train"], lessons.write, recipe, seed=seed), task=task
    )
    save_model(model, tokenizer, folder / "base_model")
    pass_rates = {
        name: measure_pass_rate(model, tokenizer, part[: recipe.num_measured], lessons)
        for name, part in rows.items()
    }
    print(f"{task}: pass@1 of the base model: {pass_rates}")
    return {"recipe": asdict(recipe), "pass_rates": pass_rates}


def sample_completions(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    *,
    max_new_tokens: int,
    num_samples: int = 4,
    seed: int = 0,
) -> list[list[str]]:
    """Sample `num_samples` completions per row at temperature 1."""
    prompts = [render_prompt(row, tokenizer) for row in rows]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = model.eval().generate(
            **batch, max_new_tokens=max_new_tokens, num_return_sequences=num_samples
        )
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]


def measure_pass_rate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row], lessons: Lessons
) -> float:
    """Return the fraction of right answers among four samples per row."""
    completions = sample_completions(model, tokenizer, rows, max_new_tokens=lessons.max_new_tokens)
    right = [
        lessons.is_right(row, text)
        for row, texts in zip(rows, completions, strict=True)
        for text in texts
    ]
    return sum(right) / len(right)
