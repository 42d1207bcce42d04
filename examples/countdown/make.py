"""Build the data and the base model of the countdown task, unless they exist."""

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
    from examples.countdown.problems import make_rows
    from examples.countdown.training import LESSONS, RECIPE
    from examples.toy_models.base_model import make_base_model

    return make_base_model(folder, make_rows(seed=seed), LESSONS, recipe or RECIPE, seed=seed)


BUILD = Build("countdown", Path(__file__).parent / "build", format=2, fill=write_contents)

if __name__ == "__main__":
    BUILD.main()
