"""Device of a run: whether its models compute on GPUs or CPUs, decided once by the driver.

Ray's count of GPUs decides. The driver may be on a node without GPUs, so it and all workers read
the decision from the environment. A process that loads a model checks that torch agrees.

All other code asks this module for its device and for what only a GPU has. The functions import
torch, the module does not.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

GPU = "cuda"
"""torch's device type of GPUs."""
DEVICE_ENV = "STREAMRL_DEVICE"
"""Environment variable: device type of a run, cpu or cuda, for all of its processes."""
GPU_LIST = "/proc/driver/nvidia/gpus"
"""Folder with an entry per GPU of this node or container."""
NOSET_ENV = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment variable that keeps Ray from hiding the GPUs of other processes."""

NCCL_CONNECT_S = 15
"""Time for connecting the ranks of an NCCL group that broadcasts weights, s."""
NCCL_ENV = {
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(NCCL_CONNECT_S),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Environment of all processes of a run, as PyTorch reads it at the first use of NCCL. The timeout
concerns groups that connect without blocking. With dumps, the process's first group ends the
process some minutes after any of its groups has lost a peer."""


def has_local_gpu() -> bool:
    """Return whether torch finds a GPU that this process may use."""
    has_gpu: bool = _get_gpu_module().is_available()
    return has_gpu


def count_local_gpus() -> int:
    return _get_gpu_module().device_count() if has_local_gpu() else 0


def count_cores_per_gpu() -> int:
    """Return the cores that this process may use per GPU of its node, at least 1.

    Counts the GPUs that the driver lists: a process may see only its own.
    """
    num_gpus = len(os.listdir(GPU_LIST)) if os.path.isdir(GPU_LIST) else 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_gpus))


def find_smallest_gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU that this process may use; None without a GPU."""
    module, count = _get_gpu_module(), count_local_gpus()
    sizes = [module.get_device_properties(index).total_memory for index in range(count)]
    return min(sizes, default=None)


def list_gpu_names() -> list[str]:
    return [_get_gpu_module().get_device_name(index) for index in range(count_local_gpus())]


def get_local_device() -> "torch.device":
    """Return the device that this process computes on: its current GPU, or the CPU."""
    name = f"{GPU}:{_get_gpu_module().current_device()}" if has_local_gpu() else "cpu"
    device: torch.device = _get_torch().device(name)
    return device


def select_local_gpu(rank: int) -> None:
    """Make the GPU of a rank current; ranks beyond the number of GPUs share them."""
    if has_local_gpu():
        _get_gpu_module().set_device(rank % count_local_gpus())


def synchronize_device() -> None:
    """Wait for the GPU's queued work, so that another CUDA stream can use the results."""
    if has_local_gpu():
        _get_gpu_module().synchronize()


def synchronize_stream() -> None:
    """Wait for the GPU work of this thread's stream, so that another stream can use the results.

    Work of other streams may still be queued.
    """
    if has_local_gpu():
        get_current_gpu_stream().synchronize()


def has_gpu_context() -> bool:
    """Return whether this process has used a GPU. Does not import torch."""
    return sys.modules.get("torch") is not None and _get_gpu_module().is_initialized()


def release_cached_gpu_memory() -> None:
    """Return memory that torch caches to the GPU."""
    if has_gpu_context():
        _get_gpu_module().empty_cache()


def drain_peak_gpu_bytes() -> int | None:
    """Return the most bytes allocated on the GPU since the last call; None without a GPU."""
    if not has_local_gpu():
        return None
    peak: int = _get_gpu_module().max_memory_allocated()
    _get_gpu_module().reset_peak_memory_stats()
    return peak


def get_gpu_rng_state() -> "torch.Tensor | None":
    """Return the state of the GPU's random number generator; None without a GPU."""
    return _get_gpu_module().get_rng_state() if has_local_gpu() else None


def set_gpu_rng_state(state: "torch.Tensor | None") -> None:
    """Restore a state of `get_gpu_rng_state`; do nothing without a state or without a GPU."""
    if state is not None and has_local_gpu():
        _get_gpu_module().set_rng_state(state)


def get_rank_device(device: "torch.device", rank: int) -> "torch.device":
    """Return the device of a rank whose process is on the same node as `device`, of rank 0."""
    return device if device.index is None else _get_torch().device(device.type, device.index + rank)


