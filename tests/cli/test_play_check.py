"""`streamrl play --check`: lines of findings, and the exit code."""

import pytest

from streamrl.cli.main import main
from tests.environments.hosts.user_files import CALCULATOR, GUESS


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Run the command on an environment's source; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(source, *words):
        (tmp_path / "mine.py").write_text(source)
        code = main(["play", "mine.py", "--check", *words])
        return code, *capsys.readouterr()

    return run


def test_an_environment_that_raises_at_nonsense_fails(check):
    code, out, _ = check(GUESS, "--rows", "1")
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("ok    class        Guess in ")
    assert lines[1].startswith("fail  silent       1 of 1 episodes failed, uid 0:0:0 after 0 turns")


def test_findings_on_tools_are_printed(check, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "17*23", "ground_truth": "391"}\n' * 3)
    code, out, _ = check(CALCULATOR, "--data", "rows.jsonl", "--rows", "2")
    assert code == 0
    assert "\nok    tool         multiply(a: integer, b: integer): Multiply two numbers.\n" in out
    assert "ok    silent       2 episodes, 1.0 turns, scores 0 to 0" in out


def test_a_config_may_consist_of_the_environment_alone(check, tmp_path):
    (tmp_path / "mine.yaml").write_text("environment: {max_turns: 2}")
    patient = GUESS.replace("int(reply.text)", "64")
    code, out, _ = check(patient, "--config", "mine.yaml", "--rows", "1")
    assert code == 0
    assert "ok    silent       1 episodes, 2.0 turns" in out
    (tmp_path / "mine.yaml").write_text("environment: {turn_timeouts: 7}")
    code, out, error = check(CALCULATOR, "--config", "mine.yaml")
    assert (code, out) == (2, "")
    assert "the nearest key is environment.turn_timeout_s" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "--rows=0: must be at least 1"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--config", "none.yaml"], "none.yaml"),
    ],
)
def test_bad_input_is_refused_with_one_line(check, words, message):
    code, out, error = check(GUESS, *words)
    assert (code, out) == (2, "")
    assert message in error and error.count("\n") == 1
