"""Record of an episode: all that the environment answered, and how long it took."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.environments.hosts.host_protocol import HostOperation
from streamrl.environments.interface import CallOutcome, EnvironmentStep, Reply, ResetResult
from streamrl.messages import Prompt
from streamrl.user_code.checks import format_value


@dataclass
class EpisodeRecord:
    """Record of an episode, filled while it runs (`EpisodeObserver`).

    score: None without an end. error: failure that ended it; "" if
    none did. close_error: failure of `close` after its end.
    seconds: longest time of each operation. seed: that of the environment.
    """

    prompt: Prompt
    policy: str
    start: ResetResult = field(default_factory=ResetResult)
    replies: list[Reply] = field(default_factory=list)
    steps: list[EnvironmentStep] = field(default_factory=list)
    finish_reason: str = ""
    score: float | None = None
    error: str = ""
    close_error: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def place(self) -> str:
        """Where an episode stopped, in words."""
        if "reset" not in self.seconds:
            return "at its reset"
        return "at its score" if self.is_over else f"at turn {len(self.steps) + 1}"

    @property
    def advice(self) -> str:
        """What a user may do about the failure of an episode."""
        if "reset" not in self.seconds:
            return "a reset must succeed for every row"
        if self.is_over:
            return "score must judge every episode, also one without a turn"
        return "answer a bad reply by an observation or a low reward"

    @property
    def is_over(self) -> bool:
        """True if the environment or a limit of turns has ended the episode."""
        return bool(self.steps) and self.steps[-1].done

    def list_tool_errors(self) -> list[str]:
        """Return what the policy read of each call that raised."""
        return [
            message["content"]
            for step in self.steps
            for message, outcome in zip(step.messages, step.outcomes, strict=False)
            if outcome is CallOutcome.TOOL_ERROR
        ]

    def see(self, operation: HostOperation, arguments: Any, result: Any, seconds: float) -> None:
        if operation is HostOperation.RESET:
            self.start = result
        elif operation is HostOperation.STEP:
            self.replies += arguments
            self.steps.append(result)
        elif operation is HostOperation.SCORE:
            self.finish_reason, self.score = arguments[0].finish_reason, result
        else:
            return
        name = operation.value
        self.seconds[name] = max(seconds, self.seconds.get(name, 0.0))


def find_first_difference(first: EpisodeRecord, second: EpisodeRecord) -> str:
    """Return the first difference of two episodes, with its turn from 1; "" if they are equal."""
    if text := _describe("first observation", first.start.messages, second.start.messages):
        return text
    for number, (one, other) in enumerate(zip(first.steps, second.steps, strict=False), start=1):
        reply, other_reply = first.replies[number - 1], second.replies[number - 1]
        pairs: Sequence[tuple[str, Any, Any]] = (
            ("reply", reply.text, other_reply.text),
            ("calls", list(reply.calls), list(other_reply.calls)),
            ("observation", list(one.messages), list(other.messages)),
            ("reward", one.reward, other.reward),
            ("end", one.done, other.done),
            ("outcomes of calls", list(one.outcomes), list(other.outcomes)),
        )
        for name, *values in pairs:
            if text := _describe(f"turn {number}: {name}", *values):
                return text
    return _describe("number of turns", len(first.steps), len(second.steps)) or _describe(
        "score", first.score, second.score
    )


def _describe(name: str, first: Any, second: Any) -> str:
    return "" if first == second else f"{name}: {format_value(first)}, then {format_value(second)}"
