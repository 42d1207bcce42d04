"""Fixtures of the journal tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of fsynced files and folders, in order."""
    fsync, names = os.fsync, []

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", watched)
    return names
