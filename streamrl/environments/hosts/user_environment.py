"""A session's object of a user's class, behind the same methods for both shapes.

Its sync methods run in one thread of the episode, async methods as tasks. A call may be given up at
any time. An async method is then cancelled. A thread cannot be stopped: its call is counted as
hanging until it returns, and the pool replaces a host with hanging calls.
"""

import asyncio
import contextvars
import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from streamrl.environments.config import EnvironmentConfig
from streamrl.environments.hosts.host_protocol import CLOSE_TIMEOUT_S
from streamrl.environments.hosts.user_class import CONSTRUCTOR, UserClass
from streamrl.environments.interface import (
    EnvironmentStep,
    EpisodeSummary,
    Message,
    Reply,
    ResetResult,
    Turn,
)
from streamrl.environments.tool_calls.reply_text import replace_surrogates
from streamrl.files.bounded_read import MIB
from streamrl.files.python_module import FileFunction
from streamrl.messages import Prompt
from streamrl.user_code.checks import format_returned, to_finite_float
from streamrl.user_code.pool.worker import exit_if_forked

MAX_RUNNING_CALLS = 256
"""Concurrent sync calls of a host; further calls wait. With thousands of threads that all want the
interpreter lock, the event loop would hardly ever get it."""
CANCEL_TIMEOUT_S = 1.0
"""Grace period of a cancelled async method; afterwards it counts as hanging."""


class UserCodeError(Exception):
    """Exception of user code; the message has method, file, line, type and text."""


