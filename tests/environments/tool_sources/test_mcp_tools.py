"""Tools of MCP servers: calls, failures, deadlines, and what is left of a server's processes."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from streamrl.environments.config import ToolConfig
from streamrl.environments.hosts import environment_host
from streamrl.environments.hosts.environment_host import import_optional
from streamrl.environments.interface import CallOutcome
from streamrl.environments.tool_calls.call_formats import check_call
from streamrl.environments.tool_calls.marked_turn import WrittenCall
from streamrl.environments.tool_calls.tool_schema import get_tool_name
from streamrl.environments.tool_sources.mcp_tools import McpTools
from streamrl.environments.tool_sources.python_tools import ToolAnswer
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError
from tests.descendants import descendants
from tests.environments.tool_sources import raw_mcp_server

FOLDER = Path(__file__).parent
RAW_SERVER = [sys.executable, "-S", str(FOLDER / "raw_mcp_server.py")]
PACKAGE_SERVER = [sys.executable, str(FOLDER / "package_mcp_server.py")]


def in_time():
    return asyncio.get_running_loop().time() + 60


@pytest.fixture
async def open_episode():
    """Open episodes of a server; close them at the end and check that no process is left."""
    before, episodes = descendants(), []

    async def open_of(source):
        episodes.append(await source.open(in_time()))
        return episodes[-1]

    yield open_of
    for episode in episodes:
        await episode.close()
    assert not descendants() - before


def make_source(command=RAW_SERVER, **settings):
    return McpTools(ToolConfig("mcp", command=command, **settings))


async def read(episode, name, **arguments):
    answer = await episode.call(name, arguments)
    assert answer.outcome is CallOutcome.OK
    return answer.text


@contextlib.contextmanager
def serve_http():
    """Start the server of the package on a free port; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([*PACKAGE_SERVER, str(port)]) as process:
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


async def open_when_ready(source):
    """List the tools of a server that is starting, and open an episode."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await source.list_tools(in_time()), await source.open(in_time())
            except EpisodeError:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_server_of_the_package_is_played_to_the_end(transport):
    before = descendants()
    with contextlib.ExitStack() as stack:
        source = make_source(PACKAGE_SERVER)
        if transport == "http":
            url = stack.enter_context(serve_http())
            source = McpTools(ToolConfig("mcp", url=url))
        await source.check()
        tools, episode = await open_when_ready(source)
        by_name = {get_tool_name(tool): tool for tool in tools}
        assert list(by_name) == ["divide", "draw"]
        assert by_name["divide"]["function"]["description"] == "Divide two numbers."
        for name, arguments, error in (
            ("divide", {"a": "1", "b": 2}, "a: '1' is not of type 'integer'"),
            ("devide", {}, "the nearest tool is divide"),
        ):
            assert error in check_call(WrittenCall(0, 1, name, arguments), by_name).error
        assert await read(episode, "divide", a=3, b=4) == "0.75"
        failed = await episode.call("divide", {"a": 3, "b": 0})
        assert failed.outcome is CallOutcome.TOOL_ERROR and "b must not be 0" in failed.text
        assert await read(episode, "draw") == "[image]"
        await episode.close()
    assert not descendants() - before


class RawHttpServer(BaseHTTPRequestHandler):
    """The raw server's answers over HTTP; a call with a number is refused with this status."""

    authorizations: ClassVar[set[str]] = set()

    def do_POST(self):
        self.authorizations.add(self.headers["Authorization"])
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        response, status = {"jsonrpc": "2.0", "id": request.get("id")}, 200
        text = request.get("params", {}).get("arguments", {}).get("text", "")
        try:
            response["result"] = raw_mcp_server.answer(request)
        except LookupError as error:
            response["error"] = {"code": -32601, "message": str(error)}
        if text.isdigit():
            response = {**response, "error": {"code": -32600, "message": "Session not found"}}
            status = int(text)
            del response["result"]
        data = json.dumps(response).encode() if "id" in request else b""
        self.send_response(status if data else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Print nothing."""


@contextlib.contextmanager
def serve_raw():
    """Serve RawHttpServer in a thread; yield its address and a function that stops it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), RawHttpServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp", server.shutdown
        server.shutdown()


async def test_headers_come_from_the_environment_and_a_refused_request_ends_the_session(
    monkeypatch,
):
    monkeypatch.setenv("DOCS_TOKEN", "Bearer secret")
    with serve_raw() as (url, _):
        headers = {"Authorization": "DOCS_TOKEN"}
        source = McpTools(ToolConfig("mcp", url=url, headers_env=headers))
        RawHttpServer.authorizations.clear()
        episode = await source.open(in_time())
        assert await read(episode, "say", text="hi") == "hi"
        assert RawHttpServer.authorizations == {"Bearer secret"}
        # An answer to the call, which the policy reads.
        answered = await episode.call("say", {"text": "400"})
        assert answered == ToolAnswer("error: Session not found", CallOutcome.TOOL_ERROR)
        for status in (404, 429, 500, 503):
            with pytest.raises(EpisodeError, match=f"mcp: ended: HTTP status {status}$") as error:
                await episode.call("say", {"text": str(status)})
            # Status 404: the server has lost the session, as after a restart.
            assert isinstance(error.value, EpisodeOutageError) == (status != 500)
            await episode.close()
            episode = await source.open(in_time())
        await episode.close()


