"""Client of OpenEnv against a server of the protocol in another process."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.environment_host import EnvironmentHost, load_user_class
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.environments.hosts.host_protocol import HostOperation
from streamrl.environments.hosts.openenv import OpenEnvEnvironment
from streamrl.environments.interface import CallOutcome, Reply, ToolCall, Turn
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError
from streamrl.messages import Prompt
from tests.environments.hosts.open_session import OpenSession

SERVER = Path(__file__).with_name("openenv_server.py")


def make_row(**options):
    """Return a row with options of its own."""
    extra_info = {"environment_options": options} if options else {}
    return Prompt("0:0:0", np.zeros(1, np.int32), extra_info=extra_info)


def start_server():
    process = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture(scope="module")
def port():
    process, port = start_server()
    yield port
    process.kill()
    process.wait()


@pytest.fixture
async def connect(port):
    """Return environments that are closed at the end."""
    environments = []

    def make(path="ws", **options):
        options.setdefault("observation", {"field": "total"})
        environments.append(OpenEnvEnvironment(url=f"ws://127.0.0.1:{port}/{path}", **options))
        return environments[-1]

    yield make
    for environment in environments:
        await environment.close()


async def test_an_episode_has_observations_rewards_and_an_end(connect):
    environment = connect(instructions="Add.")
    assert await environment.reset(make_row(), seed=7) == "Add.\n\n7"
    assert await environment.step(Reply("5")) == Turn("12", 5.0)
    assert await environment.step(Reply("-2")) == Turn("10", -2.0)
    assert await environment.step(Reply("0")) == Turn("", 0.0, done=True)


@pytest.mark.parametrize("path", ["silent/1", "loud/1"])
async def test_a_session_waits_for_a_server_at_capacity(connect, path):
    first, second = connect(path), connect(path)
    await first.reset(make_row(), seed=1)
    waiting = asyncio.create_task(second.reset(make_row(), seed=3))
    await asyncio.sleep(0.15)
    assert not waiting.done()
    await first.close()
    assert await waiting == "3"
    impatient = connect(path, wait_s=0.1)
    with pytest.raises(EpisodeError, match=r"/1: at capacity for 0.1 s \(wait_s\); raise the serv"):
        await impatient.reset(make_row(), seed=4)


async def test_an_invalid_action_is_answered_by_its_reasons_and_the_episode_goes_on(connect):
    environment = connect()
    await environment.reset(make_row(), seed=1)
    answer = Turn("Invalid action: message: Input should be a valid integer")
    assert await environment.step(Reply("two")) == answer
    assert await environment.step(Reply("2")) == Turn("3", 2.0)


@pytest.mark.parametrize(
    ("reply", "words"),
    [("raise", "/ws: EXECUTION_ERROR: it broke"), ("mumble", "/ws: not OpenEnv's protocol: ")],
)
async def test_an_error_of_the_server_is_a_failure_of_the_environment(connect, reply, words):
    environment = connect()
    await environment.reset(make_row(), seed=1)
    with pytest.raises(EpisodeError, match=words):
        await environment.step(Reply(reply))


async def test_a_server_that_dies_or_is_not_there_is_an_outage():
    process, port = start_server()
    environment = OpenEnvEnvironment(url=f"ws://127.0.0.1:{port}/ws")
    await environment.reset(make_row(), seed=1)
    with pytest.raises(EpisodeOutageError, match=rf"^ws://127.0.0.1:{port}/ws: connection lost: "):
        await environment.step(Reply("die"))
    await environment.close()
    process.wait(timeout=30)
    with pytest.raises(
        EpisodeOutageError, match=r"/ws: no connection: nobody answers .*Connect call failed"
    ):
        await environment.reset(make_row(), seed=1)
    hangs_up = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
    with pytest.raises(EpisodeOutageError, match=r"/ws: no connection: "):
        await environment.reset(make_row(), seed=1)
    hangs_up.close()


async def test_a_redirect_to_another_server_is_not_followed(connect):
    process, other = start_server()
    environment = connect(f"elsewhere/{other}")
    with pytest.raises(EpisodeError, match="no connection: cannot follow cross-origin redirect"):
        await environment.reset(make_row(), seed=1)
    process.kill()
    process.wait()


async def test_a_reply_is_a_json_object_where_the_action_is_one(connect):
    environment = connect(action={"json": True})
    await environment.reset(make_row(), seed=1)
    assert await environment.step(Reply('So:\n```json\n{"message": 4}\n```')) == Turn("5", 4.0)
    assert await environment.step(Reply("4")) == Turn("Reply with a JSON object: there is none.")
    turn = await environment.step(Reply('{"other": 4}'))
    assert turn.observation.startswith("Invalid action: message: ")


async def test_a_row_has_a_seed_and_data_of_the_reset_of_its_own(connect):
    environment = connect(observation=None, reset={"hint": "up"})
    assert await environment.reset(make_row(), seed=7) == '{"total": "7", "hint": "up"}'
    own = make_row(seed=9, reset={"hint": "down"})
    assert await environment.reset(own, seed=7) == '{"total": "9", "hint": "down"}'
    with pytest.raises(ConfigError, match=r"environment_options=.*url.*; a row may have re"):
        await environment.reset(make_row(url="ws://elsewhere"), seed=7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "http://localhost"}, r"url=http://localhost: must be ws://HOST:PORT/PATH"),
        ({"url": "ws://localhost:x/ws"}, r"url=ws://localhost:x/ws: must be ws://HOST:PORT/PATH"),
        ({"url": 3}, "url=3: must be ws://HOST:PORT/PATH"),
        ({"action": {"text": "a"}}, r'action=\{"text": "a"\}: must be \{field: NAME\} or \{json: '),
        ({"action": True}, r"action=true: must be \{field: NAME\}"),
    ],
)
def test_unusable_options_are_refused(options, words):
    options = {"url": "ws://localhost/ws", **options}
    with pytest.raises(ConfigError, match=rf"^environment.options.?{words}"):
        load_user_class(EnvironmentConfig(kind="openenv", options=options))


def test_a_missing_package_is_named_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)
    monkeypatch.delitem(sys.modules, "streamrl.environments.hosts.openenv")
    with pytest.raises(ConfigError, match=r"^environment.kind=openenv: .*streamrl\[openenv\]'$"):
        load_user_class(EnvironmentConfig(kind="openenv", options={"url": "ws://localhost/ws"}))


def test_the_example_of_the_docs_can_be_loaded():
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    section = page.partition("\n## OpenEnv\n")[2]
    (block,) = re.findall(r"^```yaml\n(.*?)^```", section.partition("\n## ")[0], re.DOTALL | re.M)
    load_user_class(EnvironmentConfig(**yaml.safe_load(block)["environment"]))


def make_config(port, path="tools", **settings):
    url = f"ws://127.0.0.1:{port}/{path}"
    return EnvironmentConfig(kind="openenv", options={"url": url}, processes=1, **settings)


@pytest.fixture
async def open_session(port):
    """Return sessions of hosts in this process that have described their environment."""
    sessions = []

    async def open_described(server=port, **settings):
        sessions.append(OpenSession(EnvironmentHost(make_config(server, **settings))))
        await sessions[-1].send(HostOperation.DESCRIBE)
        return sessions[-1]

    yield open_described
    for session in sessions:
        await session.close()


async def test_the_tools_of_a_server_are_tools_whose_calls_have_rewards(open_session):
    session = await open_session()
    start = (await session.reset(seed=7)).result
    assert start.messages == ()
    assert [tool["function"]["name"] for tool in start.tools] == ["add", "fail", "finish"]
    assert start.tools[1] == {
        "type": "function",
        "function": {
            "name": "fail",
            "description": "fail it",
            "parameters": {"type": "object", "properties": {"kind": {"type": "string"}}},
        },
    }
    calls = [ToolCall("add", {"number": n}) for n in (5, -2)]
    step = (await session.step("", *calls)).result
    assert [message["content"] for message in step.messages] == ["12", "10"]
    assert (step.reward, step.done) == (3.0, False)
    late = ToolCall("add", {"number": 1})
    step = (await session.step("", ToolCall("finish", {"number": 4}), late)).result
    assert (step.reward, step.done) == (4.0, True)
    assert step.messages[1]["content"] == "error: the episode has ended"
    assert (await session.score(rewards=(3.0, 4.0))).result == 7.0


async def test_a_failed_call_is_a_text_and_a_tool_that_was_not_reached_an_error(open_session):
    session = await open_session()
    await session.reset()
    wrong = ToolCall("jump", {}, CallOutcome.UNKNOWN_TOOL, "no such tool")
    broken = ToolCall("fail", {"kind": "execution_error"})
    step = (await session.step("", wrong, broken)).result
    assert [message["content"] for message in step.messages] == ["no such tool", "error: it broke"]
    assert step.outcomes == [CallOutcome.UNKNOWN_TOOL, CallOutcome.TOOL_ERROR]
    response = await session.step("", ToolCall("fail", {"kind": "transport_error"}))
    assert response.error.endswith("/tools: it broke") and not response.is_outage


async def test_the_answer_of_a_call_that_timed_out_is_not_that_of_the_next(open_session):
    session = await open_session(turn_timeout_s=1.0)
    await session.reset(seed=1)
    slow = ToolCall("add", {"number": 2, "seconds": 0.7})
    assert (await session.step("", slow)).result.outcomes == [CallOutcome.TIMED_OUT]
    step = (await session.step("", ToolCall("add", {"number": 3}))).result
    assert (step.messages[0]["content"], step.reward) == ("6", 3.0)


async def test_later_processes_have_the_tools_that_the_first_has_listed(port):
    pool = EnvironmentHostPool(make_config(port, isolate=True))
    await pool.start()
    try:
        assert pool.description.note == ""
        sessions = [pool.open_session(make_row(), seed=i) for i in range(2)]
        starts = await asyncio.gather(*(session.reset() for session in sessions))
        assert len({id(session._host) for session in sessions}) == 2
        assert starts[0].tools == starts[1].tools == pool.description.tools
        step = await sessions[1].step(Reply("", [ToolCall("add", {"number": 4})]))
        assert (step.messages[0]["content"], step.reward) == ("5", 4.0)
    finally:
        await pool.close()


async def test_a_server_without_tools_has_turns_and_one_that_lists_none_is_refused(port):
    plain = await OpenSession(EnvironmentHost(make_config(port, "ws"))).send(HostOperation.DESCRIBE)
    assert plain.result.has_step and plain.result.tools == ()
    empty = OpenSession(EnvironmentHost(make_config(port, "empty")))
    response = await empty.send(HostOperation.DESCRIBE)
    assert response.is_config_error and "/empty: lists no tools; " in response.error


async def test_a_server_is_not_asked_for_tools_where_the_action_is_given():
    url = "ws://127.0.0.1:1/nobody"
    assert await OpenEnvEnvironment.list_tools(url=url, action={"json": True}) == ()
