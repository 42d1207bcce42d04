"""Local sandbox: runs each program in a fresh jail from a pool of jails started ahead."""

import asyncio
import os
from collections import deque
from collections.abc import Mapping

from streamrl.errors import ConfigError
from streamrl.rewards.sandbox.backend_choice import check_language_tools, choose_isolation
from streamrl.rewards.sandbox.execution import ProgramRun
from streamrl.rewards.sandbox.jail import Jail, JailError, JailSpec
from streamrl.rewards.sandbox.program import (
    PYTHON_ONLY,
    CallTest,
    LanguageSpec,
    ProgramLimits,
    ProgramResult,
    SandboxProgram,
)

#: Attempts to get a jail; attempt n waits n * _RETRY_PAUSE_S. Then the outcome is INFRA_ERROR.
_MAX_ATTEMPTS = 3
_RETRY_PAUSE_S = 0.2


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
        self._num_started = 0
        self._ready_jails: deque[asyncio.Task[Jail]] = deque()
        self._start_tasks: set[asyncio.Task[Jail]] = set()  # ready, starting or being acquired
        self._jails_in_use: set[Jail] = set()
        self._kill_tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @classmethod
    async def start(
        cls,
        limits: ProgramLimits,
        *,
        jails: int | None = None,
        languages: Mapping[str, LanguageSpec] = PYTHON_ONLY,
        allow_unsafe: bool = False,
    ) -> "Sandbox":
        """Choose and probe an isolation mode, and start a sandbox for programs in `languages`.

        jails: concurrent programs; default: the number of available cores.

        Raises ConfigError if this machine cannot isolate programs (unless `allow_unsafe`) or lacks
        the tools of a language.
        """
        if jails is None:
            jails = len(os.sched_getaffinity(0))
        if jails < 1:
            raise ConfigError(f"sandbox.jails={jails}: must be 1 or more")
        check_language_tools(languages)
        jail_spec, warning = await choose_isolation(limits, allow_unsafe=allow_unsafe)
        sandbox = cls(jail_spec, jails, languages)
        sandbox.user_warning = warning
        for _ in range(jails):
            sandbox._start_jail()
        return sandbox

    async def run(self, program: SandboxProgram) -> ProgramResult:
        """Run and judge the program's tests in order.

        Raises ValueError for an unknown language, a program without tests, and function-call tests
        in languages other than Python.
        """
        language = self._find_language(program)
        async with self._slot_semaphore:
            slot = self._slots.pop()
            program_run = ProgramRun(program, language, self._jail_spec.limits, self)
            try:
                return ProgramResult(await program_run.run_tests(slot), len(program.tests))
            finally:
                program_run.release_jail()
                self._slots.append(slot)

    def _find_language(self, program: SandboxProgram) -> LanguageSpec:
        if program.language not in self._languages:
            names = ", ".join(self._languages)
            raise ValueError(f"no language {program.language}: the sandbox was started for {names}")
        language = self._languages[program.language]
        if language.run and any(isinstance(test, CallTest) for test in program.tests):
            raise ValueError(f"function-call tests are for Python only, not {program.language}")
        if not program.tests:
            raise ValueError("a program without tests")
        return language

    async def acquire_jail(self) -> Jail:
        """Return a jail ready for a program; release with `discard_jail`. Raises JailError."""
        failure = JailError("jails exit before a program is sent to them")
        for attempt in range(_MAX_ATTEMPTS):
            await asyncio.sleep(_RETRY_PAUSE_S * attempt)
            try:
                jail = await self._next_jail()
            except JailError as error:
                failure = error
                continue
            if jail.is_alive:
                return jail
            self.discard_jail(jail)
        raise failure

    async def _next_jail(self) -> Jail:
        """Wait for the jail that was started first, and start its replacement. Raises JailError."""
        if self._is_closed:
            raise JailError("the sandbox is closed")
        starting = self._ready_jails.popleft()
        self._start_jail()
        try:
            jail = await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting in self._start_tasks:
                starting.add_done_callback(self._kill_unused_jail)
            raise
        finally:
            # close() takes over the jails in _start_tasks and kills them.
            is_open = starting in self._start_tasks
            self._start_tasks.discard(starting)
        if not is_open:
            raise JailError("the sandbox is closed")
        self._jails_in_use.add(jail)
        return jail

    def discard_jail(self, jail: Jail) -> None:
        """Kill a jail from `acquire_jail` in the background. Idempotent."""
        if jail in self._jails_in_use:
            self._jails_in_use.remove(jail)
            self._kill_jail(jail)

    def _kill_jail(self, jail: Jail) -> None:
        ending = asyncio.get_running_loop().create_task(jail.kill())
        self._kill_tasks.add(ending)
        ending.add_done_callback(self._kill_tasks.discard)

    def _start_jail(self) -> None:
        self._num_started += 1
        starting = asyncio.get_running_loop().create_task(
            Jail.start(self._jail_spec, self._num_started)
        )
        self._ready_jails.append(starting)
        self._start_tasks.add(starting)

    def _kill_unused_jail(self, starting: "asyncio.Task[Jail]") -> None:
        """Kill the jail of a finished start task, unless the start failed."""
        if starting.exception() is None:
            self._kill_jail(starting.result())

    async def close(self) -> None:
        """Kill all jails; running programs end with INFRA_ERROR."""
        self._is_closed = True
        starting, self._start_tasks = self._start_tasks, set()
        self._ready_jails.clear()
        if starting:
            await asyncio.wait(starting)
        for started in starting:
            self._kill_unused_jail(started)
        for jail in tuple(self._jails_in_use):
            self.discard_jail(jail)
        while self._kill_tasks:
            await asyncio.wait(set(self._kill_tasks))
