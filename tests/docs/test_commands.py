"""Every command that README, docs and examples show exists; commands of seconds are run."""

import json
from pathlib import Path

import pytest

from streamrl.cli.main import main
from tests.docs.commands import (
    PAGES,
    ROOT,
    Command,
    CommandError,
    all_commands,
    check,
)
from tests.e2e.shared_runs import make_builds
from tests.planner.calibration.runs import play, recipe, write_run

SECONDS = ("doctor", "config", "data", "score", "report", "calibrate")
"""Subcommands that need neither a cluster nor an engine, nor minutes."""
COMMANDS = list(all_commands())


def is_run(command: Command) -> bool:
    """Return whether a test runs this command: a whole command line that takes seconds."""
    program, name, *_ = command.words
    is_short = program == "streamrl" and name in SECONDS and "my.yaml" not in command.words
    return is_short and command.is_literal and not command.is_mention


RUN = list(dict.fromkeys(command for _, command in COMMANDS if is_run(command)))


def test_every_command_of_the_docs_exists(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    errors = []
    for page, command in COMMANDS:
        try:
            check(command)
        except CommandError as error:
            errors.append(f"{page}: {error}")
    assert not errors


def test_commands_of_all_kinds_of_pages_are_checked_and_run():
    pages = {page for page, _ in COMMANDS}
    assert {"README.md", "docs/planning.md", "docs/queue.md", "examples/code/README.md"} <= pages
    assert len(COMMANDS) > 70 and len(pages) < len(PAGES)
    assert {command.words[1] for command in RUN} == set(SECONDS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that pages name, and the repository's."""
    tmp_path = tmp_path_factory.mktemp("workspace")
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
    (tmp_path / "runs" / "demo").symlink_to("mine")
    return tmp_path


@pytest.fixture
def workspace(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("command", RUN, ids=map(str, RUN))
def test_a_command_of_the_docs_runs(command: Command, capsys: pytest.CaptureFixture[str]):
    code = main(command.words[1:])
    captured = capsys.readouterr()
    # Doctor's verdict depends on the machine.
    assert code in ((0, 1) if command.words[1] == "doctor" else (0,)), captured.err
    assert captured.out.strip()
