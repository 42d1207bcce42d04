"""Build a task's rows and base model, and measure its pass rates."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.toy_models.building import repeat_until_reached
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

    def attempt(model_seed: int) -> dict[str, float]:
        model = make_untrained(tokenizer, seed=model_seed)
        losses = pretrain_model(
            model, tokenizer, rows["train"], lessons.write, recipe, seed=model_seed
        )
        report_losses(losses, task=task)
        save_model(model, tokenizer, folder / "base_model")
        measured = {name: part[: recipe.num_measured] for name, part in rows.items()}
        pass_rates = {
            name: measure_pass_rate(model, tokenizer, part, lessons)
            for name, part in measured.items()
        }
        greedy = measure_pass_rate(model, tokenizer, measured["eval"], lessons, num_samples=0)
        return {**pass_rates, "eval_greedy": greedy}

    reached = repeat_until_reached(attempt, recipe.bar, task=task, seed=seed)
    return {"recipe": asdict(recipe), **reached}


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
    prompts = [render_prompt(row, tokenizer) for row in rows]
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
