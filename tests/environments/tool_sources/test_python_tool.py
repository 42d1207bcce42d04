"""The tool `python` in episodes: its session, and what a call past its deadline costs."""

import pytest
import pytest_asyncio

from streamrl.environments.config import ToolConfig
from streamrl.environments.interface import CallOutcome
from streamrl.environments.tool_sources import python_tools
from streamrl.environments.tool_sources.python_tools import LOST, PythonTools, ToolAnswer
from streamrl.errors import ConfigError, EpisodeError
from streamrl.user_code.sandbox.sandbox import IsolationError
from tests.descendants import descendants

module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def source():
    source = PythonTools(ToolConfig("python"), kept_chars=1000)
    await source.check()
    return source


async def run(episode, code):
    return await episode.call("python", {"code": code})


@module_loop
async def test_episodes_share_no_session_and_one_that_never_calls_has_none(source):
    before = descendants()
    episodes = [await source.open(0.0) for _ in range(1000)]
    assert not descendants() - before
    for number, episode in enumerate(episodes[:2]):
        assert await run(episode, f"x = {number}") == ToolAnswer("")
    texts = [(await run(episode, "x")).text for episode in episodes[:2]]
    assert texts == ["0\n", "1\n"]
    assert descendants() - before
    for episode in episodes:
        await episode.close()
    assert not descendants() - before


@module_loop
async def test_a_call_that_ends_python_is_a_tool_error_that_says_what_is_lost(source):
    episode = await source.open(0.0)
    await run(episode, "x = 1")
    answer = await run(episode, "import os; os._exit(3)")
    text = f"the Python process exited with code 3\n{LOST}"
    assert answer == ToolAnswer(text, CallOutcome.TOOL_ERROR)
    assert "NameError" in (await run(episode, "x")).text
    await episode.close()


@module_loop
async def test_a_machine_that_cannot_isolate_is_named(monkeypatch):
    async def refuse(limits):
        raise IsolationError("bwrap is not on PATH: apt install bubblewrap,")

    monkeypatch.setattr(python_tools, "find_isolation", refuse)
    source = PythonTools(ToolConfig("python"), kept_chars=10)
    error = "tools: python: bwrap is not on PATH: apt install bubblewrap,"
    with pytest.raises(ConfigError, match=f"{error} or remove this tool"):
        await source.check()
    with pytest.raises(EpisodeError, match=error):
        await run(await source.open(0.0), "1")
