"""Interface between a tool environment and the sources of its tools.

ToolSource --open--> ToolSession      an episode's side of a source
ToolSession.call(name, arguments) -> ToolAnswer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.environments.interface import CallOutcome, ToolSchema


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
        ...

    async def close(self) -> None:
        """End everything that the episode has started."""
        ...


class ToolSource(Protocol):
    """Tools that an entry of environment.tools brings, for all episodes of a host process.

    label: name of the entry, for errors.
    """

    label: str

    async def check(self) -> None:
        """Raise ConfigError if the tools cannot run on this machine."""
        ...

    async def list_tools(self, deadline: float) -> Sequence[ToolSchema]:
        """Return the schemas of the tools. Raises ConfigError and EpisodeError.

        deadline: s of the event loop's clock.
        """
        ...

    async def open(self, deadline: float) -> ToolSession:
        """Return the tools of a new episode. Raises EpisodeError.

        deadline: s of the event loop's clock.
        """
        ...
