"""Argument types: an empty word is refused, and never means the working directory."""

import pytest

from tests.cli.test_plan import GRPO, refusal

PLAN_ARGS = [GRPO, "--cluster", "8xH100"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["plan", GRPO, "--cluster", ""], "--cluster"),
        (["plan", "", "--cluster", "8xH100"], "CONFIG"),
        (["plan", *PLAN_ARGS, "-o", ""], "-o"),
        (["simulate", *PLAN_ARGS, "--placement", ""], "--placement"),
        (["report", ""], "RUN"),
        (["train", "--resume", ""], "--resume"),
        (["evaluate", "model", "--data", ""], "--data"),
        (["data", "check", ""], "FILE"),
        (["score", "", "--completions", "rows"], "ROWS"),
    ],
)
def test_an_empty_argument_is_refused_in_one_line(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
):
    error = refusal(capsys, *words)
    assert f"{option}" in error.split(":")[1] and ": must not be empty" in error


@pytest.mark.parametrize("command", [["calibrate"], ["report"], ["report", "--ledger"]])
def test_an_impossible_file_name_is_not_a_run(
    command: list[str], capsys: pytest.CaptureFixture[str]
):
    error = refusal(capsys, *command, "x" * 400)
    assert error.endswith((": no run: no such directory\n", ": not a run: no such directory\n"))


def test_an_impossible_file_name_is_not_a_model(capsys: pytest.CaptureFixture[str]):
    error = refusal(capsys, "plan", *PLAN_ARGS, "--prompt-tokens", "9", "--model", "x" * 400)
    assert "neither a known model name" in error
