"""Build the reward model of the arithmetic task, and the task itself, unless they exist."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # a script run by path has only its own folder on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.arithmetic.make import BUILD as ARITHMETIC
from examples.toy_models.building import Build, repeat_until_reached

if TYPE_CHECKING:
    from examples.reward_model.training import RewardModelRecipe


def write_contents(
    folder: Path,
    seed: int,
    recipe: "RewardModelRecipe | None" = None,
    arithmetic: Path = ARITHMETIC.folder,
) -> dict[str, Any]:
    """Train the model on training problems of the arithmetic task and write `model/`."""
    from dataclasses import asdict

    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

    from examples.arithmetic.problems import make_rows
    from examples.reward_model.training import (
        RECIPE,
        build_untrained,
        measure_ranking,
        train_reward_model,
    )
    from examples.toy_models.lessons import report_losses
    from examples.toy_models.small_qwen2 import save_model

    if not ARITHMETIC.is_made(arithmetic, seed=seed):
        ARITHMETIC.make(arithmetic, seed=seed)
    base_model, rows = arithmetic / "base_model", make_rows(seed=seed)
    recipe = recipe or RECIPE
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base_model)
    policy = Qwen2ForCausalLM.from_pretrained(base_model)

    def attempt(model_seed: int) -> dict[str, float]:
        model, hints = build_untrained(base_model, seed=model_seed)
        losses = train_reward_model(model, hints, tokenizer, rows["train"], recipe, seed=model_seed)
        report_losses(losses, task="reward_model")
        save_model(model, tokenizer, folder / "model")
        return {
            f"{name}_ranking": measure_ranking(
                model, policy, tokenizer, part[: recipe.num_measured]
            )
            for name, part in rows.items()
        }

    reached = repeat_until_reached(attempt, recipe.bar, task="reward_model", seed=seed)
    return {"recipe": asdict(recipe), **reached}


BUILD = Build("reward_model", Path(__file__).parent / "build", format=1, fill=write_contents)

if __name__ == "__main__":
    BUILD.main()
