"""Entries of environment.tools."""

from pathlib import Path

import pytest

from streamrl.environments.config import EnvironmentConfig, ToolConfig
from streamrl.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, ": an entry is kind: python, or kind: mcp with command .*; this one has nothing"),
        ({"kind": "pyton"}, "this one has kind=pyton"),
        ({"kind": "mcp", "command": ["a"], "url": "http://a"}, "command=.*, kind=mcp, url="),
        ({"kind": "mcp", "url": "a.org"}, ".url=a.org: must begin with http:// or https://"),
        ({"kind": "python", "only": ["a"]}, "this one has kind=python, only="),
        ({"kind": "mcp", "url": "http://a", "env": ["A"]}, "this one has env=.*, kind=mcp, url="),
    ],
)
def test_contradictions_in_an_entry_are_refused(settings, error):
    with pytest.raises(ConfigError, match=f"environment.tools.*{error}"):
        ToolConfig(**settings)


def test_tools_alone_are_an_environment():
    config = EnvironmentConfig(tools=[ToolConfig("python")])
    assert config.is_enabled and not config.has_class
    assert config.settings_text == "environment.tools=python"
    with pytest.raises(ConfigError, match=r"environment.options: needs environment.path"):
        EnvironmentConfig(tools=[ToolConfig("python")], options={"a": 1})


def test_files_in_a_command_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("server.py", "python"):
        Path(name).touch()
    tool = ToolConfig("mcp", command=["python", "server.py", "--port", "80"])
    tool.make_command_absolute()
    assert tool.command == ["python", str(tmp_path / "server.py"), "--port", "80"]