def make_gpu_stream(device: "torch.device | None" = None) -> Any:
    """Return a new stream of a GPU, the current one by default, which no other stream delays."""
    return _get_gpu_module().Stream(device)


def get_current_gpu_stream() -> Any:
    """Return the stream to which this thread's GPU work goes."""
    return _get_gpu_module().current_stream()


def use_gpu_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context whose GPU work goes to this stream; None changes nothing."""
    return nullcontext() if stream is None else _get_gpu_module().stream(stream)


@contextmanager
def use_side_stream(stream: Any) -> Iterator[None]:
    """Context whose GPU work goes to this stream, and waits for none that is queued meanwhile.

    It waits for the work that is queued now on the thread's own stream. The end of the context
    waits for the side stream, so that other streams can use the results. None changes nothing.
    """
    if stream is None:
        yield
        return
    # A thread that has selected no GPU would find the stream of the first one.
    stream.wait_stream(_get_gpu_module().current_stream(stream.device))
    try:
        with use_gpu_stream(stream):
            yield
    finally:
        stream.synchronize()


def pin_host_memory(address: int, num_bytes: int) -> bool:
    """Pin memory that another allocator owns, for fast copies; return whether that succeeded.

    Call `unpin_host_memory` before the memory is unmapped. Fails without a GPU, and where the
    system limits locked memory. Source: CUDA's cudaHostRegister.
    """
    if not has_local_gpu():
        return False
    if int(_get_gpu_module().cudart().cudaHostRegister(address, num_bytes, 0)) == 0:
        return True
    # CUDA keeps the error, and the next operation of this thread would raise it.
    with suppress(RuntimeError):
        _get_torch().zeros(1, device=GPU)
    return False


def unpin_host_memory(address: int) -> None:
    """Unpin the memory that `pin_host_memory` pinned at this address."""
    _get_gpu_module().cudart().cudaHostUnregister(address)


def has_run_gpus() -> bool:
    """Return whether the models of the run compute on GPUs; without a run, those of this process.

    The answer may differ from `has_local_gpu` in the driver, and in actors without a model.
    """
    device = os.environ.get(DEVICE_ENV)
    return has_local_gpu() if device is None else device == GPU


def make_device_env(*, on_gpu: bool) -> dict[str, str]:
    """Return the environment variable that hands the decision to a process."""
    return {DEVICE_ENV: GPU if on_gpu else "cpu"}


@contextmanager
def override_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which this process, and those that it starts, have these environment variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def use_device(*, on_gpu: bool) -> AbstractContextManager[None]:
    """Context in which this process, the driver, belongs to a run on this device."""
    return override_environment(make_device_env(on_gpu=on_gpu))


def check_device(*, assigned_gpus: int = 0) -> None:
    """Raise ConfigError if this process, which loads a model, computes on another device.

    assigned_gpus: GPUs that Ray has assigned to this process; 0 if it has not, as in the driver.
    Then the process must see these only: CUDA's current device is a setting of each thread, and a
    thread without it computes on the first GPU that the process sees.
    """
    torch, count = _get_torch(), count_local_gpus()
    found = f"torch {torch.__version__} finds {count or 'none'} on {os.uname().nodename}"
    if has_run_gpus() and not count:
        fix = "`streamrl doctor` names the reason"
        if torch.version.cuda is None:
            fix = (
                "it is the CPU build: make install DEVICE=gpu, or hide the GPUs"
                " (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
            )
        raise ConfigError(f"the run computes on GPUs, but {found}: {fix}")
    if count and not has_run_gpus():
        raise ConfigError(
            f"the run computes on CPUs, since Ray counts no GPU, but {found}: start Ray there with"
            " --num-gpus, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    if assigned_gpus and count != assigned_gpus:
        raise ConfigError(
            f"this process has {assigned_gpus} of Ray's GPUs, but {found}: unset {NOSET_ENV} where"
            " Ray is started and where the run is, so that each process sees only its own"
        )


def _get_torch() -> Any:
    """Return torch, which the processes that never compute do not load."""
    import torch

    return torch


def _get_gpu_module() -> Any:
    return _get_torch().get_device_module(GPU)
