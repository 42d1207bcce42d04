"""Handler of a host process: the sessions of a user's environment class, on one event loop.

Sync methods of a session's object run in one thread of the episode, async methods as tasks. A call
may be given up at any time. An async method is then cancelled. A thread cannot be stopped: its call
is counted as hanging until it returns, and the pool replaces a host with hanging calls.

Classes of users have one of two shapes:

class Guess:                        turns: the class has `step`
    def reset(self, row, seed): ...
    def step(self, reply): ...
    def score(self, episode): ...   optional, as are reset, close, and
    def state_key(self): ...        text or int, equal in equal states, and for tests
    def oracle(self, row, messages): ...

class Calculator:                   tools: its other public methods
    def reset(self, row): ...
    def calculate(self, expression: str) -> str: ...
    def score(self, episode): ...
"""

import asyncio
import contextvars
import copy
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from types import ModuleType
from typing import Any

from streamrl.environments.config import (
    OPENENV_KIND,
    PYTHON,
    SECTION,
    EnvironmentConfig,
    EnvironmentSpec,
    ToolConfig,
    get_environment_section,
)
from streamrl.environments.hosts.host_protocol import (
    CLOSE_TIMEOUT_S,
    EnvironmentDescription,
    HostOperation,
    HostRequest,
    HostResponse,
)
from streamrl.environments.interface import (
    CallOutcome,
    EnvironmentStep,
    EpisodeSummary,
    Message,
    Reply,
    ResetResult,
    ToolCall,
    ToolSchema,
    Turn,
)
from streamrl.environments.tool_calls.reply_text import (
    cut_middle,
    format_tool_error,
    format_tool_result,
    make_call_id,
    replace_surrogates,
)
from streamrl.environments.tool_calls.tool_schema import get_tool_name, make_tool_schema
from streamrl.environments.tool_sources.python_tools import (
    PythonTools,
    ToolAnswer,
    ToolSession,
    ToolSource,
)
from streamrl.errors import ConfigError, EpisodeError, EpisodeOutageError, ServiceOutageError
from streamrl.files.bounded_read import MIB
from streamrl.files.python_module import FileFunction, load_referenced_class, make_file_function
from streamrl.messages import Prompt, derive_seed
from streamrl.user_code.checks import format_returned, to_finite_float
from streamrl.user_code.concurrent_calls import map_concurrently
from streamrl.user_code.pool.background_tasks import BackgroundTasks
from streamrl.user_code.pool.worker import exit_if_forked
from streamrl.user_code.service_gate import is_silent

RESET_PARAMETERS = ("row", "seed")
"""Parameters that `reset` may declare."""
POSITIONAL_ARGUMENTS = {
    "step": ("reply",),
    "score": ("episode",),
    "oracle": ("row", "messages"),
    "state_key": (),
    "close": (),
}
"""Positional arguments of the other methods that are not tools."""
CONSTRUCTOR = "__init__"


@dataclass(frozen=True)
class UserClass:
    """Environment class of a user, or that of OpenEnv.

    options: keyword arguments of the constructor.
    methods: `reset`, `step`, `score`, `oracle`, `state_key`, `close` and tools by name, as far as
        the class has them, and the constructor.
    reset_arguments: names of the arguments that `reset` takes.
    """

    class_object: type
    options: Mapping[str, Any]
    description: EnvironmentDescription
    methods: Mapping[str, FileFunction]
    reset_arguments: tuple[str, ...]

    @cached_property
    def is_async(self) -> bool:
        """True if all methods besides the constructor are async: an episode keeps no thread."""
        return all(m.is_async for name, m in self.methods.items() if name != CONSTRUCTOR)


