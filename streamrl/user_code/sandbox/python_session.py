"""Python interpreter in a jail of its own, in which variables persist from call to call."""

import math
import time
from dataclasses import dataclass

from streamrl.user_code.pool.background_tasks import run_to_end
from streamrl.user_code.sandbox import jail_driver
from streamrl.user_code.sandbox.jail import (
    START_TIMEOUT_S,
    Jail,
    JailError,
    JailLostError,
    JailReport,
    JailSpec,
    MemoryLimitError,
)
from streamrl.user_code.sandbox.program import LANGUAGES, SandboxProgram
from streamrl.user_code.sandbox.verdicts import decode_output, make_program_message


@dataclass(frozen=True)
class CodeOutput:
    """Output of a call: what the code printed, and its last value or its exception.

    num_left_out: characters left out in the middle of `text`.
    has_failed: the code raised, or ended the session.
    is_over: the session has ended, and its variables are lost.
    """

    text: str
    num_left_out: int = 0
    has_failed: bool = False
    is_over: bool = False


class PythonSession:
    """Interpreter in a jail. Create with `start`; the jail lives until `kill`.

    limits.cpu_s is the CPU time of a process in all calls together. The other limits in seconds do
    not apply: the caller cancels a call that takes too long, and kills the session.
    """

    def __init__(self, jail: Jail, spec: JailSpec) -> None:
        self._jail = jail
        self._limits = spec.limits

    @classmethod
    async def start(cls, spec: JailSpec, number: int, *, kept_chars: int) -> "PythonSession":
        """Start a jail with an interpreter. Raises JailError.

        number: index of the jail (`Jail.start`). kept_chars:
        characters at each end of a long output that are kept; those between are counted.
        """
        jail = await Jail.start(spec, number)
        try:
            jail.pin_to_core(number)
            program = SandboxProgram("python", "", [])
            limits = make_program_message(program, LANGUAGES["python"], spec.limits)
            # A character of UTF-8 has up to four bytes.
            message = {**limits, "end_bytes": 4 * kept_chars}
            await jail.request_report(message, time.monotonic() + START_TIMEOUT_S)
        except BaseException as error:
            await run_to_end(jail.kill())
            if isinstance(error, JailLostError | MemoryLimitError | TimeoutError):
                raise JailError(f"the interpreter of a jail does not start: {error}") from error
            raise
        return cls(jail, spec)

    async def run(self, code: str) -> CodeOutput:
        """Run code, and wait until it ends. After a call that was cancelled, kill the session."""
        try:
            report = await self._jail.request_report({"code": code}, math.inf)
        except MemoryLimitError as error:
            return CodeOutput(str(error), has_failed=True, is_over=True)
        except JailLostError:
            return CodeOutput("the code ended its jail", has_failed=True, is_over=True)
        return self._read_output(report)

    def _read_output(self, report: JailReport) -> CodeOutput:
        num_left_out = report.exit_code
        if num_left_out:
            text = decode_output(report.out) + decode_output(report.err)
        else:
            text = decode_output(report.out + report.err)
        if report.exit_kind == jail_driver.FILE_LIMIT:
            text += f"\ncreated more than {self._limits.files} files"
        is_over = report.exit_kind in (jail_driver.EXITED, jail_driver.FILE_LIMIT)
        has_failed = is_over or report.exit_kind == jail_driver.RAISED
        return CodeOutput(text, num_left_out, has_failed, is_over)

    async def kill(self) -> None:
        """Kill all processes of the session, and wait for their exit. Raises DeadlineError."""
        await self._jail.kill()
