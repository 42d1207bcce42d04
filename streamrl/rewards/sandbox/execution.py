"""One program on its way through jails: usually one, a fresh one after a jail had to be ended."""

import asyncio
import time
from typing import Protocol

from streamrl.rewards.interface.verdict import Verdict
from streamrl.rewards.sandbox.jail import (
    GRACE_S,
    Jail,
    JailError,
    JailLostError,
    MemoryLimitError,
    Report,
)
from streamrl.rewards.sandbox.program import (
    CallTest,
    Language,
    Limits,
    Program,
    Result,
    StdinTest,
)
from streamrl.rewards.sandbox.verdicts import (
    compiler_trouble,
    judge,
    program_message,
    test_message,
)

#: A jail that is gone without a word may be bad luck once; twice, it is the program's doing.
_JAILS_PER_TEST = 2
#: Outputs of so many characters are compared beside the event loop.
_LONG_TEXT = 1 << 16


class Jails(Protocol):
    """Where jails come from and go to."""

    async def take(self) -> Jail:
        """A jail that waits for its program. Raises JailError."""

    def discard(self, jail: Jail) -> None:
        """End a jail, whatever runs in it."""


class NotCompiledError(Exception):
    """The program could not be compiled; the message says why."""


class Trial:
    """Runs the tests of one program, in order."""

    def __init__(self, program: Program, language: Language, limits: Limits, jails: Jails) -> None:
        self._program = program
        self._language = language
        self._limits = limits
        self._jails = jails
        self._jail: Jail | None = None
        self._used_s = 0.0  # without the time it took to get a jail

    async def run(self, slot: int) -> tuple[Result, ...]:
        """The results, to the first that is no pass, or of all tests if the program asks for it.

        slot: which of the programs that run at once this is; it decides the core.
        """
        results: list[Result] = []
        for test in self._program.tests:
            result = await self._test(test, slot)
            results.append(result)
            hopeless = result.verdict in (Verdict.COMPILE_ERROR, Verdict.INFRA_ERROR)
            if hopeless or (self._program.stop_early and result.verdict is not Verdict.PASS):
                break
        return tuple(results)

    def leave(self) -> None:
        """Give up the jail, if there is one."""
        if self._jail is not None:
            self._jails.discard(self._jail)
            self._jail = None

    async def _test(self, test: StdinTest | CallTest, slot: int) -> Result:
        started = time.monotonic()
        verdict, detail = Verdict.RUNTIME_ERROR, "the program ended its jail"
        for _ in range(_JAILS_PER_TEST):
            try:
                return await self._try(test, slot)
            except JailLostError:
                self.leave()
            except NotCompiledError as error:
                verdict, detail = Verdict.COMPILE_ERROR, str(error)
                break
            except JailError as error:
                verdict, detail = Verdict.INFRA_ERROR, str(error)
                break
            except MemoryLimitError:
                verdict, detail = Verdict.MEMORY, f"held more than {self._limits.memory_mib} MiB"
                break
            except TimeoutError:
                verdict, detail = Verdict.TIMEOUT, "did not end within its time"
                break
        self.leave()
        return Result(verdict, time.monotonic() - started, detail)

    async def _try(self, test: StdinTest | CallTest, slot: int) -> Result:
        if self._jail is None:
            self._jail = await self._jails.take()
            self._jail.pin(slot)
            await self._compile(self._jail)
        wall_s = min(self._limits.wall_s, self._limits.total_s - self._used_s)
        if wall_s <= 0:
            return Result(
                Verdict.TIMEOUT, 0.0, f"all tests together took {self._limits.total_s:g} s"
            )
        report = await self._ask(self._jail, test_message(test, wall_s), wall_s)
        wanted = len(test.stdout) if isinstance(test, StdinTest) else 0
        if len(report.out) + wanted < _LONG_TEXT:
            return judge(report, test, self._program, self._limits)
        return await asyncio.to_thread(judge, report, test, self._program, self._limits)

    async def _compile(self, jail: Jail) -> None:
        message = program_message(self._program, self._language, self._limits)
        try:
            report = await self._ask(jail, message, self._limits.compile_s)
        except MemoryLimitError as error:
            raise NotCompiledError("the compiler took too much memory") from error
        except TimeoutError as error:
            raise NotCompiledError("the compiler took too long") from error
        trouble = compiler_trouble(report)
        if trouble:
            raise NotCompiledError(trouble)

    async def _ask(self, jail: Jail, message: dict[str, object], seconds: float) -> Report:
        started = time.monotonic()
        try:
            return await jail.request(message, started + seconds + GRACE_S)
        finally:
            self._used_s += time.monotonic() - started