def load_user_class(spec: EnvironmentSpec, *, section: str = SECTION) -> UserClass:
    """Load the class that a spec names, and check its constructor and methods.

    Without a class, the environment consists of the tools in `spec.tools`. section: config section
    of the spec, for errors. Raises ConfigError if the file cannot be imported, the class has
    neither shape or both, a method has other parameters than its caller passes, or the constructor
    does not take the options.
    """
    if not spec.has_class:
        return _make_bare_class()
    file, class_object, label = _import_class(spec, section)
    constructor = make_file_function(file, class_object.__name__, class_object, label=label)
    _check_options(constructor, spec.options, section)
    is_openenv = spec.kind == OPENENV_KIND
    if is_openenv:
        class_object(**spec.options)  # refuses values that it cannot use
    methods = _find_methods(class_object, file, label)
    other = ("reset", *POSITIONAL_ARGUMENTS)
    tools = [name for name in methods if name not in other and not is_openenv]
    if "step" in methods and spec.tools:
        raise ConfigError(
            f"{section}.tools: {label} in {file} has step(self, reply), which answers every reply;"
            " tools need a class without step, or none"
        )
    if ("step" in methods) == bool(tools or spec.tools):
        found = f"step and also {', '.join(tools)}" if tools else "no public method"
        raise ConfigError(
            f"{label}: in {file} has {found}; write either step(self, reply), which returns a Turn,"
            " or tools: public methods with annotated parameters and a docstring (helpers: _name)"
        )
    for name, arguments in POSITIONAL_ARGUMENTS.items():
        if name in methods:
            methods[name].check_positional(arguments)
    reset_arguments: tuple[str, ...] = ()
    if "reset" in methods:
        reset_arguments = methods["reset"].select_arguments(RESET_PARAMETERS)
    description = EnvironmentDescription(
        name=class_object.__name__,
        file=file,
        has_step="step" in methods,
        tools=tuple(make_tool_schema(methods[name].function) for name in tools),
        has_score="score" in methods,
        has_oracle="oracle" in methods,
        has_state="state_key" in methods,
    )
    return UserClass(
        class_object,
        spec.options,
        description,
        {CONSTRUCTOR: constructor, **methods},
        reset_arguments,
    )


def _make_bare_class() -> UserClass:
    """Return the class of an environment that has tools only."""
    name = "an environment without a class"
    description = EnvironmentDescription(name=name, file="", has_step=False)
    constructor = FileFunction("", name, object, {}, name)
    return UserClass(object, {}, description, {CONSTRUCTOR: constructor}, ())


def _import_class(spec: EnvironmentSpec, section: str) -> tuple[str, type, str]:
    """Return the file of the class, the class, and its setting=value for errors."""
    if spec.kind == OPENENV_KIND:
        setting = spec.format_setting(section)
        name = "streamrl.environments.hosts.openenv"
        module = import_optional(name, setting=setting, extra=spec.kind)
        return str(module.__file__), module.OpenEnvEnvironment, setting
    file, class_object = load_referenced_class(spec.path, setting=f"{section}.path")
    path = spec.path.removesuffix(f":{class_object.__name__}")
    return file, class_object, f"{section}.path={path}:{class_object.__name__}"


def _find_methods(class_object: type, file: str, label: str) -> dict[str, FileFunction]:
    """Return the public methods, inherited ones included, in the order of their definition."""
    methods: dict[str, FileFunction] = {}
    for name in dict.fromkeys(key for base in class_object.__mro__[::-1] for key in vars(base)):
        static = inspect.getattr_static(class_object, name)
        is_method = inspect.isfunction(static) or isinstance(static, classmethod | staticmethod)
        if name.startswith("_") or not is_method:
            continue
        # Bound to a stand-in: objects of the class are made only for sessions.
        bound = static.__get__(object(), class_object)
        methods[name] = make_file_function(
            file, f"{class_object.__name__}.{name}", bound, label=f"{label}.{name}"
        )
    return methods


def _check_options(constructor: FileFunction, options: Mapping[str, Any], section: str) -> None:
    """Raise ConfigError for an option that is missing, or that the constructor does not take."""
    known = {*options} if constructor.has_var_keyword else constructor.keyword_names
    problems = [f"{name}: no such parameter" for name in options if name not in known]
    problems += [f"{name}: missing" for name in sorted(constructor.required_names - {*options})]
    if problems:
        raise ConfigError(
            f"{section}.options.{problems[0]}: the parameters of {constructor.name} in"
            f" {constructor.file} are {', '.join(constructor.parameters) or 'none'}"
        )


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
        self.hanging = BackgroundTasks()


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
        return self._in_thread in self._host_calls.hanging.running

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
            self._host_calls.hanging.watch(work)
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
            state = await self.read_state()
        messages = () if observation is None else self.to_messages("reset", observation)
        return ResetResult(messages, self.description.tools, state)

    async def read_state(self) -> int:
        """Return a number above 0 for the state that `state_key` names; 0 without `state_key`."""
        if not self.description.has_state:
            return 0
        key = await self.call("state_key")
        if not isinstance(key, str | Integral):
            raise self.make_result_error("state_key", key, "a text or an int")
        # Numbers of numpy are equal to those of Python; a text may have lone surrogates.
        name = ascii(key) if isinstance(key, str) else f"{int(key):x}"
        return derive_seed(name, digest_size=8) or 1

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
            done = bool(turn.done)
            state = 0 if done else await self.read_state()
        reward = self.to_float("step", turn.reward)
        messages = () if done else self.to_messages("step", turn.observation)
        return EnvironmentStep(messages, reward, done, state=state)


