"""`streamrl play`: a person or a function plays an episode in the terminal; a check."""

import io
import json

import pytest

from streamrl.cli.main import main
from tests.descendants import descendants
from tests.environments.hosts.user_files import CALCULATOR, GUESS


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """Run the command in a folder of user files, with typed lines; return code, out and err."""
    for name, source in (("guess", GUESS), ("calculator", CALCULATOR)):
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "first"}\n{"prompt": "17*23"}\n')
    monkeypatch.chdir(tmp_path)

    def run(*words, typed=""):
        before = descendants()
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code = main(["play", *words])
        assert not descendants() - before, "a process of the environment is left"
        return code, *capsys.readouterr()

    return run


def test_a_person_calls_tools_and_answers(play):
    typed = 'multiply(a=17, b="x")\nmultiply(a=17, \\\nb=23)\n391\n'
    code, out, _ = play("calculator.py", "--prompt", "17*23", "--truth", "391", typed=typed)
    assert code == 0
    assert out.splitlines()[1:] == [
        "tools:",
        "  multiply(a: integer, b: integer): Multiply two numbers.",
        'Call a tool as name(argument="value"); any other text answers and ends the episode.',
        "user> 17*23",
        'you> multiply(a=17, b="x")',
        "  call multiply: wrong_arguments",
        "tool multiply> wrong arguments for multiply: b: 'x' is not of type 'integer'",
        "you> multiply(a=17, \\",
        "     b=23)",
        "  call multiply: ok",
        "tool multiply> 391",
        "you> 391",
        "end: stop after turn 3; rewards 0, 0, 0; score 1",
    ]


def test_the_end_of_the_input_ends_the_episode_without_a_score(play):
    code, out, error = play("guess.py", "--data", "rows.jsonl", "--row", "1", typed="99\n")
    assert (code, error) == (0, "")
    assert "user> 17*23\nuser> 0-63\nyou> 99\nuser> <\n" in out
    assert out.endswith("\nended before the environment did: no score\n")


def test_an_interrupt_while_typing_ends_the_episode(play, monkeypatch):
    def interrupt(label):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    code, _, error = play("guess.py")
    assert (code, error) == (130, "streamrl: interrupted\n")


def test_the_row_names_its_environment_among_those_of_a_recipe(play, tmp_path):
    named = {"guess": {"path": "guess.py"}, "calculator": {"path": "calculator.py"}}
    recipe = {
        "model": {"path": "m"},
        "data": {"train": "named.jsonl"},
        "rewards": [{"kind": "exact"}],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps({**recipe, "environment": {"named": named}}))
    rows = [
        {"prompt": "Guess.", "environment": "guess"},
        {"prompt": "17*23", "environment": "calculator", "ground_truth": "391"},
    ]
    (tmp_path / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = play("--config", "recipe.yaml", "--row", "1", typed="391\n")
    assert code == 0 and "multiply(a: integer, b: integer)" in out and "score 1" in out
    _, out, _ = play("--config", "recipe.yaml", typed="99\n")
    assert "tools:" not in out and "user> <" in out


def test_an_environment_that_raises_fails_the_command_with_its_line(play):
    code, _, error = play("guess.py", typed="seven\n")
    assert code == 1
    assert "Guess.step at" in error and "ValueError: invalid literal" in error


def test_a_check_of_an_environment_that_raises_at_nonsense_fails(play):
    code, out, _ = play("guess.py", "--check", "--rows", "1")
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("ok    class        Guess in ")
    assert lines[1].startswith("fail  silent       1 of 1 episodes failed, uid 0:0:0 after 0 turns")


def test_a_check_prints_findings_on_tools(play):
    code, out, _ = play("calculator.py", "--check", "--data", "rows.jsonl", "--rows", "2")
    assert code == 0
    assert "\nok    tool         multiply(a: integer, b: integer): Multiply two numbers.\n" in out
    assert "ok    silent       2 episodes, 1.0 turns, scores 0 to 0" in out


def test_a_config_of_a_check_may_consist_of_the_environment_alone(play, tmp_path):
    (tmp_path / "mine.yaml").write_text("environment: {max_turns: 2}")
    (tmp_path / "patient.py").write_text(GUESS.replace("int(reply.text)", "64"))
    code, out, _ = play("patient.py", "--check", "--config", "mine.yaml", "--rows", "1")
    assert code == 0 and "ok    silent       1 episode, 2.0 turns" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "environment.path=none.py: no such file"),
        (["guess.py", "--row", "1"], "--row=1: needs a prompt file; give --data"),
        (["guess.py", "--row", "-1"], "--row: -1: must be a whole number, at least 0"),
        (["guess.py", "--data", "rows.jsonl", "--row", "2"], "rows.jsonl: has no row 2"),
        (["guess.py", "--truth", "1"], "--truth=1: needs --prompt"),
        (["guess.py", "--rows", "2"], "--rows: has no effect without --check"),
        (["guess.py", "--check", "--seed", "2"], "--seed: has no effect with --check"),
        (["guess.py", "--split", "x"], "--split=x has no effect"),
        (["guess.py", "--prompt", "x", "--row", "0"], "--prompt: gives the row itself"),
        (["guess.py", "--check", "--rows", "0"], "--rows: 0: must be a whole number, at least 1"),
        (["guess.py", "--check", "--config", "bad.yaml"], "key is environment.turn_timeout_s"),
    ],
)
@pytest.mark.usefixtures("play")
def test_bad_input_is_refused_with_one_line(refuse, tmp_path, words, message):
    (tmp_path / "bad.yaml").write_text("environment: {turn_timeouts: 7}")
    assert message in refuse("play", *words)
