"""Device of a run: the decision, its way to other processes, disagreements."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
import torch

from streamrl.actors.engine_factory import check_assigned_device
from streamrl.distributed import devices
from streamrl.distributed.devices import (
    DEVICE_ENV,
    check_device,
    has_run_gpus,
    make_device_env,
    use_device,
    use_side_stream,
)
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError


def find_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_driver_without_gpu_plans_for_the_gpus_of_the_workers(monkeypatch: pytest.MonkeyPatch):
    find_gpus(monkeypatch, 0)
    assert resolve_trainer_dtype(TrainerConfig()) == torch.float32
    with use_device(on_gpu=True):
        assert resolve_trainer_dtype(TrainerConfig()) == torch.bfloat16
    assert DEVICE_ENV not in os.environ


@pytest.mark.parametrize("count", [0, 2])
def test_without_a_run_torch_decides(count: int, monkeypatch: pytest.MonkeyPatch):
    find_gpus(monkeypatch, count)
    assert has_run_gpus() == (count > 0)
    check_device()


@pytest.mark.parametrize(
    ("run_has_gpus", "local_gpus", "build", "problem"),
    [
        (True, 1, "13.0", None),
        (False, 0, None, None),
        (True, 0, None, r"^the run computes on GPUs, but torch \S+ finds none .* DEVICE=gpu, or "),
        (True, 0, "13.0", r"^the run computes on GPUs, .* finds none on .*: `streamrl doctor`"),
        (False, 2, "13.0", r"^the run computes on CPUs, since Ray counts no GPU, .* finds 2 on "),
    ],
)
def test_a_worker_on_another_device_than_the_run_names_both(
    run_has_gpus: bool,
    local_gpus: int,
    build: str | None,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
):
    find_gpus(monkeypatch, local_gpus)
    monkeypatch.setattr(torch.version, "cuda", build)
    for name, value in make_device_env(on_gpu=run_has_gpus).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_device()


@pytest.mark.parametrize(
    ("assigned", "visible", "problem"),
    [
        (0, 8, None),  # the driver, and a command without Ray
        (4, 4, None),
        (1, 8, r"^this process has 1 of Ray.s GPUs, but .* finds 8 on \S+: unset RAY_EXPER"),
        (4, 2, r"has 4 of .* finds 2"),
    ],
)
def test_a_process_must_see_only_the_gpus_that_ray_assigned_to_it(
    assigned: int, visible: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
):
    find_gpus(monkeypatch, visible)
    monkeypatch.setattr(ray, "is_initialized", lambda: assigned > 0)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [*range(assigned)])
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_assigned_device()


class StandInStream:
    """GPU stream that logs what it waits for, and that it is waited for."""

    device = "cuda:0"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait_stream(self, stream: str) -> None:
        self._log.append(f"waits for the {stream}")

    def synchronize(self) -> None:
        self._log.append("has ended")


@pytest.mark.parametrize("fails", [False, True])
def test_a_side_stream_starts_after_queued_work_and_ends_with_its_context(
    monkeypatch: pytest.MonkeyPatch, fails: bool
):
    log: list[str] = []
    gpu = SimpleNamespace(
        current_stream=lambda device: "stream of the model", stream=lambda stream: nullcontext()
    )
    monkeypatch.setattr(devices, "_get_gpu_module", lambda: gpu)
    with (
        pytest.raises(ValueError, match="disk") if fails else nullcontext(),
        use_side_stream(StandInStream(log)),
    ):
        log.append("copies")
        if fails:
            raise ValueError("disk")
    assert log == ["waits for the stream of the model", "copies", "has ended"]
