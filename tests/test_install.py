"""The installation script, as far as it goes without a network."""

import importlib.metadata
from configparser import ConfigParser
from pathlib import Path

import install
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = ("openenv", "mcp")


def test_the_tests_packages_are_releases_that_the_extras_allow():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = [Requirement(line) for name in ADAPTERS for line in extra_lines(setup, name)]
    lines = (ROOT / "requirements" / "adapters.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for extra in extras:
        # The other two come with vLLM.
        version = pinned.get(extra.name) or importlib.metadata.version(extra.name)
        assert extra.specifier.contains(version), extra


def extra_lines(setup: ConfigParser, name: str) -> list[str]:
    return setup["options.extras_require"][name].strip().splitlines()


def test_an_extra_adds_its_packages_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "uv_install", lambda *arguments: calls.append(arguments))
    install.install_extra("docs", "cpu")
    ((device, quiet, *packages),) = calls
    assert (device, quiet) == ("cpu", "--quiet")
    assert [Requirement(p).name for p in packages] == ["furo", "myst-parser", "sphinx"]


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_installed_bubblewrap_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    executable(tmp_path / "bwrap", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.bring_bubblewrap(tmp_path / "bubblewrap") == "bubblewrap is on PATH"
    assert not (tmp_path / "bubblewrap").exists()


def test_install_without_bubblewrap_continues_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    failed = "no bubblewrap, so code rewards will not run (apt install bubblewrap)"
    assert (
        install.bring_bubblewrap(tmp_path / "bubblewrap")
        == f"{failed}: this is no Debian or Ubuntu"
    )
    executable(tmp_path / "apt-get", "exit 100")
    executable(tmp_path / "dpkg-deb", "exit 2")
    output = install.bring_bubblewrap(tmp_path / "bubblewrap")
    assert output == f"{failed}: apt-get: exit code 100"
    assert not (tmp_path / "bubblewrap").exists()
