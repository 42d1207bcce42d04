"""Recorded rollouts as terminal output: the turns of each, siblings of a group side by side."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.files.printable_text import make_printable
from streamrl.telemetry.rollout_log import (
    PROMPT,
    SAMPLED,
    SCAFFOLD,
    RecordedGroup,
    RecordedRollout,
    RecordedTurn,
)

MIN_COLUMN_WIDTH = 56
_STYLES = {PROMPT: "dim", SAMPLED: "", "observation": "yellow"}


def print_groups(console: Console, groups: Sequence[RecordedGroup]) -> None:
    """Print groups; on a terminal, as many rollouts side by side as its width allows.

    Output to a file or pipe keeps its lines unbroken.
    """
    num_columns = max(1, console.width // MIN_COLUMN_WIDTH) if console.is_terminal else 1
    for number, group in enumerate(groups):
        blocks = [
            list(_describe_rollout(group, rollout, i))
            for i, rollout in enumerate(group.rollouts, start=1)
        ]
        rows = [
            _arrange_row(blocks[i : i + num_columns], num_columns)
            for i in range(0, len(blocks), num_columns)
        ]
        gap = [Text()] if number else []
        console.print(
            Group(*gap, *_describe_group(group), *rows), soft_wrap=not console.is_terminal
        )


def _arrange_row(blocks: Sequence[Sequence[Text]], num_columns: int) -> RenderableType:
    if num_columns == 1:
        return Group(Text(), *blocks[0])
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in range(num_columns):
        table.add_column(ratio=1, overflow="fold")
    table.add_row(*(Group(*block) for block in blocks))
    return Group(Text(), table)


def _describe_group(group: RecordedGroup) -> Iterator[Text]:
    mean = f"mean score {group.mean_score:.3g}"
    size = _count(len(group.rollouts), "rollout")
    environment = f", environment {group.environment}" if group.environment else ""
    title = f"step {group.step}, uid {group.uid}{environment}: {size}, {mean}"
    yield Text(make_printable(title), style="bold")
    if group.ground_truth not in (None, ""):
        yield Text(make_printable(f"ground truth: {group.ground_truth}"))
    prompt = _find_common_prompt(group)
    if prompt is not None:
        yield Text("prompt", style="bold")
        yield _indent(prompt, _STYLES[PROMPT])


def _find_common_prompt(group: RecordedGroup) -> str | None:
    """Return the prompt of all rollouts; None if they differ, as an environment's may."""
    rendered = {rollout.prompt_text for rollout in group.rollouts} - {None}
    if len(rendered) > 1:
        return None
    messages = "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in group.prompt)
    return next(iter(rendered), messages) or None


def _describe_rollout(
    group: RecordedGroup, rollout: RecordedRollout, number: int
) -> Iterator[Text]:
    relative = rollout.score - group.mean_score
    style = "green" if relative > 0 else "red" if relative < 0 else ""
    yield Text.assemble(
        (f"rollout {number} of {len(group.rollouts)}: ", "bold"),
        (f"score {rollout.score:.3g} (relative {relative:+.3g})", style),
        make_printable("".join(f", {fact}" for fact in _list_facts(rollout))),
    )
    turn_numbers = count(1)
    for index, turn in enumerate(rollout.visible_turns):
        is_shown_above = index == 0 and turn.source == PROMPT and _find_common_prompt(group)
        if turn.source == SCAFFOLD or is_shown_above:
            continue
        if index and turn.source == PROMPT:
            yield Text("new sample: the chat template rewrites earlier turns", style="bold")
        yield Text(make_printable(_describe_turn(turn, turn_numbers)), style="bold")
        yield _indent(turn.text, _STYLES.get(turn.source, ""))


def _list_facts(rollout: RecordedRollout) -> Iterator[str]:
    for name, score in rollout.components.items():
        value = "not judged" if score is None else f"{score:.3g}"
        yield f"{name} {value} ({rollout.verdicts.get(name, 'no verdict')})"
    if rollout.environment_score is not None:
        yield f"environment score {rollout.environment_score:.3g}"
    if rollout.finish_reason is not None:
        yield f"finish reason {rollout.finish_reason}"
    if rollout.version_range is not None:
        yield _format_versions(*rollout.version_range)


def _describe_turn(turn: RecordedTurn, numbers: Iterator[int]) -> str:
    size = "" if turn.tokens is None else f" ({_count(turn.tokens, 'token')})"
    if turn.source != SAMPLED:
        return f"{turn.source}{size}"
    if turn.tokens is None:
        return "completion"
    facts: list[Any] = [turn.outcome] if turn.outcome else []
    facts += [] if turn.reward is None else [f"reward {turn.reward:.3g}"]
    versions = [version for version, _ in turn.versions]
    facts += [_format_versions(min(versions), max(versions))] if versions else []
    return f"turn {next(numbers)}{size}: {', '.join(facts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _format_versions(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def _indent(text: str, style: str) -> Text:
    lines = make_printable(text).rstrip("\n").split("\n")
    return Text("\n".join(f"  {line}" for line in lines), style=style)
