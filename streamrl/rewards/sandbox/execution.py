"""Run of a program's tests in a jail, with a fresh jail after each jail that had to be killed."""

import asyncio
import time
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from streamrl.rewards.sandbox.sandbox import Sandbox

#: A jail that dies without a report may be an accident; the second time blames the program.
_JAILS_PER_TEST = 2
#: Longer outputs are compared in a thread, not in the event loop.
_LONG_TEXT = 1 << 16


class CompileFailedError(Exception):
    """Compiling the program failed; the message is the compiler's error."""


class ProgramRun:
    """Runs the tests of a program in a jail from `jails`.

    Call `release_jail` afterwards. limits.total_s counts time in jails, not waiting for a jail.
    """

    def __init__(
        self,
        program: SandboxProgram,
        language: LanguageSpec,
        limits: ProgramLimits,
        jails: "Sandbox",
    ) -> None:
        self._program = program
        self._language = language
        self._limits = limits
        self._jails = jails
        self._jail: Jail | None = None
        self._used_s = 0.0  # excludes waiting for a jail

    async def run_tests(self, slot: int) -> tuple[ProgramTestResult, ...]:
        """Run the tests, to the first failure if program.stop_early. slot: selects the core."""
        results: list[ProgramTestResult] = []
        for test in self._program.tests:
            result = await self._run_test(test, slot)
            results.append(result)
            is_fatal = result.outcome in (RewardOutcome.COMPILE_ERROR, RewardOutcome.INFRA_ERROR)
            if is_fatal or (self._program.stop_early and result.outcome is not RewardOutcome.PASS):
                break
        return tuple(results)

    def release_jail(self) -> None:
        """Give back the jail, which is then killed. Idempotent."""
        if self._jail is not None:
            self._jails.discard_jail(self._jail)
            self._jail = None

    async def _run_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        """Run a test; convert the errors of its jail to outcomes."""
        started = time.monotonic()
        outcome, detail = RewardOutcome.RUNTIME_ERROR, "the program killed its jail"
        for _ in range(_JAILS_PER_TEST):
            try:
                return await self._try_test(test, slot)
            except JailLostError:
                self.release_jail()
            except CompileFailedError as error:
                outcome, detail = RewardOutcome.COMPILE_ERROR, str(error)
                break
            except JailError as error:
                outcome, detail = RewardOutcome.INFRA_ERROR, str(error)
                break
            except MemoryLimitError:
                outcome, detail = (
                    RewardOutcome.MEMORY,
                    f"used more than {self._limits.memory_mib} MiB",
                )
                break
            except TimeoutError:
                outcome, detail = RewardOutcome.TIMEOUT, "did not end before its deadline"
                break
        self.release_jail()
        return ProgramTestResult(outcome, time.monotonic() - started, detail)

    async def _try_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        """Run a test in the current jail; without a jail, first compile in a fresh jail.

        Raises JailError, JailLostError, MemoryLimitError, CompileFailedError or TimeoutError.
        """
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
        expected_size = len(test.stdout) if isinstance(test, StdinTest) else 0
        if len(report.out) + expected_size < _LONG_TEXT:
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
        failure = describe_compile_failure(report)
        if failure:
            raise CompileFailedError(failure)

    async def _request_report(
        self, jail: Jail, message: dict[str, object], seconds: float
    ) -> JailReport:
        """Send a message to the jail's driver; wait `seconds` and a grace period for the report."""
        started = time.monotonic()
        try:
            return await jail.request_report(message, started + seconds + GRACE_PERIOD_S)
        finally:
            self._used_s += time.monotonic() - started
