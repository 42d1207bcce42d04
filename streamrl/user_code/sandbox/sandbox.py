"""Local sandbox: runs each program in a fresh jail from a pool of jails started ahead."""

import asyncio
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.user_code.pool.pool import (
    PooledProcess,
    PoolSettings,
    ProcessPool,
    WorkerCrashError,
)
from streamrl.user_code.reward_result import RewardOutcome
from streamrl.user_code.sandbox.backend_choice import check_language_tools, choose_isolation
from streamrl.user_code.sandbox.jail import (
    GRACE_PERIOD_S,
    Jail,
    JailLostError,
    JailReport,
    JailSpec,
    MemoryLimitError,
)
from streamrl.user_code.sandbox.program import (
    PYTHON_ONLY,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramResult,
    ProgramTestResult,
    SandboxProgram,
    StdinTest,
)
from streamrl.user_code.sandbox.verdicts import (
    describe_compile_failure,
    judge_report,
    make_program_message,
    make_test_message,
)

#: A jail that dies without a report may be an accident; the second time blames the program.
_JAILS_PER_TEST = 2
#: Longer outputs are compared in a thread, not in the event loop.
_LONG_TEXT = 1 << 16


class Sandbox:
    """Runs untrusted programs in FIFO order, at most `jails` concurrently. Create with `start`.

    user_warning: warning for the user; empty if programs are isolated.
    """

    def __init__(
        self, jail_spec: JailSpec, jails: int, languages: Mapping[str, LanguageSpec]
    ) -> None:
        self.user_warning = ""
        self._jail_spec = jail_spec
        self._languages = languages
        self._slots = list(range(jails))
        self._slot_semaphore = asyncio.Semaphore(jails)
        numbers = itertools.count()
        self._pool = ProcessPool(
            "the sandbox",
            lambda: Jail.start(jail_spec, next(numbers)),
            PoolSettings(jails, is_isolated=True, max_spares=jails),
        )

    @classmethod
    async def start(
        cls,
        limits: ProgramLimits,
        *,
        jails: int = 0,
        languages: Mapping[str, LanguageSpec] = PYTHON_ONLY,
        allow_unsafe: bool = False,
    ) -> "Sandbox":
        """Choose and probe an isolation mode, and start a sandbox for programs in `languages`.

        jails: concurrent programs; 0: the number of available cores.

        Raises ConfigError if this machine cannot isolate programs (unless `allow_unsafe`), lacks
        the tools of a language, or does not start a jail.
        """
        check_language_tools(languages)
        jail_spec, warning = await choose_isolation(limits, allow_unsafe=allow_unsafe)
        sandbox = cls(jail_spec, jails or len(os.sched_getaffinity(0)), languages)
        sandbox.user_warning = warning
        try:
            await sandbox._pool.start()
        except WorkerCrashError as error:
            raise ConfigError(f"sandbox: {error}") from None
        return sandbox

    async def run(self, program: SandboxProgram) -> ProgramResult:
        """Run and judge the program's tests in order; function-call tests are for Python only."""
        language = self._languages[program.language]
        async with self._slot_semaphore:
            slot = self._slots.pop()
            program_run = ProgramRun(program, language, self._jail_spec.limits, self._pool)
            try:
                return ProgramResult(await program_run.run_tests(slot), len(program.tests))
            finally:
                program_run.release_jail()
                self._slots.append(slot)

    async def close(self) -> None:
        """Kill all jails; running programs end with INFRA_ERROR."""
        await self._pool.close()


class CompileFailedError(Exception):
    """Compiling the program failed; the message is the compiler's error."""


_OUTCOMES: Mapping[type[Exception], RewardOutcome] = {
    CompileFailedError: RewardOutcome.COMPILE_ERROR,
    WorkerCrashError: RewardOutcome.INFRA_ERROR,
    MemoryLimitError: RewardOutcome.MEMORY,
    TimeoutError: RewardOutcome.TIMEOUT,
}


@dataclass
class ProgramRun:
    """Runs the tests of a program in a jail of `pool`.

    Call `release_jail` afterwards. limits.total_s counts time in jails, not waiting for a jail.
    """

    program: SandboxProgram
    language: LanguageSpec
    limits: ProgramLimits
    pool: ProcessPool[Jail]

    def __post_init__(self) -> None:
        self._claim: PooledProcess[Jail] | None = None
        self._used_s = 0.0  # excludes waiting for a jail

    async def run_tests(self, slot: int) -> tuple[ProgramTestResult, ...]:
        """Run the tests, to the first failure if program.stop_early. slot: selects the core."""
        results: list[ProgramTestResult] = []
        for test in self.program.tests:
            result = await self._run_test(test, slot)
            results.append(result)
            is_fatal = result.outcome in (RewardOutcome.COMPILE_ERROR, RewardOutcome.INFRA_ERROR)
            if is_fatal or (self.program.stop_early and result.outcome is not RewardOutcome.PASS):
                break
        return tuple(results)

    def release_jail(self) -> None:
        """Give back the jail, which is then killed. Idempotent."""
        if self._claim is not None:
            self.pool.release(self._claim)
            self._claim = None

    async def _run_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        outcome, detail = RewardOutcome.RUNTIME_ERROR, "the program killed its jail"
        for _ in range(_JAILS_PER_TEST):
            try:
                return await self._try_test(test, slot)
            except JailLostError:
                self.release_jail()
            except tuple(_OUTCOMES) as error:
                outcome, detail = _OUTCOMES[type(error)], str(error)
                break
        self.release_jail()
        return ProgramTestResult(outcome, detail)

    async def _try_test(self, test: StdinTest | CallTest, slot: int) -> ProgramTestResult:
        if self._claim is None:
            self._claim = await self.pool.claim()
            self._claim.process.pin_to_core(slot)
            await self._compile_program(self._claim.process)
        wall_s = min(self.limits.wall_s, self.limits.total_s - self._used_s)
        if wall_s <= 0:
            return ProgramTestResult(
                RewardOutcome.TIMEOUT, f"all tests together took {self.limits.total_s:g} s"
            )
        report = await self._request_report(
            self._claim.process, make_test_message(test, wall_s), wall_s
        )
        expected_size = len(test.stdout) if isinstance(test, StdinTest) else 0
        if len(report.out) + expected_size < _LONG_TEXT:
            return judge_report(report, test, self.program, self.limits)
        return await asyncio.to_thread(judge_report, report, test, self.program, self.limits)

    async def _compile_program(self, jail: Jail) -> None:
        message = make_program_message(self.program, self.language, self.limits)
        try:
            report = await self._request_report(jail, message, self.limits.compile_s)
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
        started = time.monotonic()
        try:
            return await jail.request_report(message, started + seconds + GRACE_PERIOD_S)
        finally:
            self._used_s += time.monotonic() - started