class HostCalls:
    """Limit of the sync calls of all episodes of a host, and its calls that hang."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_RUNNING_CALLS)
        self.hanging: set[asyncio.Future[Any]] = set()

    def add_hanging(self, work: "asyncio.Future[Any]") -> None:
        """Count a call that was given up until it returns."""
        self.hanging.add(work)
        work.add_done_callback(self._on_hanging_done)

    def _on_hanging_done(self, work: "asyncio.Future[Any]") -> None:
        self.hanging.discard(work)
        if not work.cancelled():
            # Retrieve the exception; asyncio logs "exception was never retrieved" otherwise.
            work.exception()


class EpisodeCalls:
    """Runs methods of an episode's object without blocking the event loop.

    All sync calls have the same thread: connections, event loops and contexts may be bound to
    theirs. Another thread serves a call that comes while the thread is busy with one that hangs.
    """

    def __init__(self, host_calls: HostCalls) -> None:
        self._host_calls = host_calls
        self._thread: ThreadPoolExecutor | None = None
        self._in_thread: asyncio.Future[Any] | None = None
        self._context = contextvars.copy_context()

    @property
    def is_hanging(self) -> bool:
        """True while the episode's thread runs a call that was given up."""
        return self._in_thread in self._host_calls.hanging

    async def run(
        self, method: FileFunction, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method and return its result; give it up when cancelled. Raises UserCodeError.

        method: description of the function, for its errors. Positional, because keyword arguments
        of tools and constructors may have any name.
        """
        call = partial(function, *args, **kwargs)
        if method.is_async:
            work = asyncio.create_task(_await_call(method, call), context=self._context)
            return await self._wait_for(work)
        async with self._host_calls.slots:
            return await self._wait_for(self._start_call(method, call))

    def _start_call(self, method: FileFunction, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        is_busy = self._in_thread is not None and not self._in_thread.done()
        thread = None if is_busy else self._thread
        if thread is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix=method.name)
        run = partial(_make_call, method, call, os.getpid())
        try:
            work = asyncio.get_running_loop().run_in_executor(thread, run)
        except RuntimeError as error:
            raise UserCodeError(
                f"{method.name}: {error}: an open episode whose class has blocking methods has a"
                " thread; lower environment.open_episodes, or write async methods"
            ) from error
        if is_busy:
            thread.shutdown(wait=False)
        else:
            self._thread, self._in_thread = thread, work
        return work

    def end_thread(self) -> None:
        """Let the episode's thread end after its call; a later call has another."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._thread = self._in_thread = None

    async def _wait_for(self, work: "asyncio.Future[Any]") -> Any:
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            self._host_calls.add_hanging(work)
            if isinstance(work, asyncio.Task):
                work.cancel()
                await asyncio.wait({work}, timeout=CANCEL_TIMEOUT_S)
            raise
        return work.result()


async def _await_call(method: FileFunction, call: Callable[[], Any]) -> Any:
    host_pid, task = os.getpid(), asyncio.current_task()
    assert task is not None
    try:
        return await call()
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise UserCodeError(method.describe_error(error)) from error
    # SystemExit included, which would otherwise stop the event loop.
    except BaseException as error:
        raise UserCodeError(method.describe_error(error)) from error
    finally:
        exit_if_forked(host_pid)


def _make_call(method: FileFunction, call: Callable[[], Any], host_pid: int) -> Any:
    try:
        return call()
    # SystemExit included, which would otherwise end the thread.
    except BaseException as error:
        raise UserCodeError(method.describe_error(error)) from error
    finally:
        exit_if_forked(host_pid)


MAX_OBSERVATION_BYTES = 16 * MIB
"""Limit of an observation as JSON: a guard for the socket, far above any context window."""


class UserEnvironment:
    """Environment of a session. Every method raises UserCodeError, and TimeoutError if too slow.

    Siblings share nothing: each session has an object of its own.
    """

    def __init__(
        self, user_class: UserClass, settings: EnvironmentConfig, host_calls: HostCalls
    ) -> None:
        self.description = user_class.description
        self._class = user_class
        self._settings = settings
        self._calls = EpisodeCalls(host_calls)
        self._object: Any = None
        self._row: Prompt | None = None

    async def reset(self, prompt: Prompt, seed: int) -> ResetResult:
        """Construct the object, and reset it if the class has `reset`."""
        offered = {"row": prompt, "seed": seed}
        observation = None
        self._row = prompt
        async with asyncio.timeout(self._settings.turn_timeout_s):
            # Copied: an object that changes a list among its options must not change its siblings'.
            options = copy.deepcopy(dict(self._class.options))
            self._object = await self._calls.run(
                self._class.methods[CONSTRUCTOR], self._class.class_object, **options
            )
            if self._class.is_async:
                self._calls.end_thread()
            if "reset" in self._class.methods:
                arguments = {name: offered[name] for name in self._class.reset_arguments}
                observation = await self.call("reset", **arguments)
        messages = () if observation is None else self.to_messages("reset", observation)
        return ResetResult(messages, self.description.tools)

    async def score(self, episode: EpisodeSummary) -> float:
        if not self.description.has_score:
            return sum(episode.rewards)
        async with asyncio.timeout(self._settings.turn_timeout_s):
            return self.to_float("score", await self.call("score", episode))

    async def oracle(self, messages: Sequence[Message]) -> str:
        """Return the turn that the class's `oracle` would write next."""
        async with asyncio.timeout(self._settings.turn_timeout_s):
            reply = await self.call("oracle", self._row, messages)
        if not isinstance(reply, str):
            raise self.make_result_error("oracle", reply, "a text")
        return "".join((reply, ""))  # a plain str, as the pool unpickles no subclass

    async def close(self) -> None:
        try:
            if self._object is not None and "close" in self._class.methods:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.call("close")
        finally:
            self._calls.end_thread()

    @property
    def is_hanging(self) -> bool:
        """True while a call that was given up occupies the episode's thread."""
        return self._calls.is_hanging

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self._object, name)
        return await self._calls.run(self._class.methods[name], function, *args, **kwargs)

    def to_float(self, name: str, value: Any) -> float:
        number = to_finite_float(value)
        if number is None:
            raise self.make_result_error(name, value, "a finite number")
        return number

    def to_messages(self, name: str, observation: Any) -> Sequence[Message]:
        """Return what a method returned as chat messages of plain data; a text is a user message.

        Raises UserCodeError if `observation` is neither, or longer than MAX_OBSERVATION_BYTES.
        """
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        if not _are_messages(observation):
            raise self.make_result_error(name, observation, "a text or a list of chat messages")
        try:
            # A copy of plain data: the pool unpickles neither subclasses of str nor user classes.
            text = json.dumps([dict(message) for message in observation], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.make_result_error(name, observation, f"plain JSON data ({error})") from error
        encoded = replace_surrogates(text).encode()
        if len(encoded) > MAX_OBSERVATION_BYTES:
            raise UserCodeError(
                f"{self._locate(name)} returned an observation of {len(encoded) / MIB:.1f} MiB; the"
                f" limit is {MAX_OBSERVATION_BYTES // MIB} MiB"
            )
        messages: list[Message] = json.loads(encoded)
        return messages

    def make_result_error(self, name: str, value: Any, wanted: str) -> UserCodeError:
        return UserCodeError(
            f"{self._locate(name)} returned {format_returned(value)}, not {wanted}"
        )

    def _locate(self, name: str) -> str:
        method = self._class.methods[name]
        return f"{method.name} in {method.file}"


class TurnEnvironment(UserEnvironment):
    """Environment whose class has `step`."""

    async def step(self, reply: Reply) -> EnvironmentStep:
        async with asyncio.timeout(self._settings.turn_timeout_s):
            turn = await self.call("step", reply)
        if not isinstance(turn, Turn):
            raise self.make_result_error("step", turn, "a Turn")
        reward, done = self.to_float("step", turn.reward), bool(turn.done)
        messages = () if done else self.to_messages("step", turn.observation)
        return EnvironmentStep(messages, reward, done)


def _are_messages(observation: Any) -> bool:
    return isinstance(observation, list | tuple) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
        for message in observation
    )
