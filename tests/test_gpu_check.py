"""scripts/gpu_check.py in its shortest form: on a CPU."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from tests.rank_checks import RANK_CHECKS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_gpu_check_passes_on_a_cpu(tmp_path: Path):
    out = tmp_path / "lines.jsonl"
    script = str(ROOT / "scripts" / "gpu_check.py")
    command = [sys.executable, script, "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["step"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert len(lines) == len(out.read_text().splitlines()) > 10
    assert "skipped" in lines["nccl"]["cases"]["all"]
    generators = lines["generator"]["cases"].values()
    compared = [version["compared"] for case in generators for version in case["versions"]]
    assert len(compared) == 2 * len(gpu_check.GENERATOR_RANKS) and min(compared) > 0
    for name, check in RANK_CHECKS.items():
        world = check.choose_world(gpu_check.CPU_RANKS)
        ranks = {case.get("ranks") for case in lines[name]["cases"].values()}
        assert ranks == {world or None}, name


@pytest.mark.slow
def test_rank_checks_of_four_ranks_pass_with_gloo(tmp_path: Path):
    """The one of those above that two ranks cannot run."""
    script, out = str(ROOT / "scripts" / "gpu_check.py"), tmp_path / "lines.jsonl"
    command = [sys.executable, script, "--device", "cpu", "--out", str(out), "--ranks", "4"]
    command += ["--steps", "resharding"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_resuming_runs_only_the_steps_without_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out, ran = tmp_path / "lines.jsonl", list[str]()

    def run_step(name: str, device: str) -> dict[str, object]:
        ran.append(name)
        return {"step": name, "ok": True}

    failed = {"step": "losses", "ok": False}
    out.write_text('{"step": "machine", "ok": true}\n' + json.dumps(failed) + '\n{"step": "spe')
    monkeypatch.setattr(gpu_check, "run_step", run_step)
    arguments = ["--device", "cpu", "--out", str(out), "--resume"]
    arguments += ["--steps", "machine,losses,speed"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert (ran, end.value.code) == (["speed"], 1)
    assert capsys.readouterr().out.splitlines()[-1] == "failed: losses"
    assert json.loads(out.read_text().splitlines()[-1])["step"] == "speed"


def test_calls_of_ten_minutes_run_all_steps_in_as_many_as_their_deadlines_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """If every step takes all of its time; what has never run comes in the first two."""
    now_s, out, calls = 0.0, tmp_path / "lines.jsonl", list[list[str]]()

    def run_step(name: str, device: str) -> dict[str, object]:
        nonlocal now_s
        now_s += gpu_check.STEPS[name].deadline_s
        calls[-1].append(name)
        return {"step": name, "ok": True}

    monkeypatch.setattr(gpu_check, "run_step", run_step)
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "count_devices", lambda device: 8)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now_s)
    arguments = ["gpu_check.py", "--out", str(out), "--minutes", "10", "--resume"]
    monkeypatch.setattr(sys, "argv", arguments)
    for _ in range(3):
        start_s = now_s
        calls.append([])
        with pytest.raises(SystemExit):
            gpu_check.main()
        assert now_s - start_s <= 600
    assert sorted(name for call in calls for name in call) == sorted(gpu_check.STEPS)
    assert {*RANK_CHECKS, "generator"} <= {*calls[0], *calls[1]}
    assert "left for --resume" not in capsys.readouterr().out.rpartition("{")[2]


def test_a_missing_package_is_named_and_other_cases_run(monkeypatch: pytest.MonkeyPatch):
    def import_missing() -> dict[str, object]:
        importlib.import_module("no_such_package.part")
        return {}

    cases = dict(gpu_check.run_cases({"a": import_missing, "b": lambda: {"ok": True}}))
    assert cases["a"]["skipped"] == "no_such_package is not installed"
    assert cases["b"]["ok"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device cuda --out lines.jsonl", "--device cuda: torch.cuda.is_available() is False"),
        ("--device cpu --out no/lines.jsonl", "--out no/lines.jsonl: No such file or directory"),
        ("--device cpu --out .", "--out .: Is a directory"),
        ("--device cpu --out lines.jsonl --steps machine,warp", "no step warp; there are machine"),
    ],
)
def test_gpu_check_refuses_bad_options_before_the_first_step(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words.split()])
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: False)
    monkeypatch.setattr(gpu_check, "run_step", lambda *_: pytest.fail("a step has run"))
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("full", ["make_trainer", "measure_pass"])
def test_a_model_whose_first_update_is_out_of_memory_is_reported_and_does_not_fail(
    full: str, monkeypatch: pytest.MonkeyPatch
):
    def run_out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 6 GiB")

    monkeypatch.setattr(gpu_check, "has_gpu", lambda: False)
    monkeypatch.setattr(gpu_check, "make_trainer", lambda *_, **__: None)
    monkeypatch.setattr(gpu_check, full, run_out_of_memory)
    ((name, measurements),) = gpu_check.check_memory("3B")
    assert name == "64 tokens, first update"
    assert measurements["error"] == "OutOfMemory: tried to allocate 6 GiB"
    assert measurements["expected_update"] > measurements["expected_held"] > 0
    assert measurements.get("ok", True)


def test_the_deadlines_of_gpu_check_sum_to_at_most_the_minutes_that_make_names():
    line = re.search(r"^gpu-check:.*at most (\d+) minutes", (ROOT / "Makefile").read_text(), re.M)
    assert line is not None
    assert sum(step.deadline_s for step in gpu_check.STEPS.values()) <= 60 * int(line[1])
