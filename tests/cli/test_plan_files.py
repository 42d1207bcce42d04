"""Files that `streamrl plan` and `streamrl simulate` read and write; bounds of their numbers."""

from pathlib import Path

import pytest

from tests.cli.test_plan import GRPO, SMALL, STEP, refusal

RUN_ARGS = [GRPO, *STEP, "--model", "qwen2.5-1.5b", "--prompt-tokens", "200"]
OPTIONS = {
    "--lengths": (["plan"], "--lengths"),
    "--constants": (["plan"], "constants"),
    "--placement": (["simulate"], "--placement"),
}


def refused(capsys: pytest.CaptureFixture[str], option: str, path: Path | str) -> str:
    """Return the part of the error after the file name."""
    (command,), name = OPTIONS[option]
    error = refusal(capsys, command, *RUN_ARGS, "--cluster", "8xH100", option, str(path))
    assert f"{name} {path}: " in error
    return error.split(f"{path}: ")[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1e400, 3]", "inf: must be a whole number"),
        ("[3.7, 5]", "3.7: must be a whole number"),
        ("[true]", "True: must be a whole number"),
        ("[[1]]", "[1]: must be a whole number"),
        ("1 2 x", "'x': must be a whole number"),
        ("[0]", "0: must be a whole number, at least 1"),
        ("[]", "must contain at least one length"),
        ("[1,", "Expecting value"),
        ("[" + "9" * 400 + "]", "must be a whole number"),
        ("3 13", "13 tokens: must be at most generator.max_new_tokens=12"),
    ],
)
def test_a_malformed_lengths_file_is_a_one_line_error(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "lengths"
    path.write_text(content)
    words = ["--cluster", "8xH100", "--model", "qwen2.5-1.5b", "--prompt-tokens", "20"]
    error = refusal(capsys, "plan", GRPO, *words, "--lengths", str(path))
    assert f"--lengths {path}: " in error and message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", ": must be a mapping"),
        ("3", ": must be a mapping"),
        ('{"calls": {"train": 3}}', ".calls.train: must be a mapping"),
        ("{", ": Expecting property name"),
    ],
)
def test_a_malformed_placement_file_is_a_one_line_error(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "plan.json"
    path.write_text(content)
    error = refusal(capsys, "simulate", *SMALL[:-2], "--placement", str(path))
    assert f"--placement {path}{message}" in error


def test_an_unwritable_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    nowhere = str(tmp_path / "no" / "plan.yaml")
    assert f"-o {nowhere}: No such file" in refusal(capsys, "plan", *SMALL, "-o", nowhere)
    assert not list(tmp_path.iterdir())


HUGE = "pipeline.groups_per_step=10000000"


def test_a_simulation_of_hours_is_refused_before_it_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    factors = "pipeline.groups_per_step=10000000, algorithm.group_size=8: about"
    rule = "h to simulate; the limit is 1 h\n"
    error = refusal(capsys, "plan", *SMALL, HUGE)
    assert f" {factors} " in error and error.endswith(rule)
    error = refusal(capsys, "simulate", *SMALL[:-2], HUGE, "--steps", "2")
    assert f" --steps 2, {factors} " in error and error.endswith(rule)
    overrides = ["pipeline.groups_per_step=4096", "--steps", "10000"]
    error = refusal(capsys, "simulate", *SMALL[:-2], *overrides)
    assert "--steps 10000, pipeline.groups_per_step=4096, algorithm.group_size=8: about" in error
    assert "must be from 1 to 10000" in refusal(
        capsys, "simulate", *SMALL[:-2], "--steps", "10000000"
    )
    # The size of a full simulation is only known after planning.
    monkeypatch.setattr("streamrl.cli.arguments.planner_args.HOUR_S", 0.1)
    monkeypatch.setattr("streamrl.cli.plan.run_quick_simulation", None)
    groups = "pipeline.groups_per_step=64"
    error = refusal(capsys, "plan", *SMALL, groups, "--max-staleness", "0")
    assert "pipeline.groups_per_step=64, algorithm.group_size=8: about" in error


LONG = "x" * 300


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/proc/plan.yaml", ""),
        (f"{{tmp}}/{LONG}.yaml", "File name too long"),
        # An unfinished file has a longer temporary name.
        (f"{{tmp}}/{LONG[:245]}.yaml", "File name too long"),
        ("{tmp}/folder.yaml", "not a file"),
        ("{tmp}/none/plan.yaml", "No such file or directory"),
    ],
)
def test_an_unwritable_output_file_is_refused_before_reading(
    path: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "folder.yaml").mkdir()
    output_path = Path(path.format(tmp=tmp_path))
    error = refusal(capsys, "plan", "nowhere.yaml", "--cluster", "8xH100", "-o", str(output_path))
    assert f"-o {output_path}: {reason}" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.yaml"]


def test_a_depth_beyond_the_planners_limit_is_refused(capsys: pytest.CaptureFixture[str]):
    ahead = ["pipeline.depth=65", "pipeline.on_stale=drop"]
    error = refusal(capsys, "simulate", *SMALL[:-2], *ahead, "--steps", "1")
    assert "depth=65: must be at most 64 steps ahead" in error
