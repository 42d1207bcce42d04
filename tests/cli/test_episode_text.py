"""Recorded rollouts on a terminal."""

import io
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamrl.cli.episodes import print_groups
from streamrl.files.printable_text import make_printable
from streamrl.telemetry.rollout_log import RecordedGroup, RecordedRollout, RecordedTurn
from tests.telemetry.drawing.recorded import make_group, make_guess

WON, LOST = make_guess("50", score=1.0), make_guess("80", score=0.0, answer="lower")


def show(groups: Sequence[RecordedGroup], **options: Any) -> str:
    output = io.StringIO()
    print_groups(Console(file=output, highlight=False, **options), groups)
    return output.getvalue()


def test_a_rollout_of_an_environment_is_shown_by_turns():
    group = make_group([WON, LOST], ground_truth="77", environment="guess")
    assert show([group]).splitlines()[:16] == [
        "step 4, uid 0:1:0, environment guess: 2 rollouts, mean score 0.5",
        "ground truth: 77",
        "prompt",
        "  <user>Guess.",
        "",
        "rollout 1 of 2: score 1 (relative +0.5), env 1 (pass), judge not judged (no verdict),"
        " environment score 1, finish reason stop, versions 3 to 4",
        "turn 1 (2 tokens): called, reward 0, version 3",
        "  50",
        "observation (1 token)",
        "  higher",
        "turn 2 (2 tokens): spoke, reward 1, versions 3 to 4",
        "  77",
        "",
        "rollout 2 of 2: score 0 (relative -0.5), env 0 (wrong), judge not judged (no verdict),"
        " environment score 0, finish reason stop, versions 3 to 4",
        "turn 1 (2 tokens): called, reward 0, version 3",
        "  80",
    ]


def test_a_rollout_without_an_environment_is_one_completion():
    assert show([make_group([RecordedRollout("4\n2", 1.0)])]).splitlines() == [
        "step 4, uid 0:1:0: 1 rollout, mean score 1",
        "prompt",
        "  user: Guess.",
        "",
        "rollout 1 of 1: score 1 (relative +0)",
        "completion",
        "  4",
        "  2",
    ]


def test_prompts_that_differ_are_shown_with_their_rollouts():
    turns = (RecordedTurn("prompt", "<user>Begin.", 3), *LOST.turns[1:])
    lines = show([make_group([WON, msgspec.structs.replace(LOST, turns=turns)])]).splitlines()
    assert lines[1:2] == [""]
    assert [line for line in lines if "<user>" in line] == ["  <user>Guess.", "  <user>Begin."]


def test_a_later_sample_begins_with_its_own_prompt():
    sample = (RecordedTurn("prompt", "<user>77.", 2), *WON.turns[1:2])
    split = msgspec.structs.replace(WON, turns=(*WON.turns, *sample))
    assert show([make_group([split, LOST])]).splitlines()[9:15] == [
        "turn 2 (2 tokens): spoke, reward 1, versions 3 to 4",
        "  77",
        "new sample: the chat template rewrites earlier turns",
        "prompt (2 tokens)",
        "  <user>77.",
        "turn 3 (2 tokens): called, reward 0, version 3",
    ]


def test_siblings_are_side_by_side_on_a_wide_terminal_and_in_color():
    text = show([make_group([WON, LOST])], force_terminal=True, width=150, color_system="standard")
    assert any("50" in line and "80" in line for line in text.splitlines())
    assert "\x1b[32m" in text
    narrow = show([make_group([WON, LOST])], force_terminal=True, width=80, color_system=None)
    assert not any("50" in line and "80" in line for line in narrow.splitlines())


def test_output_to_a_file_has_neither_color_nor_broken_lines():
    long = "x " * 500
    text = show([make_group([RecordedRollout(long, 0.0)])])
    assert long in text
    assert "\x1b" not in text


@given(st.text(st.characters()))
def test_no_text_can_command_the_terminal_or_fail_to_print(text: str):
    printable = make_printable(text)
    printable.encode()
    assert all(c.isprintable() or c in "\n\t" or ord(c) > 0x9F for c in printable)
    assert len(printable) == len(text)
    assert "\x1b" not in show([make_group([RecordedRollout(text, 0.0)], uid=text)])
