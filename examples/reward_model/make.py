"""Build the reward model of the arithmetic task, and the task itself, unless they exist."""

import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # a script run by path has only its own folder on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.arithmetic.make import BUILD as ARITHMETIC
from examples.toy_models.building import Build, repeat_until_reached

if TYPE_CHECKING:
    from examples.toy_models.training import TrainingRecipe


def write_contents(
    folder: Path,
    seed: int,
    recipe: "TrainingRecipe | None" = None,
    arithmetic: Path = ARITHMETIC.folder,
) -> dict[str, Any]:
    """Train the model on training problems of the arithmetic task and write `model/`."""
    from dataclasses import asdict

    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    from examples.arithmetic.problems import make_rows
    from examples.reward_model.training import RECIPE, deepen, measure_ranking, write_pair
    from examples.toy_models.training import train_on_rows

    if not ARITHMETIC.is_made(arithmetic, seed=seed):
        ARITHMETIC.make(arithmetic, seed=seed)
    base_model, rows = arithmetic / "base_model", make_rows(seed=seed)
    recipe = recipe or RECIPE
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base_model)
    policy = Qwen2ForCausalLM.from_pretrained(base_model)

    def attempt(model_seed: int) -> dict[str, float]:
        rng, out = random.Random(model_seed), folder / "model"
        pairs = [
            write_pair(row, rng)
            for _ in range(recipe.num_steps)
            for row in rng.sample(rows["train"], recipe.rows_per_step)
        ]
        with tempfile.TemporaryDirectory() as start:
            deepen(base_model, Path(start), seed=model_seed)
            train_on_rows(
                Path(start), pairs, out, recipe, seed=model_seed, algorithm="reward_model"
            )
        model = Qwen2ForSequenceClassification.from_pretrained(out)
        return {
            f"{name}_ranking": measure_ranking(
                model, policy, tokenizer, part[: recipe.num_measured]
            )
            for name, part in rows.items()
        }

    reached = repeat_until_reached(attempt, recipe.bar, task="reward_model", seed=seed)
    return {"recipe": asdict(recipe), **reached}


BUILD = Build("reward_model", Path(__file__).parent / "build", format=2, fill=write_contents)

if __name__ == "__main__":
    BUILD.main()