def _are_messages(observation: Any) -> bool:
    return isinstance(observation, list | tuple) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
        for message in observation
    )


class ToolSources:
    """Sources in the order of environment.tools, behind one list of tools.

    own_tools: tools of the user's class.
    """

    def __init__(self, configs: Sequence[ToolConfig], own_tools: Sequence[ToolSchema]) -> None:
        self._sources = [_make_source(config) for config in configs]
        self._own_tools = own_tools
        self._tools_by_source: list[Sequence[ToolSchema]] | None = None
        self._listing = asyncio.Lock()

    async def check(self) -> None:
        """Raise ConfigError if tools cannot run on this machine."""
        for source in self._sources:
            await source.check()

    async def list_tools(self, deadline: float) -> Sequence[ToolSchema]:
        """Return the schemas of all tools; a server is asked once, for all episodes.

        deadline: s of the event loop's clock. Raises EpisodeError, and ConfigError for tools with
        the same name.
        """
        listed = [tools for _, tools in await self._list_by_source(deadline)]
        return (*self._own_tools, *(tool for tools in listed for tool in tools))

    async def _list_by_source(
        self, deadline: float
    ) -> Sequence[tuple[ToolSource, Sequence[ToolSchema]]]:
        async with self._listing:
            if self._tools_by_source is None:
                listed = [await source.list_tools(deadline) for source in self._sources]
                self._check_names(listed)
                self._tools_by_source = listed
        return list(zip(self._sources, self._tools_by_source, strict=True))

    def _check_names(self, listed: Sequence[Sequence[ToolSchema]]) -> None:
        owners = {get_tool_name(tool): "the class" for tool in self._own_tools}
        for source, tools in zip(self._sources, listed, strict=True):
            for name in map(get_tool_name, tools):
                if name in owners:
                    raise ConfigError(
                        f"{source.label}: has a tool {name}, as has {owners[name]}; rename one, or"
                        " leave it out: `only` of an MCP server names the tools to use"
                    )
                owners[name] = source.label

    async def open(self, deadline: float, opened: dict[str, ToolSession]) -> None:
        """Open all sources for an episode, at the same time. Raises EpisodeError.

        opened: gets the session of each tool, by name, also if another source fails.
        """

        async def open_source(listed: tuple[ToolSource, Sequence[ToolSchema]]) -> None:
            source, tools = listed
            if tools:
                session = await source.open(deadline)
                opened.update((get_tool_name(tool), session) for tool in tools)

        sources = await self._list_by_source(deadline)
        await map_concurrently(open_source, sources, most=len(sources))


def _make_source(config: ToolConfig) -> ToolSource:
    if config.kind == PYTHON:
        return PythonTools(config, kept_chars=EnvironmentConfig.max_reply_chars)
    # Here, because the package takes more than a second to import.
    name = "streamrl.environments.tool_sources.mcp_tools"
    mcp_tools = import_optional(name, setting=config.label, extra="mcp")
    source: ToolSource = mcp_tools.McpTools(config)
    return source


