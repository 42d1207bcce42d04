"""Recorded rollouts on a terminal."""

import contextlib
import io
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streamrl.cli.episodes import print_groups
from streamrl.files.printable_text import make_printable
from streamrl.telemetry.rollout_log import RecordedGroup, RecordedRollout, RecordedTurn
from tests.telemetry.recorded import make_group, make_guess

WON, LOST = make_guess("50", score=1.0), make_guess("80", score=0.0, answer="lower")


def show(groups: Sequence[RecordedGroup]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        print_groups(groups)
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


@given(st.text(st.characters()))
def test_no_text_can_command_the_terminal_or_fail_to_print(text: str):
    printable = make_printable(text)
    printable.encode()
    assert all(c.isprintable() or c in "\n\t" or ord(c) > 0x9F for c in printable)
    assert len(printable) == len(text)
    assert "\x1b" not in show([make_group([RecordedRollout(text, 0.0)], uid=text)])
