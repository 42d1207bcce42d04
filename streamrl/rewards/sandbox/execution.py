"""One program on its way through jails: usually one, a fresh one after a jail had to be ended."""

import asyncio
import time
from typing import Protocol

from streamrl.rewards.interface.verdict import RewardOutcome
from streamrl.rewards.sandbox.jail import (
    GRACE_PERIOD_S,
    Jail,
    JailError,
    JailLostError,
    JailReport,
    MemoryLimitError,
)
from streamrl.rewards.sandbox.program import (
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramTestResult,
    SandboxProgram,
    StdinTest,
)
from streamrl.rewards.sandbox.verdicts import (
    describe_compile_failure,
    judge_report,
    make_program_message,
    make_test_message,
)

#: A jail that is gone without a word may be bad luck once; twice, it is the program's doing.
_JAILS_PER_TEST = 2
#: Outputs of so many characters are compared beside the event loop.
_LONG_TEXT = 1 << 16


class JailPool(Protocol):
    """Where jails come from and go to."""

    async def acquire_jail(self) -> Jail:
        """A jail that waits for its program. Raises JailError."""

    def discard_jail(self, jail: Jail) -> None:
        """End a jail, whatever runs in it."""


class CompileFailedError(Exception):
    """The program could not be compiled; the message says why."""


class ProgramRun:
    """Runs the tests of one program, in order."""

    def __init__(
        self,
        program: SandboxProgram,
        language: LanguageSpec,
        limits: ProgramLimits,
        jails: JailPool,
    ) -> None:
        self._program = program
        self._language = language
        self._limits = limits
        self._jails = jails
        self._jail: Jail | None = None
        self._used_s = 0.0  # without the time it took to get a jail

    async def run_tests(self, slot: int) -> tuple[ProgramTestResult, ...]:
        """The results, to the first that is no pass, or of all tests if the program asks for it.

        slot: which of the programs that run at once this is; it decides the core.
        """
        results: list[ProgramTestResult] = []
        for test in self._program.tests:
            result = await self._run_test(test, slot)
            results.append(result)
            hopeless = result.outcome in (RewardOutcome.COMPILE_ERROR, RewardOutcome.INFRA_ERROR)
            if hopeless or (self._program.stop_early and result.outcome is not RewardOutcome.PASS):
                break
        return tuple(results)

    def release_jail(self) -> None:
        """Give up the jail, if there is one."""
        if self._jail is not None:
            self._jails.discard_jail(self._jail)
            self._jail = None

    async def _run_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        started = time.monotonic()
        verdict, detail = RewardOutcome.RUNTIME_ERROR, "the program ended its jail"
        for _ in range(_JAILS_PER_TEST):
            try:
                return await self._try_test(test, slot)
            except JailLostError:
                self.release_jail()
            except CompileFailedError as error:
                verdict, detail = RewardOutcome.COMPILE_ERROR, str(error)
                break
            except JailError as error:
                verdict, detail = RewardOutcome.INFRA_ERROR, str(error)
                break
            except MemoryLimitError:
                verdict, detail = (
                    RewardOutcome.MEMORY,
                    f"held more than {self._limits.memory_mib} MiB",
                )
                break
            except TimeoutError:
                verdict, detail = RewardOutcome.TIMEOUT, "did not end within its time"
                break
        self.release_jail()
        return ProgramTestResult(verdict, time.monotonic() - started, detail)

    async def _try_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        if self._jail is None:
            self._jail = await self._jails.acquire_jail()
            self._jail.pin_to_core(slot)
            await self._compile_program(self._jail)
        wall_s = min(self._limits.wall_s, self._limits.total_s - self._used_s)
        if wall_s <= 0:
            return ProgramTestResult(
                RewardOutcome.TIMEOUT, 0.0, f"all tests together took {self._limits.total_s:g} s"
            )
        report = await self._request_report(self._jail, make_test_message(test, wall_s), wall_s)
        wanted = len(test.stdout) if isinstance(test, StdinTest) else 0
        if len(report.out) + wanted < _LONG_TEXT:
            return judge_report(report, test, self._program, self._limits)
        return await asyncio.to_thread(judge_report, report, test, self._program, self._limits)

    async def _compile_program(self, jail: Jail) -> None:
        message = make_program_message(self._program, self._language, self._limits)
        try:
            report = await self._request_report(jail, message, self._limits.compile_s)
        except MemoryLimitError as error:
            raise CompileFailedError("the compiler took too much memory") from error
        except TimeoutError as error:
            raise CompileFailedError("the compiler took too long") from error
        trouble = describe_compile_failure(report)
        if trouble:
            raise CompileFailedError(trouble)

    async def _request_report(
        self, jail: Jail, message: dict[str, object], seconds: float
    ) -> JailReport:
        started = time.monotonic()
        try:
            return await jail.request_report(message, started + seconds + GRACE_PERIOD_S)
        finally:
            self._used_s += time.monotonic() - started
