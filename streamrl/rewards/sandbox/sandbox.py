"""The sandbox: programs in, outcomes out, each from a jail of its own made ahead of time."""

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

#: Tries to get a jail, and the time between two, s, before there is an infra_error.
_MAX_ATTEMPTS = 3
_RETRY_PAUSE_S = 0.2


class Sandbox:
    """Runs programs, at most `jails` at once, in the order in which they were given.

    note: what the user is to be told about this sandbox; empty: nothing.
    """

    def __init__(self, plan: JailSpec, jails: int, languages: Mapping[str, LanguageSpec]) -> None:
        self.user_warning = ""
        self._jail_spec = plan
        self._languages = languages
        self._slots = list(range(jails))
        self._slot_semaphore = asyncio.Semaphore(jails)
        self._num_started = 0
        self._ready_jails: deque[asyncio.Task[Jail]] = deque()
        self._start_tasks: set[asyncio.Task[Jail]] = set()  # the stock and who waits for one of it
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
        """A sandbox for programs in `languages`, after it has tried to break out of a jail.

        jails: programs at once; as many as there are cores unless told otherwise.

        Raises ConfigError, in one line that says what to do, if this machine cannot isolate a
        program (unless `allow_unsafe`) or lacks the tools of a language.
        """
        if jails is None:
            jails = len(os.sched_getaffinity(0))
        if jails < 1:
            raise ConfigError(f"sandbox.jails={jails}: must be 1 or more")
        check_language_tools(languages)
        plan, note = await choose_isolation(limits, allow_unsafe=allow_unsafe)
        sandbox = cls(plan, jails, languages)
        sandbox.user_warning = note
        for _ in range(jails):
            sandbox._start_jail()
        return sandbox

    async def run(self, program: SandboxProgram) -> ProgramResult:
        """Run the program's tests in order and judge them.

        Raises ValueError for a program that this sandbox was not started for.
        """
        language = self._find_language(program)
        async with self._slot_semaphore:
            slot = self._slots.pop()
            trial = ProgramRun(program, language, self._jail_spec.limits, self)
            try:
                return ProgramResult(await trial.run_tests(slot), len(program.tests))
            finally:
                trial.release_jail()
                self._slots.append(slot)

    def _find_language(self, program: SandboxProgram) -> LanguageSpec:
        if program.language not in self._languages:
            known = ", ".join(self._languages)
            raise ValueError(f"no language {program.language}: the sandbox was started for {known}")
        language = self._languages[program.language]
        if language.run and any(isinstance(test, CallTest) for test in program.tests):
            raise ValueError(f"function-call tests are for Python only, not {program.language}")
        if not program.tests:
            raise ValueError("a program without tests")
        return language

    async def acquire_jail(self) -> Jail:
        """A jail that waits for its program; give it back with `discard`. Raises JailError."""
        failure = JailError("jails die while they wait")
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
            ours = starting in self._start_tasks
            self._start_tasks.discard(starting)
        if not ours:
            raise JailError("the sandbox is closed")
        self._jails_in_use.add(jail)
        return jail

    def discard_jail(self, jail: Jail) -> None:
        """End a jail, whatever runs in it, without waiting for that. Twice does no harm."""
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
        if starting.exception() is None:
            self._kill_jail(starting.result())

    async def close(self) -> None:
        """End all jails; what still runs in one comes to an infra_error."""
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
