"""Transcript of an episode on stdout: messages, calls with their outcomes, rewards, the end."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from streamrl.environments.hosts.host_protocol import HostOperation
from streamrl.environments.interface import (
    EnvironmentStep,
    Message,
    Reply,
    ResetResult,
    ToolCall,
)
from streamrl.environments.tool_calls.tool_signature import format_tool
from streamrl.files.printable_text import make_printable
from streamrl.messages import Columns, FinishReason, Prompt

CALL_HINT = 'Call a tool as name(argument="value"); any other text answers and ends the episode.'


class EpisodeTranscript:
    """Printer of what an episode's environment sees and answers (`EpisodeObserver`).

    has_person: the policy is a person, who needs no echo of the own turns.
    """

    def __init__(self, *, has_person: bool) -> None:
        self._has_person = has_person
        self._num_steps = 0

    def see(self, operation: HostOperation, arguments: Any, result: Any, seconds: float) -> None:
        if operation is HostOperation.RESET:
            self._print_start(arguments[0], result)
        elif operation is HostOperation.STEP:
            self._print_step(arguments[0], result)
        elif operation is HostOperation.SCORE:
            turns = [m for m in arguments[0].messages if m["role"] == "assistant"]
            # The environment does not see a turn that was cut at a limit.
            for turn in turns[self._num_steps :]:
                _print_line(f"policy> {turn['content']}")

    def _print_start(self, prompt: Prompt, start: ResetResult) -> None:
        if start.tools:
            _print_line("tools:")
            for tool in start.tools:
                _print_line(f"  {format_tool(tool)}")
            if self._has_person:
                _print_line(CALL_HINT)
        _print_messages([m for m in prompt.messages if m["content"]])
        _print_messages(start.messages)

    def _print_step(self, reply: Reply, step: EnvironmentStep) -> None:
        self._num_steps += 1
        if not self._has_person:
            if reply.text or not reply.calls:
                _print_line(f"policy> {reply.text}")
            for call in reply.calls:
                _print_line(f"policy> {format_call(call)}")
        for call, outcome in zip_longest(reply.calls, step.outcomes):
            _print_line(f"  call {call.name or '?'}: {outcome or call.outcome}")
        if step.reward:
            _print_line(f"  reward {step.reward:g}")
        _print_messages(() if step.done else step.messages)


def format_call(call: ToolCall) -> str:
    arguments = (f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def format_end(columns: Columns) -> str:
    """Format the end of the only episode of a group."""
    reason = FinishReason(int(columns["finish_reason"][0])).name.lower()
    rewards = ", ".join(f"{reward:g}" for reward in columns["turn_rewards"])
    turns = int(columns["num_turns"].sum())
    score = float(columns["environment_scores"][0])
    return f"end: {reason} after turn {turns}; rewards {rewards}; score {score:g}"


def _print_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        name = message.get("name") if message["role"] == "tool" else None
        _print_line(f"{' '.join(filter(None, (message['role'], name)))}> {_read_text(message)}")


def _read_text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _print_line(text: str) -> None:
    print(make_printable(text))
