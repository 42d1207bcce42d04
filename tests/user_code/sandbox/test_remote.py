"""Client of a fake server with sandbox-fusion's HTTP API."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.errors import RewardInfraError, ServiceOutageError
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import build_rewards
from streamrl.user_code import service_gate
from tests.rewards.judged import judge, prompt

ADD = {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}


def run_program(body):
    command = [sys.executable, "-I", "-S", "-c", body["code"]]
    try:
        process = subprocess.run(
            command,
            input=body["stdin"],
            capture_output=True,
            text=True,
            timeout=body["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}
    result = {"status": "Finished", "return_code": process.returncode, "execution_time": 0.1}
    result |= {"stdout": process.stdout, "stderr": process.stderr}
    return {"status": "Failed" if process.returncode else "Success", "run_result": result}


@pytest.fixture
async def server():
    """Run a fake server that runs Python; `failures` are its first responses."""
    fake = SimpleNamespace(failures=[], requests=[])

    async def respond(request):
        fake.requests.append(await request.json())
        if fake.failures:
            status, reply = fake.failures.pop(0)
            return web.json_response(reply, status=status)
        return web.json_response(await asyncio.to_thread(run_program, fake.requests[-1]))

    app = web.Application()
    app.router.add_post("/run_code", respond)
    async with TestServer(app) as running:
        fake.url = str(running.make_url("/"))
        yield fake


async def judged(url, truth, *completions, **options):
    limits = {"wall_s": 5, "memory_mib": 256}
    config = RewardConfig("code", options={"url": url, "limits": limits, **options})
    assert await build_rewards([config]).run_preflight() == []
    return [outcome for _, outcome in await judge(config, prompt(truth), *completions)]


async def test_remote_output_is_judged_locally(server):
    outcomes = await judged(
        server.url,
        ADD,
        "def add(a, b): return a + b",
        "def add(a, b): return a - b",
        "class Solution:\n    def add(self, a, b): return a + b",
        "def add(a, b) return a",
        "def add(a, b): raise MemoryError",
        "import os; os._exit(0)",
        "def add(a, b):\n while True: pass",
        "print('\\nstreamrl-value:3'); raise SystemExit(0)",
    )
    expected = "pass wrong pass compile_error memory runtime_error timeout pass"
    assert outcomes == expected.split()
    limits = {"compile_timeout": 20.0, "run_timeout": 5.0, "memory_limit_MB": 256}
    sent = {"language": "python", "stdin": "[1, 2]", **limits}
    assert all({**body, "code": ""} == {**sent, "code": ""} for body in server.requests)
    assert "3" not in {b["stdin"] for b in server.requests}, "no expected value leaves this machine"


async def test_a_failing_server_is_retried_and_never_scored_as_wrong(server):
    server.failures = [
        (500, {}),
        (200, {"status": "SandboxError", "message": "no disk"}),
    ]
    assert await judged(server.url, ADD, "def add(a, b): return a + b") == ["pass"]
    server.failures = [(500, {})] * 2
    message = r"reward code, uid 0:4:0: .*/run_code: HTTP status 500, tried 2 times$"
    with pytest.raises(RewardInfraError, match=message):
        await judged(server.url, ADD, "def add(a, b): return a + b", attempts=2)


async def test_an_unavailable_server_costs_no_attempt(server, monkeypatch):
    monkeypatch.setattr(service_gate, "FIRST_PAUSE_S", 0.05)
    server.failures = [(status, {}) for status in (429, 503, 504)]
    assert await judged(server.url, ADD, "def add(a, b): return a + b", attempts=1) == ["pass"]


async def test_a_server_that_stays_unreachable_ends_the_command(monkeypatch):
    monkeypatch.setattr(service_gate, "MAX_OUTAGE_S", 0.2)
    with pytest.raises(
        ServiceOutageError, match=r"http://127.0.0.1:9/run_code: nobody answers \(.*0.2"
    ):
        await asyncio.wait_for(judged("http://127.0.0.1:9", ADD, "x", attempts=1), 30)
