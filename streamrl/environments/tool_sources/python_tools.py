"""The tool `python`, and the interface of all sources of tools besides a user's class.

ToolSource --open--> ToolSession      an episode's side of a source
ToolSession.call(name, arguments) -> ToolAnswer

`python` runs code in a sandbox of its episode, with variables that persist.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.environments.config import ToolConfig
from streamrl.environments.interface import CallOutcome, ToolSchema
from streamrl.errors import ConfigError, EpisodeError
from streamrl.user_code.pool.background_tasks import BackgroundTasks
from streamrl.user_code.sandbox.jail import JailError, JailSpec
from streamrl.user_code.sandbox.program import ProgramLimits
from streamrl.user_code.sandbox.sandbox import IsolationError, PythonSession, find_isolation


@dataclass(frozen=True)
class ToolAnswer:
    """Answer of a tool to a call.

    text: text for the policy; the environment cuts it.
    outcome: OK, TOOL_ERROR, or TIMED_OUT at a limit of the source's own.
    num_missing: characters that the source itself left out in the middle of `text`.
    reward, done: reward of the call, and whether it ends the episode.
    """

    text: str
    outcome: CallOutcome = CallOutcome.OK
    num_missing: int = 0
    reward: float = 0.0
    done: bool = False


class ToolSession(Protocol):
    """Tools of an episode.

    timeout_note: text for the policy after a call that timed out, on what it lost.
    url: address of the tools' server, if others run it; "" otherwise.
    """

    timeout_note: str
    url: str

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Run a call; one past its deadline is cancelled, and must not delay the next.

        Raises EpisodeError if the source fails through no fault of the policy.
        """

    async def close(self) -> None:
        """End everything that the episode has started."""


class ToolSource(Protocol):
    """Tools that an entry of environment.tools brings, for all episodes of a host process.

    label: name of the entry, for errors.
    """

    label: str

    async def check(self) -> None:
        """Raise ConfigError if the tools cannot run on this machine."""

    async def list_tools(self, deadline: float) -> Sequence[ToolSchema]:
        """Return the schemas of the tools. Raises ConfigError and EpisodeError.

        deadline: s of the event loop's clock.
        """

    async def open(self, deadline: float) -> ToolSession:
        """Return the tools of a new episode. Raises EpisodeError.

        deadline: s of the event loop's clock.
        """


PYTHON_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "python",
        "description": (
            "Run Python code; return what it prints and the value of its last expression."
            " Variables persist between calls. Only the standard library, no network."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}
LOST = "the session has ended: all variables are lost"


class PythonTools:
    """Source of the tool `python` (ToolSource).

    kept_chars: characters at each end of a long output that a session keeps.
    """

    def __init__(self, config: ToolConfig, *, kept_chars: int) -> None:
        self.label = config.label
        self._limits = ProgramLimits(memory_mib=config.memory_mib, cpu_s=config.cpu_s)
        self._kept_chars = kept_chars
        self._finding: asyncio.Task[JailSpec] | None = None
        self._numbers = itertools.count()

    async def check(self) -> None:
        try:
            await self._find_spec()
        except IsolationError as error:
            raise ConfigError(f"{self.label}: {error} or remove this tool") from None

    async def list_tools(self, deadline: float) -> Sequence[ToolSchema]:
        return (PYTHON_TOOL,)

    async def open(self, deadline: float) -> "PythonEpisode":
        return PythonEpisode(self)

    async def start_session(self) -> PythonSession:
        """Start an interpreter in a jail. Raises EpisodeError if this machine cannot."""
        try:
            spec = await self._find_spec()
            return await PythonSession.start(spec, next(self._numbers), kept_chars=self._kept_chars)
        except (IsolationError, JailError) as error:
            raise EpisodeError(f"{self.label}: {error}") from error

    async def _find_spec(self) -> JailSpec:
        """Choose the isolation once; calls that come meanwhile wait for the same result."""
        if self._finding is None or (self._finding.done() and self._finding.exception()):
            self._finding = asyncio.create_task(find_isolation(self._limits))
        # Shielded: the deadline of one call must not cancel the choice for the others.
        return await asyncio.shield(self._finding)


class PythonEpisode:
    """Session of an episode, started at its first call (ToolSession).

    Calls run one after the other, also those of one turn.
    """

    timeout_note, url = LOST, ""

    def __init__(self, source: PythonTools) -> None:
        self._source = source
        self._session: PythonSession | None = None
        self._lock = asyncio.Lock()
        self._killing = BackgroundTasks()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        async with self._lock:
            if self._session is None:
                self._session = await self._source.start_session()
            try:
                output = await self._session.run(arguments["code"])
            except asyncio.CancelledError:
                self._discard_session()
                raise
            text = output.text
            if output.is_over:
                self._discard_session()
                text = f"{text}\n{LOST}".lstrip("\n")
            outcome = CallOutcome.TOOL_ERROR if output.has_failed else CallOutcome.OK
            return ToolAnswer(text, outcome, output.num_left_out)

    def _discard_session(self) -> None:
        """Kill the session in the background; the next call starts a new one."""
        if self._session is not None:
            self._killing.spawn(self._session.kill())
            self._session = None

    async def close(self) -> None:
        self._discard_session()
        await self._killing.drain()
