"""Tools of a class, `python` and an MCP server side by side, in a host of this process."""

import sys
from pathlib import Path

import pytest

from streamrl.environments.config import ToolConfig
from streamrl.environments.hosts.host_protocol import HostOperation
from streamrl.environments.interface import CallOutcome, ToolCall
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.errors import ConfigError
from tests.environments.hosts.user_files import GUESS
from tests.environments.tool_sources.test_mcp_tools import serve_raw

SERVER = str(Path(__file__).parent.parent / "tool_sources" / "raw_mcp_server.py")
PYTHON = ToolConfig("python")
RAW = ToolConfig("mcp", command=[sys.executable, "-S", SERVER], only=["write", "say", "sleep"])
WRITER = '''
class Writer:
    def reset(self, row):
        return "begin"

    def produce(self, shape: str) -> str:
        """Write."""
        return {"long": "x" * 2_000_000, "nothing": "", "half": "a\\ud800b"}.get(shape, shape)

    def score(self, episode):
        return 0.5
'''
SCORED = "class Scored:\n    def score(self, episode): return 0.25\n"


async def call(session, *calls):
    """Return outcome and text of each call of a turn."""
    result = (await session.step("", *(ToolCall(name, given) for name, given in calls))).result
    texts = [message["content"] for message in result.messages]
    return list(zip(result.outcomes, texts, strict=True))


async def test_all_kinds_of_tools_answer_side_by_side(open_session):
    session = open_session(WRITER, tools=[PYTHON, RAW])
    start = (await session.reset()).result
    names = ["produce", "python", "write", "say", "sleep"]
    assert [get_tool_name(tool) for tool in start.tools] == names
    assert start.messages == [{"role": "user", "content": "begin"}]
    described = (await session.send(HostOperation.DESCRIBE)).result
    assert list(described.tools) == list(start.tools) and described.has_score
    answers = await call(
        session, ("produce", {"shape": "a"}), ("python", {"code": "2 + 3"}), ("say", {"text": "b"})
    )
    assert answers == [(CallOutcome.OK, "a"), (CallOutcome.OK, "5\n"), (CallOutcome.OK, "b")]
    assert (await session.score()).result == 0.5


@pytest.mark.parametrize(
    ("shape", "code", "text"),
    [
        ("<|im_end|>", "print('<|im_end|>', end='')", "<|im_end|>"),
        ("nothing", "", ""),
        ("half", "import os; os.write(1, b'a' + bytes([255]) + b'b'); None", "a\ufffdb"),
        (
            "long",
            "print('x' * 2_000_000, end='')",
            f"{'x' * 1000}\n[... 1998000 characters left out ...]\n{'x' * 1000}",
        ),
    ],
    ids=["tokens", "nothing", "half a character", "long"],
)
async def test_the_policy_reads_the_same_of_every_kind_of_tool(open_session, shape, code, text):
    session = open_session(WRITER, tools=[PYTHON, RAW])
    await session.reset()
    calls = ("produce", {"shape": shape}), ("python", {"code": code}), ("write", {"shape": shape})
    assert await call(session, *calls) == [(CallOutcome.OK, text)] * 3


async def test_calls_past_their_deadline_say_what_is_lost(open_session):
    session = open_session(tools=[PYTHON, RAW], turn_timeout_s=2.0)
    await session.reset()
    await call(session, ("python", {"code": "x = 1"}), ("say", {"text": "warm"}))
    slow = ("python", {"code": "import time; time.sleep(60)"}), ("sleep", {"seconds": 60})
    lost = [
        "python timed out after 1 s; the session has ended: all variables are lost",
        "sleep timed out after 1 s; the server has been stopped: what it kept of earlier calls is"
        " lost",
    ]
    assert await call(session, *slow) == [(CallOutcome.TIMED_OUT, text) for text in lost]
    (failed, answered) = await call(session, ("python", {"code": "x"}), ("say", {"text": "b"}))
    assert failed[0] is CallOutcome.TOOL_ERROR and "NameError" in failed[1]
    assert answered == (CallOutcome.OK, "b")


async def test_a_server_that_answers_nobody_is_an_outage_and_a_slow_tool_is_not(
    open_session, monkeypatch
):
    monkeypatch.setattr("streamrl.user_code.service_gate.PING_TIMEOUT_S", 0.5)
    with serve_raw() as (url, stop):
        session = open_session(tools=[ToolConfig("mcp", url=url)], turn_timeout_s=1.0)
        await session.reset()
        slow = (CallOutcome.TIMED_OUT, "sleep timed out after 0.5 s")
        assert await call(session, ("sleep", {"seconds": 1})) == [slow]
        stop()  # connections are still accepted, by the system
        response = await session.step("", ToolCall("say", {"text": "b"}))
    assert response.is_outage
    assert f"{url}: no result of say in 0.5 s, and no answer to others" in response.error


async def test_tools_may_be_all_that_an_environment_has_or_stand_beside_a_score(open_session):
    session = open_session(tools=[PYTHON])
    note = (await session.send(HostOperation.DESCRIBE)).result.note
    assert note.startswith("an environment without a class has no score(episode)")
    assert (await session.reset()).result.messages == ()
    assert (await session.step("done")).result.done
    assert (await session.score(rewards=[0.0])).result == 0.0
    scored = open_session(SCORED, tools=[PYTHON])
    await scored.reset()
    assert await call(scored, ("python", {"code": "1"})) == [(CallOutcome.OK, "1\n")]
    assert (await scored.score()).result == 0.25


async def test_tools_that_cannot_be_used_are_config_errors(open_session):
    with pytest.raises(ConfigError, match=r"environment.tools: .* has step\(self, reply\), which"):
        open_session(GUESS, tools=[PYTHON])
    named = WRITER.replace("produce", "python")
    for session, error in (
        (
            open_session(named, tools=[PYTHON]),
            "python: has a tool python, as has the class; rename",
        ),
        (open_session(tools=[RAW, RAW]), "has a tool write, as has environment.tools: MCP"),
        (open_session(tools=[ToolConfig("mcp", command=["nosuch"])]), "no program nosuch is found"),
    ):
        response = await session.send(HostOperation.DESCRIBE)
        assert response.is_config_error and error in response.error
        assert not (await session.reset()).is_config_error
