"""Types that the driver of episodes, the environments and the renderer exchange.

    driver ---Reply---> environment      one sampled turn, decoded, with its tool calls
    driver <--EnvironmentStep--- environment  messages that the policy reads next, reward, end

An episode is one rollout of an environment. A turn is what the policy samples between two
observations. Environments see text and messages, never tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = Mapping[str, Any]
"""Chat message in OpenAI's form: role, content, and for tools tool_calls, tool_call_id, name."""
ToolSchema = Mapping[str, Any]
"""JSON schema of a tool in OpenAI's form: {"type": "function", "function": {...}}."""


@dataclass(frozen=True)
class Turn:
    """Answer of a user's environment to a reply of the policy.

    observation: text, which becomes a user message, or chat messages; ignored if `done`.
    reward: reward of the turn; the episode's score is the sum unless the environment has `score`.
    done: the episode ends here.
    """

    observation: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False


class CallOutcome(StrEnum):
    """Outcome of a tool call; every outcome but OK is reported to the policy as text."""

    OK = "ok"
    MALFORMED = "malformed"
    """The text of the call could not be parsed."""
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_ARGUMENTS = "wrong_arguments"
    """The arguments do not match the schema of the tool."""
    TOOL_ERROR = "tool_error"
    """The tool raised."""
    TIMED_OUT = "timed_out"


@dataclass(frozen=True)
class ToolCall:
    """Tool call in a sampled turn, as parsed.

    arguments: keyword arguments as written, {} for a malformed call. Only those of an OK call match
    the schema of the tool.
    error: for another outcome, the text to tell the policy.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    outcome: CallOutcome = CallOutcome.OK
    error: str = ""


@dataclass(frozen=True)
class Reply:
    """Sampled turn, decoded without special tokens.

    text: the turn without its tool calls; a malformed call stays in it, as written.
    calls: tool calls in the order in which they were written.
    is_cut: the turn ended at a length limit, not at a token that ends a turn.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    is_cut: bool = False


@dataclass(frozen=True)
class ResetResult:
    """First observation of an episode.

    messages: messages that follow those of the row; () to start from the row alone.
    tools: schemas of the tools that the policy may call.
    state: equal for equal states of the environment before the next turn; 0: unknown.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[ToolSchema] = ()
    state: int = 0


@dataclass(frozen=True)
class EnvironmentStep:
    """Observation after a turn.

    messages: messages that the policy reads before its next turn.
    outcomes: outcome of each call of the reply, after execution.
    state: as in `ResetResult`.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    outcomes: Sequence[CallOutcome] = ()
    state: int = 0


@dataclass(frozen=True)
class EpisodeSummary:
    """Finished episode as `score` sees it.

    messages: the whole conversation, the row's messages included.
    rewards: reward of each turn.
    finish_reason: name of the FinishReason, lower case.
    """

    messages: Sequence[Message]
    rewards: Sequence[float]
    finish_reason: str

    @property
    def answer(self) -> str:
        """Text of the policy's last turn; "" if there is none."""
        texts = [m["content"] for m in self.messages if m["role"] == "assistant"]
        return str(texts[-1] or "") if texts else ""
