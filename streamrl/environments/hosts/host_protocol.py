"""Settings of environment hosts, and the messages between the pool and its hosts.

pool --HostRequest--> host process (user's environment objects, one per session)
     <-HostResponse--
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from streamrl.environments.interface import ToolSchema
from streamrl.errors import ConfigError

CLOSE_TIMEOUT_S = 5.0
"""Deadline of a user's `close`, s."""


@dataclass(frozen=True)
class HostSettings:
    """Class of the environment, and limits of the processes that run it.

    path: file.py or file.py:Class.
    processes: processes that share the open sessions. With `isolate`, processes kept ready for the
        next sessions.
    turn_timeout_s: deadline of `reset`, of `step` and of `score`, each, s. Starting a process has a
        deadline of its own, because the user's file may import torch.
    call_timeout_s: deadline of a tool call, s. The policy reads that the call timed out.
    max_reply_chars: longest reply of a tool; the middle of a longer one is cut out.
    max_malformed: replies in a row without a valid call after which an episode ends.
    parallel_calls: calls of a reply that run concurrently, on the same environment object.
    memory_gib: memory limit of a process including its children, GiB.
    isolate: run each session in a process of its own, which is killed with the session.
    """

    path: str
    processes: int = 2
    turn_timeout_s: float = 60.0
    call_timeout_s: float = 30.0
    max_reply_chars: int = 16_000
    max_malformed: int = 3
    parallel_calls: int = 1
    memory_gib: float = 4.0
    isolate: bool = False

    def __post_init__(self) -> None:
        for key in ("processes", "max_reply_chars", "max_malformed", "parallel_calls"):
            if vars(self)[key] < 1:
                raise ConfigError(f"{key}={vars(self)[key]}: must be 1 or more")
        for key in ("turn_timeout_s", "call_timeout_s", "memory_gib"):
            if vars(self)[key] <= 0:
                raise ConfigError(f"{key}={vars(self)[key]}: must be above 0")

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


class EnvironmentShape(StrEnum):
    """Shape of a user's class: `step` answers replies, or other public methods are tools."""

    TURNS = "turns"
    TOOLS = "tools"


@dataclass(frozen=True)
class EnvironmentDescription:
    """Properties of a user's class, as checked when a host loads it.

    name: name of the class. file: resolved path of its file.
    tools: schemas of the tools; () for turns.
    has_score: the class has `score`; otherwise the score is the sum of the turns' rewards, which
        for tools is 0.
    """

    name: str
    file: str
    shape: EnvironmentShape
    tools: Sequence[ToolSchema] = ()
    has_score: bool = False

    @property
    def note(self) -> str:
        """Advice for a user whose episodes all have score 0; "" otherwise."""
        if self.has_score or self.shape is EnvironmentShape.TURNS:
            return ""
        return (
            f"{self.name} in {self.file} has no score(episode): its own score is 0 for every"
            " episode; rewards must come from other entries of rewards"
        )


class HostOperation(Enum):
    DESCRIBE = "describe"
    RESET = "reset"
    STEP = "step"
    SCORE = "score"
    CLOSE = "close"


@dataclass(frozen=True)
class HostRequest:
    """Operation on a session.

    arguments: of RESET prompt and seed, of STEP the Reply, of SCORE the EpisodeSummary.
    """

    operation: HostOperation
    session_id: int = 0
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class HostResponse:
    """Result of an operation.

    error: failure of the user's code; "" if there is none.
    is_timeout: the operation missed its deadline.
    num_hanging: calls of all sessions that still run although they were given up.
    """

    result: Any = None
    error: str = ""
    is_timeout: bool = False
    num_hanging: int = 0
