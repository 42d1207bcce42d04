"""Every command that README, docs and examples show exists; those that take seconds are run."""

import json
from pathlib import Path

import pytest

from streamrl.cli.main import main
from tests.calibration.runs import play, recipe, write_run
from tests.docs.commands import (
    PAGES,
    ROOT,
    Command,
    CommandError,
    all_commands,
    check,
    find_commands,
)
from tests.e2e.shared_runs import make_builds

SECONDS = ("doctor", "rewards", "algorithms", "graph", "data", "score", "report", "calibrate")
"""Subcommands that need neither a cluster nor an engine, nor minutes."""
COMMANDS = list(all_commands())


def is_run(command: Command) -> bool:
    """Whether a test runs this one: a whole command line that takes seconds, as it stands."""
    program, name, *_ = command.words
    return (
        program == "streamrl"
        and name in SECONDS
        and command.is_literal
        and not command.is_mention
        # Another page has this one with a machine of one's own.
        and "my.yaml" not in command.words
    )


RUN = list(dict.fromkeys(command for _, command in COMMANDS if is_run(command)))


def test_every_command_of_the_docs_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = []
    for page, command in COMMANDS:
        try:
            check(command)
        except CommandError as error:
            wrong.append(f"{page}: {error}")
    assert not wrong


def test_commands_are_found_on_the_pages_that_show_them() -> None:
    pages = {page for page, _ in COMMANDS}
    assert {"README.md", "docs/planning.md", "docs/queue.md", "examples/code/README.md"} <= pages
    assert len(COMMANDS) > 70 and len(pages) < len(PAGES)
    assert {command.words[1] for command in RUN} == set(SECONDS)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds the files that pages name, and the repository's."""
    make_builds([ROOT / "configs" / "grpo_arithmetic.yaml"])
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    rows = [{"prompt": f"{n}+1=", "ground_truth": str(n + 1)} for n in range(8)]
    outs = [{"index": n, "completion": str(n + 1)} for n in range(8)]
    for name, lines in (("rows.jsonl", rows), ("outs.jsonl", outs)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "my_reward.py").write_text(
        "def score(prompt, completion):\n    return float(completion == prompt.ground_truth)\n"
    )
    model = tmp_path / "path" / "to" / "a"
    model.mkdir(parents=True)
    (model / "model").symlink_to(ROOT / "examples" / "arithmetic" / "build" / "base_model")
    config = recipe(tmp_path)
    write_run(tmp_path / "runs" / "mine", config, play(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("command", RUN, ids=map(str, RUN))
def test_a_command_of_the_docs_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(command.words[1:])
    said = capsys.readouterr()
    # Whether a run could start here is a thing of the machine.
    assert code in ((0, 1) if command.words[1] == "doctor" else (0,)), said.err
    assert said.out.strip()


SHORT = {
    "plan": ["--gpus", "16", "--proposals", "60"],
    "simulate": ["--gpus", "16", "--steps", "4"],
}
"""With a smaller model, too: the two take a minute as they stand."""


@pytest.mark.slow
def test_the_plan_in_the_docs_is_made_and_simulated(workspace: Path) -> None:
    shown = find_commands((ROOT / "docs" / "commands.md").read_text())
    for name in SHORT:
        (command,) = [one for one in shown if one.words[:2] == ("streamrl", name)]
        words = [word.replace("qwen2.5-32b", "qwen2.5-7b") for word in command.words[1:]]
        assert main([*words, *SHORT[name]]) == 0
    assert (workspace / "plan.yaml").exists()
