"""Device of a run: whether its models compute on GPUs or CPUs, decided once by the driver.

Ray's count of GPUs decides. The driver may be on a node without GPUs, so it and all workers read
the decision from the environment. A process that loads a model checks that torch agrees.

The functions import torch, the module does not.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from streamrl.errors import ConfigError

DEVICE_ENV = "STREAMRL_DEVICE"
"""Environment variable: device type of a run, cpu or cuda, for all of its processes."""


def has_local_gpu() -> bool:
    """Return whether torch finds a GPU that this process may use."""
    import torch

    return torch.cuda.is_available()


def count_local_gpus() -> int:
    import torch

    return torch.cuda.device_count() if has_local_gpu() else 0


def has_run_gpus() -> bool:
    """Return whether the models of the run compute on GPUs; without a run, those of this process.

    The answer may differ from `has_local_gpu` in the driver, and in actors without a model.
    """
    device = os.environ.get(DEVICE_ENV)
    return has_local_gpu() if device is None else device == "cuda"


def make_device_env(*, on_gpu: bool) -> dict[str, str]:
    """Return the environment variable that hands the decision to a process."""
    return {DEVICE_ENV: "cuda" if on_gpu else "cpu"}


@contextmanager
def use_device(*, on_gpu: bool) -> Iterator[None]:
    """Context in which this process, the driver, belongs to a run on this device."""
    before = os.environ.get(DEVICE_ENV)
    os.environ.update(make_device_env(on_gpu=on_gpu))
    try:
        yield
    finally:
        os.environ.pop(DEVICE_ENV)
        if before is not None:
            os.environ[DEVICE_ENV] = before


def check_device() -> None:
    """Raise ConfigError if this process, which loads a model, computes on another device."""
    if has_run_gpus() and not has_local_gpu():
        raise ConfigError(
            f"the run computes on GPUs, but {_describe_torch()} finds none on {_get_host()}:"
            f" {_suggest_fix()}"
        )
    if has_local_gpu() and not has_run_gpus():
        raise ConfigError(
            f"the run computes on CPUs, since Ray counts no GPU, but {_describe_torch()} finds"
            f" {count_local_gpus()} on {_get_host()}: start Ray there with --num-gpus, or hide the"
            " GPUs (CUDA_VISIBLE_DEVICES=)"
        )


def check_ray_agrees(ray_gpus: float) -> None:
    """Raise ConfigError if Ray's GPUs on this machine are none, and torch's are not, or reverse."""
    with use_device(on_gpu=ray_gpus > 0):
        check_device()


def _describe_torch() -> str:
    import torch

    return f"torch {torch.__version__}"


def _get_host() -> str:
    return os.uname().nodename


def _suggest_fix() -> str:
    import torch

    if torch.version.cuda is None:
        return (
            "it is the CPU build: make install DEVICE=gpu, or hide the GPUs"
            " (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    return "`streamrl doctor` names the reason"
