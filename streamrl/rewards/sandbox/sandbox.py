"""The sandbox: programs in, outcomes out, each from a jail of its own made ahead of time."""

import asyncio
import os
from collections import deque
from collections.abc import Mapping

from streamrl.errors import ConfigError
from streamrl.rewards.sandbox.backend_choice import choose, missing_tools
from streamrl.rewards.sandbox.execution import Trial
from streamrl.rewards.sandbox.jail import Blueprint, Jail, JailError
from streamrl.rewards.sandbox.program import (
    PYTHON_ONLY,
    CallTest,
    Language,
    Limits,
    Outcome,
    Program,
)

#: Tries to get a jail, and the time between two, s, before there is an infra_error.
_ATTEMPTS = 3
_PAUSE_S = 0.2


class Sandbox:
    """Runs programs, at most `jails` at once, in the order in which they were given.

    note: what the user is to be told about this sandbox; empty: nothing.
    """

    def __init__(self, plan: Blueprint, jails: int, languages: Mapping[str, Language]) -> None:
        self.note = ""
        self._plan = plan
        self._languages = languages
        self._slots = list(range(jails))
        self._turn = asyncio.Semaphore(jails)
        self._num_started = 0
        self._stock: deque[asyncio.Task[Jail]] = deque()
        self._starting: set[asyncio.Task[Jail]] = set()  # the stock and who waits for one of it
        self._in_use: set[Jail] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def start(
        cls,
        limits: Limits,
        *,
        jails: int | None = None,
        languages: Mapping[str, Language] = PYTHON_ONLY,
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
        missing_tools(languages)
        plan, note = await choose(limits, allow_unsafe=allow_unsafe)
        sandbox = cls(plan, jails, languages)
        sandbox.note = note
        for _ in range(jails):
            sandbox._add_to_stock()
        return sandbox

    async def run(self, program: Program) -> Outcome:
        """Run the program's tests in order and judge them.

        Raises ValueError for a program that this sandbox was not started for.
        """
        language = self._language_of(program)
        async with self._turn:
            slot = self._slots.pop()
            trial = Trial(program, language, self._plan.limits, self)
            try:
                return Outcome(await trial.run(slot), len(program.tests))
            finally:
                trial.leave()
                self._slots.append(slot)

    def _language_of(self, program: Program) -> Language:
        if program.language not in self._languages:
            known = ", ".join(self._languages)
            raise ValueError(f"no language {program.language}: the sandbox was started for {known}")
        language = self._languages[program.language]
        if language.run and any(isinstance(test, CallTest) for test in program.tests):
            raise ValueError(f"function-call tests are for Python only, not {program.language}")
        if not program.tests:
            raise ValueError("a program without tests")
        return language

    async def take(self) -> Jail:
        """A jail that waits for its program; give it back with `discard`. Raises JailError."""
        failure = JailError("jails die while they wait")
        for attempt in range(_ATTEMPTS):
            await asyncio.sleep(_PAUSE_S * attempt)
            try:
                jail = await self._next()
            except JailError as error:
                failure = error
                continue
            if jail.alive:
                return jail
            self.discard(jail)
        raise failure

    async def _next(self) -> Jail:
        if self._closed:
            raise JailError("the sandbox is closed")
        starting = self._stock.popleft()
        self._add_to_stock()
        try:
            jail = await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting in self._starting:
                starting.add_done_callback(self._discard_unused)
            raise
        finally:
            ours = starting in self._starting
            self._starting.discard(starting)
        if not ours:
            raise JailError("the sandbox is closed")
        self._in_use.add(jail)
        return jail

    def discard(self, jail: Jail) -> None:
        """End a jail, whatever runs in it, without waiting for that. Twice does no harm."""
        if jail in self._in_use:
            self._in_use.remove(jail)
            self._end(jail)

    def _end(self, jail: Jail) -> None:
        ending = asyncio.get_running_loop().create_task(jail.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _add_to_stock(self) -> None:
        self._num_started += 1
        starting = asyncio.get_running_loop().create_task(Jail.start(self._plan, self._num_started))
        self._stock.append(starting)
        self._starting.add(starting)

    def _discard_unused(self, starting: "asyncio.Task[Jail]") -> None:
        if starting.exception() is None:
            self._end(starting.result())

    async def close(self) -> None:
        """End all jails; what still runs in one comes to an infra_error."""
        self._closed = True
        starting, self._starting = self._starting, set()
        self._stock.clear()
        if starting:
            await asyncio.wait(starting)
        for started in starting:
            self._discard_unused(started)
        for jail in tuple(self._in_use):
            self.discard(jail)
        while self._ending:
            await asyncio.wait(set(self._ending))
