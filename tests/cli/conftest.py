"""Fixtures of the commands' tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.telemetry import progress
from tests.toy import write_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a toy's model, rows and recipe, which no test changes."""
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def refuse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run a command that is refused with exit code 2 and without output; return its one line."""
    # A busy machine may be slow to read configs, which is no line of the refusal.
    monkeypatch.setattr(progress, "PRINT_AFTER_S", float("inf"))

    def run(*words: object) -> str:
        code: object
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        assert (code, printed.out, printed.err.count("\n")) == (2, "", 1), printed
        return printed.err.rstrip("\n")

    return run