async def test_a_server_that_starts_slower_than_a_call_may_take_is_ready_in_the_end(
    open_episode, tmp_path
):
    slow_server = tmp_path / "slow_server.py"
    path = str(FOLDER / "raw_mcp_server.py")
    slow_server.write_text(
        f"import runpy, time; time.sleep(0.5); runpy.run_path({path!r}, run_name='__main__')"
    )
    episode = await open_episode(make_source([sys.executable, "-S", str(slow_server)]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await episode.call("sleep", {"seconds": 600})
    for _ in range(50):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await read(episode, "count")
                break
    else:
        pytest.fail("each call began the start of the server anew")


async def test_an_episode_that_ends_while_its_server_restarts_leaves_nothing(open_episode):
    episode = await open_episode(make_source())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await episode.call("sleep", {"seconds": 600})
    await episode.close()


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_the_end_of_an_episode_kills_the_processes_of_its_server(open_episode):
    source = make_source()
    episodes = [await open_episode(source) for _ in range(2)]
    families = [list(map(int, (await read(e, "breed")).split())) for e in episodes]
    assert len({pid for family in families for pid in family}) == 4
    await episodes[0].close()
    assert not any(map(is_alive, families[0]))
    assert all(map(is_alive, families[1]))


async def test_a_server_sees_only_the_variables_that_the_entry_names(open_episode, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "1")
    monkeypatch.setenv("SECRET", "2")
    episode = await open_episode(make_source(env=["SEARCH_KEY"]))
    variables = json.loads(await read(episode, "show_environment"))
    assert "SECRET" not in variables
    assert variables["SEARCH_KEY"] == "1" and "PATH" in variables


async def test_an_error_of_the_protocol_is_a_text_and_the_death_of_a_server_an_episode_error(
    open_episode,
):
    episode = await open_episode(make_source())
    refused = await episode.call("refuse", {})
    assert refused == ToolAnswer("error: no method tools/call", CallOutcome.TOOL_ERROR)
    death = r"MCP server .*raw_mcp_server.py: ended: out of luck, exit code 3$"
    for tool in ("die", "count"):
        with pytest.raises(EpisodeError, match=death):
            await episode.call(tool, {})


async def test_a_server_that_does_not_start_or_answer_is_named():
    before = descendants()
    for command, reason in (
        ([*RAW_SERVER, "fail"], "no such index, exit code 1"),
        (["sh", "-c", "exit 7"], "exit code 7"),
        (["sh", "-c", "kill -KILL $$"], ".*Killed.*, exit code 137"),
        (["sh", "-c", "printf sorry >&2; exit 2"], "sorry, exit code 2"),
        ([*RAW_SERVER, "deny"], "ready, no method initialize"),
    ):
        with pytest.raises(EpisodeError, match=f"MCP server .*: does not start: {reason}$"):
            await make_source(command).list_tools(in_time())
    silent = make_source(["sleep", "600"])
    with pytest.raises(EpisodeError, match="MCP server sleep 600: not ready in time"):
        await silent.open(asyncio.get_running_loop().time() + 0.2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/mcp"
    with pytest.raises(EpisodeOutageError, match=f"{url}: does not start: nobody answers"):
        await McpTools(ToolConfig("mcp", url=url)).open(in_time())
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"http://127.0.0.1:{hung.getsockname()[1]}/mcp"
        with pytest.raises(EpisodeOutageError, match=f"{url}: not ready in time"):
            await McpTools(ToolConfig("mcp", url=url)).open(asyncio.get_running_loop().time() + 0.2)
    assert not descendants() - before


async def test_a_server_that_is_not_ready_in_time_is_killed_and_not_asked_to_end(tmp_path: Path):
    asked = tmp_path / "asked"
    script = f"trap 'touch {asked}' TERM; echo exit code 5 >&2; while :; do sleep 0.1; done"
    before = descendants()
    with pytest.raises(EpisodeError, match="not ready in time"):
        await make_source(["sh", "-c", script]).open(asyncio.get_running_loop().time() + 0.5)
    assert not asked.exists() and not descendants() - before


async def test_what_a_machine_lacks_is_a_config_error(monkeypatch):
    with pytest.raises(ConfigError, match="MCP server nosuch -v: no program nosuch is found"):
        await make_source(["nosuch", "-v"]).check()
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="env: SEARCH_KEY is not set"):
        await make_source(env=["SEARCH_KEY"]).check()
    remote = ToolConfig("mcp", url="http://x/mcp", headers_env={"Authorization": "NO_TOKEN"})
    with pytest.raises(ConfigError, match=r"headers_env: .* NO_TOKEN are not set, or empty$"):
        await McpTools(remote).check()
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "streamrl.environments.tool_sources.mcp_tools")
    with pytest.raises(ConfigError, match=r"import of mcp .*; run pip install 'streamrl\[mcp"):
        environment_host.ToolSources([remote], ())
    with pytest.raises(ModuleNotFoundError, match=r"streamrl\.missing"):
        import_optional("streamrl.missing", setting="kind=mcp", extra="mcp")


async def test_a_name_in_only_that_the_server_does_not_have_is_refused():
    wrong = make_source(only=["sey"])
    with pytest.raises(ConfigError, match=r"only: sey: the server has no such tool; the nearest"):
        await wrong.list_tools(in_time())
