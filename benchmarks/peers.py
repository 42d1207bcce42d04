"""Peers for comparison with streamrl: packages of the environment that `make parity` installs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, BenchmarkError
from streamrl.errors import StreamError

PARITY = ROOT / ".venv-parity"


def measure_peer(measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """Return a peer's results, or {"error": reason}."""
    try:
        return dict(measure())
    except StreamError as error:
        return {"error": str(error).partition("\n")[0]}


def find_parity_python() -> Path:
    """Return the Python of the parity environment. Raises BenchmarkError if missing."""
    return _check_installed(PARITY / "bin" / "python")


def find_parity_packages(package: str) -> Path:
    """Return the site-packages folder from which a `.venv` process imports a peer.

    Raises BenchmarkError if the peer is missing.
    """
    folders = sorted(PARITY.glob("lib/python3.*/site-packages"))
    return _check_installed(*(folder / package for folder in folders[:1])).parent


def _check_installed(*paths: Path) -> Path:
    for path in paths:
        if os.path.lexists(path):
            return path
    raise BenchmarkError(f"{PARITY.name} has no such peer: install it with `make parity`")
