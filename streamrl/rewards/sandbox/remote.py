"""A sandbox on another machine, asked over HTTP as sandbox-fusion defines it (`/run_code`)."""

import asyncio
import json
from typing import Any

import httpx

from streamrl.errors import InfraError
from streamrl.rewards.interface.verdict import Verdict
from streamrl.rewards.sandbox import CallTest, Limits, Outcome, Program, Result, StdinTest
from streamrl.rewards.sandbox.compare import may_be_value, read_value, same_text, same_value

MOST_REQUESTS = 64
"""Requests under way at once."""
SLACK_S = 10.0
"""What a request may take beyond the time of the program, s."""
#: Put behind a Python program: calls a function with the arguments on stdin. What it prints is
#: compared here, so a program that prints this line itself gains nothing by it.
_MARK = "streamrl-value:"
_CALL = """

def _call():
    import json, sys
    arguments = json.load(sys.stdin)
    function = globals().get({name!r}) or getattr(Solution(), {name!r})
    sys.stdout.write("\\n" + {mark!r} + json.dumps(function(*arguments)))

_call()
"""


class RemoteSandbox:
    """Sends each test of a program to a server; the server isolates it."""

    def __init__(self, url: str, limits: Limits) -> None:
        """`url` is where the server is, such as http://sandbox:8080."""
        self._url = url.rstrip("/") + "/run_code"
        self._limits = limits
        timeout_s = limits.compile_s + limits.wall_s + SLACK_S
        bounds = httpx.Limits(max_connections=MOST_REQUESTS)
        self._client = httpx.AsyncClient(timeout=timeout_s, limits=bounds)
        self._slots = asyncio.Semaphore(MOST_REQUESTS)

    async def run(self, program: Program) -> Outcome:
        """Run the tests in order and judge them. Raises InfraError if there is no answer."""
        results: list[Result] = []
        for test in program.tests:
            results.append(await self._test(program, test))
            verdict = results[-1].verdict
            if verdict is Verdict.COMPILE_ERROR or (
                program.stop_early and verdict is not Verdict.PASS
            ):
                break
        return Outcome(tuple(results), len(program.tests))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _test(self, program: Program, test: StdinTest | CallTest) -> Result:
        source, stdin = program.source, ""
        if isinstance(test, CallTest):
            source += _CALL.format(name=test.function, mark=_MARK)
            stdin = json.dumps(list(test.arguments))
        else:
            stdin = test.stdin
        reply = await self._ask(
            {
                "code": source,
                "stdin": stdin,
                "language": program.language,
                "compile_timeout": self._limits.compile_s,
                "run_timeout": self._limits.wall_s,
                "memory_limit_MB": self._limits.memory_mib,
            }
        )
        return await asyncio.to_thread(_judge, reply, program, test)

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._slots:
                reply = await self._client.post(self._url, json=body)
            reply.raise_for_status()
            found = await asyncio.to_thread(reply.json)
        except httpx.TimeoutException:
            raise InfraError(f"{self._url}: no reply in {self._client.timeout.read:g} s") from None
        except (httpx.HTTPError, ValueError) as error:
            raise InfraError(f"{self._url}: {_one_line(error)}") from None
        if not isinstance(found, dict) or found.get("status") not in ("Success", "Failed"):
            said = found.get("message") if isinstance(found, dict) else found
            raise InfraError(f"{self._url}: the sandbox failed: {said}")
        return found


def _judge(reply: dict[str, Any], program: Program, test: StdinTest | CallTest) -> Result:
    """The verdict on one test, of what the server says came out."""
    compiled, ran = reply.get("compile_result") or {}, reply.get("run_result") or {}
    seconds = float(ran.get("execution_time") or 0.0)
    if compiled and (compiled.get("status") != "Finished" or compiled.get("return_code")):
        return Result(Verdict.COMPILE_ERROR, seconds, _last_line(compiled))
    if ran.get("status") == "TimeLimitExceeded":
        return Result(Verdict.TIMEOUT, seconds, "ran for too long")
    error = _last_line(ran)
    if ran.get("status") != "Finished" or ran.get("return_code") != 0:
        kind = Verdict.MEMORY if "MemoryError" in error else Verdict.RUNTIME_ERROR
        if error.startswith(("SyntaxError", "IndentationError")):
            kind = Verdict.COMPILE_ERROR
        return Result(kind, seconds, error)
    if _is_right(str(ran.get("stdout") or ""), program, test):
        return Result(Verdict.PASS, seconds)
    return Result(Verdict.WRONG, seconds)


def _is_right(out: str, program: Program, test: StdinTest | CallTest) -> bool:
    if isinstance(test, StdinTest):
        return same_text(test.stdout, out, loose_numbers=program.loose_numbers)
    _, mark, value = out.rpartition("\n" + _MARK)
    data = value.encode(errors="replace")
    if not may_be_value(data, test.accepted):
        return False
    try:
        found = read_value(data)
    except ValueError:
        return False
    return bool(mark) and any(same_value(wanted, found) for wanted in test.accepted)


def _last_line(part: dict[str, Any]) -> str:
    return (str(part.get("stderr") or "").strip().splitlines() or [""])[-1]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
