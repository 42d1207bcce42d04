"""Client of a remote sandbox with sandbox-fusion's HTTP API (`/run_code`)."""

import asyncio
import json
from typing import Any

from streamrl.errors import RewardInfraError, RewardTimeoutError, ServiceOutageError
from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox.program import (
    CallTest,
    ProgramLimits,
    ProgramResult,
    ProgramTestResult,
    SandboxProgram,
    StdinTest,
)
from streamrl.user_code.sandbox.sandbox import compare_output
from streamrl.user_code.service_gate import describe_failure, is_outage, is_silent, request_service

MAX_REQUESTS = 64
TIMEOUT_SLACK_S = 10.0
"""Overhead of a request on top of the program's own limits."""
#: Appended to a Python program: calls the function with arguments from stdin and prints the value
#: behind a marker. The value is compared here, so printing the marker itself does not help.
_VALUE_MARKER = "streamrl-value:"
_CALL_SOURCE = """

def _call():
    import json, sys
    arguments = json.load(sys.stdin)
    function = globals().get({name!r}) or getattr(Solution(), {name!r})
    sys.stdout.write("\\n" + {mark!r} + json.dumps(function(*arguments)))

_call()
"""


class RemoteSandbox:
    """Sends each test of a program to a server, which isolates the program.

    url: base URL of the server, such as http://sandbox:8080.
    """

    def __init__(self, url: str, limits: ProgramLimits) -> None:
        import httpx  # here: most processes of a run need none

        self._url = url.rstrip("/") + "/run_code"
        self._limits = limits
        timeout_s = limits.compile_s + limits.wall_s + TIMEOUT_SLACK_S
        bounds = httpx.Limits(max_connections=MAX_REQUESTS)
        self._client = httpx.AsyncClient(timeout=timeout_s, limits=bounds)
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    async def run(self, program: SandboxProgram) -> ProgramResult:
        results: list[ProgramTestResult] = []
        for test in program.tests:
            results.append(await self._run_test(program, test))
            outcome = results[-1].outcome
            if outcome is RewardOutcome.COMPILE_ERROR or (
                program.stop_early and outcome is not RewardOutcome.PASS
            ):
                break
        return ProgramResult(tuple(results), len(program.tests))

    async def close(self) -> None:
        await self._client.aclose()

    async def _run_test(
        self, program: SandboxProgram, test: StdinTest | CallTest
    ) -> ProgramTestResult:
        source, stdin = program.source, ""
        if isinstance(test, CallTest):
            source += _CALL_SOURCE.format(name=test.function, mark=_VALUE_MARKER)
            stdin = json.dumps(list(test.arguments))
        else:
            stdin = test.stdin
        body = {
            "code": source,
            "stdin": stdin,
            "language": program.language,
            "compile_timeout": self._limits.compile_s,
            "run_timeout": self._limits.wall_s,
            "memory_limit_MB": self._limits.memory_mib,
        }
        reply = await request_service(self._url, lambda: self._post_request(body), RewardInfraError)
        return await asyncio.to_thread(_judge_reply, reply, program, test)

    async def _post_request(self, body: dict[str, Any]) -> dict[str, Any]:
        import httpx

        try:
            async with self._slots:
                response = await self._client.post(self._url, json=body)
            response.raise_for_status()
            reply = await asyncio.to_thread(response.json)
        except httpx.ReadTimeout:
            late = ServiceOutageError if await is_silent(self._url) else RewardTimeoutError
            raise late(f"{self._url}: no reply in {self._client.timeout.read:g} s") from None
        except httpx.HTTPError as error:
            kind = ServiceOutageError if is_outage(error) else RewardInfraError
            raise kind(f"{self._url}: {describe_failure(error)}") from None
        except ValueError:
            raise RewardInfraError(f"{self._url}: the reply is not JSON") from None
        if not isinstance(reply, dict) or reply.get("status") not in ("Success", "Failed"):
            message = reply.get("message") if isinstance(reply, dict) else reply
            raise RewardInfraError(f"{self._url}: the sandbox failed: {message}")
        return reply


def _judge_reply(
    reply: dict[str, Any], program: SandboxProgram, test: StdinTest | CallTest
) -> ProgramTestResult:
    compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
    if compiled and (compiled.get("status") != "Finished" or compiled.get("return_code")):
        return ProgramTestResult(RewardOutcome.COMPILE_ERROR, _get_last_line(compiled))
    if ran.get("status") == "TimeLimitExceeded":
        return ProgramTestResult(RewardOutcome.TIMEOUT, "ran for too long")
    error = _get_last_line(ran)
    if ran.get("status") != "Finished" or ran.get("return_code") != 0:
        outcome = RewardOutcome.MEMORY if "MemoryError" in error else RewardOutcome.RUNTIME_ERROR
        if error.startswith(("SyntaxError", "IndentationError")):
            outcome = RewardOutcome.COMPILE_ERROR
        return ProgramTestResult(outcome, error)
    out = str(ran.get("stdout") or "")
    if isinstance(test, CallTest):
        _, mark, value = out.rpartition("\n" + _VALUE_MARKER)
        out = value if mark else ""
    return compare_output(out.encode(errors="replace"), test, program)


def _get_last_line(result: dict[str, Any]) -> str:
    return (str(result.get("stderr") or "").strip().splitlines() or [""])[-1]
