"""What all tests share: their order, and that how long one takes says nothing here."""

from collections.abc import Iterator

import pytest

from tests.budget import Budget
from tests.e2e.recital import Recital

RECIPES = "tests/e2e/test_recipes.py"
RUNS = ("tests/e2e/", "tests/chaos/", RECIPES)
"""Tests of whole runs, in the order in which they come: the recipes have been played by then."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of whole runs come last: the others leave a core to the recipes."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    return max((i for i, start in enumerate(RUNS) if item.nodeid.startswith(start)), default=-1)


@pytest.fixture(scope="session", autouse=True)
def recital(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recital]:
    """The recipes that are asked for, played from before the first test on."""
    asked = [item for item in request.session.items if item.nodeid.startswith(RECIPES)]
    names = [item.callspec.params["name"] for item in asked if isinstance(item, pytest.Function)]
    playing = Recital(names, tmp_path_factory.mktemp("recipes"))
    yield playing
    playing.close()
