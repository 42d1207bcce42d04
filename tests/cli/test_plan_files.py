"""Files and numbers that `streamrl plan` and `streamrl simulate` read: all of them are bounded."""

import os
from pathlib import Path

import pytest

from streamrl.cli.output.output_files import check_output_dir, check_output_file
from tests.cli.test_plan import GRPO, SMALL, STEP, refusal

PLACED = [GRPO, *STEP, "--model", "qwen2.5-1.5b", "--prompt-tokens", "200"]
OPTIONS = {
    "--lengths": (["plan"], "--lengths"),
    "--constants": (["plan"], "constants"),
    "--cluster": (["plan"], "cluster"),
    "--placement": (["simulate"], "--placement"),
}
NESTED = "[" * 20_000


def refused(capsys: pytest.CaptureFixture[str], option: str, path: Path | str) -> str:
    """What is said of the file, behind its name."""
    (command,), name = OPTIONS[option]
    own = ["--cluster", "8xH100"] if option != "--cluster" else []
    error = refusal(capsys, command, *PLACED, *own, option, str(path))
    assert f"{name} {path}: " in error
    return error.split(f"{path}: ")[1]


@pytest.mark.parametrize("option", list(OPTIONS))
def test_what_may_never_end_is_not_read(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for endless in ("/dev/zero", pipe):
        assert refused(capsys, option, endless) == "not a regular file\n"


@pytest.mark.parametrize("option", list(OPTIONS))
def test_a_huge_file_is_refused_by_its_size(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "MiB: must be at most that" in refused(capsys, option, path)


@pytest.mark.parametrize("option", list(OPTIONS))
def test_what_is_nested_without_end_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(NESTED)
    found = refused(capsys, option, path)
    assert found == "nested too deeply\n" or "exceeded maximum nesting depth" in found


@pytest.mark.parametrize("option", ["--constants", "--cluster", "--placement"])
def test_a_directory_is_no_file(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, option, tmp_path) == "is a directory\n"


def test_proposals_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "plan", *SMALL[:-1], "1000000000")
    assert "--proposals 1000000000: must be from 0 to 100000" in error


HUGE = "pipeline.groups_per_step=10000000"


def test_what_would_take_hours_is_refused_before_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = "pipeline.groups_per_step=10000000, algorithm.group_size=8: about"
    rule = "h to simulate: must be at most 1 h\n"
    error = refusal(capsys, "plan", *SMALL, HUGE)
    assert f" {factors} " in error and error.endswith(rule)
    error = refusal(capsys, "simulate", *SMALL[:-2], HUGE, "--steps", "2")
    assert f" --steps 2, {factors} " in error and error.endswith(rule)
    many = ["pipeline.groups_per_step=4096", "--steps", "10000"]
    error = refusal(capsys, "simulate", *SMALL[:-2], *many)
    assert "--steps 10000, pipeline.groups_per_step=4096, algorithm.group_size=8: about" in error
    assert "must be from 1 to 10000" in refusal(
        capsys, "simulate", *SMALL[:-2], "--steps", "10000000"
    )
    # What is played as a whole is known only when it is planned.
    monkeypatch.setattr("streamrl.cli.arguments.planner_args.HOUR_S", 0.1)
    monkeypatch.setattr("streamrl.cli.plan.run_quick_simulation", None)
    groups = "pipeline.groups_per_step=64"
    error = refusal(capsys, "plan", *SMALL, groups, "--max-staleness", "0")
    assert "pipeline.groups_per_step=64, algorithm.group_size=8: about" in error


def test_what_can_be_no_folder_is_told_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        error = refusal(capsys, "simulate", *SMALL[:-2], "-o", str(path), "--steps", "1")
        assert f"-o {path}: Not a directory" in error
    assert file.read_text() == "mine"


LONG = "x" * 300


@pytest.mark.parametrize(
    ("command", "path", "reason"),
    [
        ("plan", "/proc/plan.yaml", ""),
        ("plan", f"{{tmp}}/{LONG}.yaml", "File name too long"),
        # Until it is whole a file has a longer name.
        ("plan", f"{{tmp}}/{LONG[:245]}.yaml", "File name too long"),
        ("plan", "{tmp}/folder.yaml", "not a file"),
        ("plan", "{tmp}/none/plan.yaml", "No such file or directory"),
        ("simulate", "/proc/folder", ""),
        ("simulate", "/proc/folder/below", ""),
        ("simulate", f"{{tmp}}/{LONG}", "File name too long"),
        ("simulate", f"{{tmp}}/none/{LONG}", "File name too long"),
        ("simulate", "{tmp}/none/" + "below/" * 1000, "File name too long"),
    ],
)
def test_what_can_never_be_written_is_told_before_anything_is_read(
    command: str, path: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    place = Path(path.format(tmp=tmp_path))
    error = refusal(capsys, command, "nowhere.yaml", "--cluster", "8xH100", "-o", str(place))
    assert f"-o {place}: {reason}" in error
    assert [each.name for each in tmp_path.iterdir()] == ["folder.yaml"]


@pytest.mark.parametrize("path", ["deep/er/plan", "plan"])
def test_what_can_be_written_is_not_there_before_it_is(tmp_path: Path, path: str) -> None:
    check_output_dir("-o", tmp_path / path)
    check_output_file("-o", tmp_path / "plan.yaml")
    assert not list(tmp_path.iterdir())


def test_a_run_is_in_the_way_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    words = ["simulate", "nowhere.yaml", "--cluster", "8xH100", "-o", str(tmp_path)]
    assert f"{tmp_path} already holds a run" in refusal(capsys, *words)


def test_generation_is_no_further_ahead_than_can_be_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ahead = ["pipeline.depth=65", "pipeline.on_stale=drop", "queue.capacity_groups=100000"]
    error = refusal(capsys, "simulate", *SMALL[:-2], *ahead, "--steps", "1")
    assert "depth=65: must be at most 64 steps ahead" in error
