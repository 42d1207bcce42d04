"""A model whose sizes a registry of actors reads."""

import pytest

from tests.toy import write_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("actors") / "model"
    write_model(path)
    return str(path)