class ToolEnvironment(UserEnvironment):
    """Environment that ends when the policy replies without a call.

    A call that fails is answered by a text that says why: it is a fault of the policy, which learns
    from it. After `max_malformed` replies in a row without a valid call, the episode ends.

    sources: tools besides the methods of the class.
    """

    def __init__(
        self,
        user_class: UserClass,
        settings: EnvironmentConfig,
        host_calls: HostCalls,
        sources: ToolSources,
    ) -> None:
        super().__init__(user_class, settings, host_calls)
        self._sources = sources
        methods = MethodTools(self)
        self._tools: dict[str, ToolSession] = {
            get_tool_name(tool): methods for tool in self.description.tools
        }
        self._num_malformed = 0

    async def reset(self, prompt: Prompt, seed: int) -> ResetResult:
        """Reset the object, and open the other tools for the episode. Raises EpisodeError, too."""
        deadline = asyncio.get_running_loop().time() + self._settings.turn_timeout_s
        start = await super().reset(prompt, seed)
        await self._sources.open(deadline, self._tools)
        return replace(start, tools=await self._sources.list_tools(deadline))

    async def step(self, reply: Reply) -> EnvironmentStep:
        if not reply.calls:
            return EnvironmentStep(done=True)
        is_valid = any(call.outcome is CallOutcome.OK for call in reply.calls)
        self._num_malformed = 0 if is_valid else self._num_malformed + 1
        answers = await self._run_calls(reply.calls)
        texts = [answer.text for answer in answers]
        messages = [
            {"role": "tool", "tool_call_id": make_call_id(i), "name": call.name, "content": text}
            for i, (call, text) in enumerate(zip(reply.calls, texts, strict=True))
        ]
        is_malformed = self._num_malformed >= self._settings.max_malformed
        async with asyncio.timeout(self._settings.turn_timeout_s):
            state = await self.read_state()
        return EnvironmentStep(
            messages,
            reward=self.to_float("call_tool", sum(answer.reward for answer in answers)),
            done=is_malformed or any(answer.done for answer in answers),
            outcomes=[answer.outcome for answer in answers],
            state=state,
        )

    async def _run_calls(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        """Run calls one after the other; return their answers."""
        # Many slow calls are the policy's doing: the turn's deadline ends them, not the episode.
        deadline = asyncio.get_running_loop().time() + self._settings.turn_timeout_s
        return [await self._run_call(call, deadline) for call in calls]

    async def _run_call(self, call: ToolCall, deadline: float) -> ToolAnswer:
        """Run a call. deadline: of the turn, s of the event loop's clock."""
        if call.outcome is not CallOutcome.OK:
            return ToolAnswer(call.error, call.outcome)
        tool = self._tools[call.name]
        try:
            async with asyncio.timeout_at(deadline):
                async with asyncio.timeout(self._settings.call_timeout_s):
                    answer = await tool.call(call.name, call.arguments)
        except TimeoutError:
            limit_s = self._settings.call_timeout_s
            if tool.url and await is_silent(tool.url):
                reason = f"no result of {call.name} in {limit_s:g} s, and no answer to others"
                raise EpisodeOutageError(f"{tool.url}: {reason}") from None
            note = f"; {tool.timeout_note}" if tool.timeout_note else ""
            text = f"{call.name} timed out after {limit_s:g} s{note}"
            return ToolAnswer(text, CallOutcome.TIMED_OUT)
        max_chars = self._settings.max_reply_chars
        text, _ = cut_middle(answer.text, max_chars, num_missing=answer.num_missing)
        # join() makes a plain str: the pool does not unpickle str subclasses of the user.
        return replace(answer, text="".join((text, "")))

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await asyncio.gather(*(tool.close() for tool in set(self._tools.values())))


class MethodTools:
    """Methods of an environment's object, or tools of its server, as tools (ToolSession)."""

    timeout_note = url = ""

    def __init__(self, environment: UserEnvironment) -> None:
        self._environment = environment

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a method. Raises UserCodeError if it returns neither text nor JSON."""
        environment = self._environment
        if environment.description.serves_tools:
            answer: ToolAnswer = await environment.call("call_tool", name, arguments)
            return answer
        try:
            result = await environment.call(name, **arguments)
        except UserCodeError as error:
            if environment.is_hanging:
                # The object may be bound to its thread: not the policy's to learn from.
                raise UserCodeError(
                    f"{error}; an earlier call of the episode still runs in its thread, so this one"
                    " had another; keep calls below half of environment.turn_timeout_s, or raise it"
                ) from error
            assert error.__cause__ is not None
            if isinstance(error.__cause__, ServiceOutageError):
                raise
            text = format_tool_error(error.__cause__, environment.description.file)
            return ToolAnswer(text, CallOutcome.TOOL_ERROR)
        try:
            return ToolAnswer(format_tool_result(result))
        except TypeError as error:
            # A fault of the tool, which no other call would avoid: not the policy's to learn from.
            raise environment.make_result_error(name, result, "text or JSON") from error

    async def close(self) -> None:
        """Do nothing: the environment closes its object."""


class EnvironmentHost:
    """Sessions of a process. An idle session of an async class costs neither a thread nor a task.

    settings: of a single environment. Construction loads its class and raises ConfigError.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self._settings = settings
        name, spec = settings.single
        self._is_openenv = spec.kind == OPENENV_KIND
        self._class = load_user_class(spec, section=get_environment_section(name))
        self._sources = ToolSources(spec.tools, self._class.description.tools)
        self._calls = HostCalls()
        self._sessions: dict[int, UserEnvironment] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}

    async def __call__(self, request: HostRequest) -> HostResponse:
        try:
            response = HostResponse(await self._run_operation(request))
        except TimeoutError:
            name = f"{self._class.description.name}.{request.operation.value}"
            timeout_s = self._settings.turn_timeout_s
            if request.operation is HostOperation.CLOSE:
                timeout_s = CLOSE_TIMEOUT_S
            error = f"{name} in {self._class.description.file}: no result in {timeout_s:g} s"
            response = HostResponse(error=error, is_timeout=True)
        except (UserCodeError, EpisodeError, ConfigError) as error:
            is_refused = isinstance(error, ConfigError)
            is_refused &= request.operation is HostOperation.DESCRIBE
            is_outage = any(isinstance(e, ServiceOutageError) for e in (error, error.__cause__))
            response = HostResponse(
                error=str(error), is_outage=is_outage, is_config_error=is_refused
            )
        return replace(response, num_hanging=len(self._calls.hanging.running))

    async def _run_operation(self, request: HostRequest) -> Any:
        session_id, arguments = request.session_id, request.arguments
        if request.operation is HostOperation.DESCRIBE:
            return await self._describe()
        if request.operation is HostOperation.CLOSE:
            return await self._close_session(session_id)
        if request.operation is HostOperation.RESET:
            prompt, seed, *served = arguments
            self._adopt_tools(*served)
            arguments = (prompt, seed)
            self._sessions[session_id] = self._make_environment()
        environment = self._sessions[session_id]
        task = asyncio.current_task()
        assert task is not None
        self._running[session_id] = task
        try:
            return await getattr(environment, request.operation.value)(*arguments)
        finally:
            del self._running[session_id]

    async def _describe(self) -> EnvironmentDescription:
        """Return the description of the class with the tools of all sources."""
        await self._sources.check()
        deadline = asyncio.get_running_loop().time() + self._settings.turn_timeout_s
        if self._is_openenv:
            openenv: Any = self._class.class_object
            async with asyncio.timeout_at(deadline):
                self._adopt_tools(await openenv.list_tools(**self._class.options))
        tools = await self._sources.list_tools(deadline)
        return replace(self._class.description, tools=tools)

    def _adopt_tools(self, tools: Sequence[ToolSchema] = ()) -> None:
        """Offer the tools that a server of OpenEnv has listed, if any, in place of turns."""
        if tools:
            known = self._class.description
            known = replace(known, has_step=False, tools=tools, serves_tools=True)
            self._class = replace(self._class, description=known)
            self._sources = ToolSources((), tools)

    def _make_environment(self) -> UserEnvironment:
        if self._class.description.has_step:
            return TurnEnvironment(self._class, self._settings, self._calls)
        return ToolEnvironment(self._class, self._settings, self._calls, self._sources)

    async def _close_session(self, session_id: int) -> None:
        """Give up the operation that the session is in, if any, and close the session."""
        environment = self._sessions.pop(session_id, None)
        running = self._running.get(session_id)
        if running is not None:
            running.cancel()
            await asyncio.wait({running}, timeout=2 * CANCEL_TIMEOUT_S)
        if environment is not None:
            await environment.close()


def import_optional(module: str, *, setting: str, extra: str) -> ModuleType:
    """Import a module that imports a package which an extra of streamrl installs.

    setting: setting that needs it, as key=value. Raises ConfigError that names the extra if the
    package, or what the module takes from it, is missing; the error of an import within streamrl
    stays as it is.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").startswith("streamrl"):
            raise
        raise ConfigError(f"{setting}: {error}; run pip install 'streamrl[{extra}]'") from error
