"""Messages between the pool and its hosts.

    pool --HostRequest--> host process
         <-HostResponse--

A host process has an object of the user's class per session.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from streamrl.environments.interface import ToolSchema

CLOSE_TIMEOUT_S = 5.0
"""Deadline of a user's `close`, s."""


@dataclass(frozen=True)
class EnvironmentDescription:
    """Properties of a user's class, as checked when a host loads it.

    name: name of the class. file: resolved path of its file; "" without a class.
    has_step: replies are answered by `step`; otherwise their calls, by tools.
    tools: schemas of the tools, those of environment.tools included; () for turns.
    has_score: the class has `score`; otherwise the score is the sum of the turns' rewards, which
        for tools is 0.
    has_state: the class has `state_key`, which names the state before a turn.
    has_oracle: the class has `oracle`, a policy that solves it, for `streamrl play --check`.
    serves_tools: the tools are those of a server of OpenEnv, which rewards calls.
    """

    name: str
    file: str
    has_step: bool
    tools: Sequence[ToolSchema] = ()
    has_score: bool = False
    has_oracle: bool = False
    has_state: bool = False
    serves_tools: bool = False

    @property
    def place(self) -> str:
        """Class and file, for messages."""
        return f"{self.name} in {self.file}" if self.file else self.name

    @property
    def note(self) -> str:
        """Advice for a user whose episodes all have score 0; "" otherwise."""
        if self.has_score or self.serves_tools or self.has_step:
            return ""
        return (
            f"{self.place} has no score(episode): its own score is 0 for every episode; rewards"
            " must come from other entries of rewards"
        )


class HostOperation(Enum):
    DESCRIBE = "describe"
    RESET = "reset"
    STEP = "step"
    SCORE = "score"
    ORACLE = "oracle"
    CLOSE = "close"


@dataclass(frozen=True)
class HostRequest:
    """Operation on a session.

    arguments: of RESET prompt, seed and the tools that a server has listed, if any; of STEP the
        Reply, of SCORE the EpisodeSummary, of ORACLE the messages of the episode.
    """

    operation: HostOperation
    session_id: int = 0
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class HostResponse:
    """Result of an operation.

    error: failure of the user's code; "" if there is none.
    is_timeout: the operation missed its deadline.
    is_outage: a server outside the run does not answer.
    is_config_error: the environment cannot be used, with any episode.
    num_hanging: calls of all sessions that still run although they were given up.
    """

    result: Any = None
    error: str = ""
    is_timeout: bool = False
    is_outage: bool = False
    is_config_error: bool = False
    num_hanging: int = 0
