"""Folders that the runs of a file share."""

from pathlib import Path

import pytest

from tests.toy import write_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))
