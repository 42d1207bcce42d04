"""Build the data and the base model of the guessing game, unless they exist."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # a script run by path has only its own folder on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.toy_models.building import Build

if TYPE_CHECKING:
    from examples.toy_models.demonstrations import DemonstrationRecipe


def write_contents(
    folder: Path, seed: int, recipe: "DemonstrationRecipe | None" = None
) -> dict[str, Any]:
    """Write the rows and the base model."""
    from examples.guess.problems import make_rows
    from examples.guess.training import RECIPE, demonstrate, measure_model
    from examples.toy_models.demonstrations import make_turns_model

    rows = make_rows()
    return make_turns_model(folder, rows, demonstrate, measure_model, recipe or RECIPE, seed=seed)


BUILD = Build("guess", Path(__file__).parent / "build", format=2, fill=write_contents)

if __name__ == "__main__":
    BUILD.main()
