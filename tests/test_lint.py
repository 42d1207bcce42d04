"""The linters of `make lint` as a test: mypy takes a core for a minute, beside other tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, find_stale

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "words", [("mypy",), ("ruff", "check"), ("ruff", "format", "--check")], ids=" ".join
)
def test_the_linters_find_nothing(words: tuple[str, ...]):
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_mutants_fit_the_sources():
    assert not list(find_stale(MUTANTS))
