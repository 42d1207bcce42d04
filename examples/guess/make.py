"""Build the data and the base model of the guessing game, unless they exist."""

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
    """Write the rows and the base model."""
    from examples.guess.problems import make_rows
    from examples.guess.training import LESSONS, RECIPE
    from examples.toy_models.base_model import make_base_model

    return make_base_model(folder, make_rows(), LESSONS, recipe or RECIPE, seed=seed)


BUILD = Build("guess", Path(__file__).parent / "build", format=3, fill=write_contents)

if __name__ == "__main__":
    BUILD.main()
