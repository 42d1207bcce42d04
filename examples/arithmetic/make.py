"""Build the data and the base model of the arithmetic task, unless they exist."""

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # a script run by path has only its own folder on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.toy_models.building import Build

if TYPE_CHECKING:
    from examples.toy_models.training import TrainingRecipe


def write_contents(
    folder: Path, seed: int, recipe: "TrainingRecipe | None" = None
) -> dict[str, Any]:
    """Write the rows, the base model and its pretraining texts, some with mistakes."""
    from examples.arithmetic.problems import make_rows
    from examples.arithmetic.training import LESSONS, RECIPE
    from examples.toy_models.base_model import make_base_model
    from examples.toy_models.rows import get_question, write_rows

    recipe, rows, rng = recipe or RECIPE, make_rows(seed=seed), random.Random(seed)
    texts = [
        f"<bos>{get_question(row)}{LESSONS.opening}{LESSONS.write(row, rng, recipe.slip_rate)}"
        for row in rows["train"]
    ]
    write_rows([{"text": text} for text in texts], folder / "pretrain")
    return make_base_model(folder, rows, LESSONS, recipe, seed=seed)


BUILD = Build("arithmetic", Path(__file__).parent / "build", format=3, fill=write_contents)

if __name__ == "__main__":
    BUILD.main()
