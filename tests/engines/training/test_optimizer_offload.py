"""Offload of the optimizer's state frees memory and does not change updates."""

import contextlib
import errno
import tempfile
from typing import Any

import pytest
import torch

from streamrl.engines.training.optimizer_offload import OptimizerOffload, iter_optimizer_tensors
from streamrl.errors import StreamError


def adam(*sizes: int) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    """Make parameters of these sizes and an optimizer that has made a step."""
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = torch.optim.AdamW(parameters)
    step(parameters, optimizer)
    return parameters, optimizer


def step(parameters: list[torch.nn.Parameter], optimizer: torch.optim.AdamW) -> None:
    for parameter in parameters:
        parameter.grad = torch.sin(torch.arange(parameter.numel()))
    optimizer.step()


def memory_of(
    parameters: list[torch.nn.Parameter], optimizer: torch.optim.AdamW
) -> OptimizerOffload:
    return OptimizerOffload(lambda: iter_optimizer_tensors(optimizer), excluding=lambda: parameters)


def test_restored_state_is_bitwise_equal_and_in_the_same_storages():
    parameters, optimizer = adam(1000, 1, 7)
    before = [tensor.clone() for tensor in iter_optimizer_tensors(optimizer)]
    state_tensors = list(iter_optimizer_tensors(optimizer))
    memory = memory_of(parameters, optimizer)
    for _ in range(2):
        memory.offload_state()
        memory.offload_state()
        moments = [
            optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")
        ]
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moments)
        assert all(parameter.untyped_storage().nbytes() for parameter in parameters)
        memory.restore_state()
        memory.restore_state()
        for tensor, original in zip(state_tensors, before, strict=True):
            assert torch.equal(tensor, original)
    step(parameters, optimizer)
    assert not torch.equal(state_tensors[-1], before[-1]), (
        "the optimizer steps with the restored state"
    )


def test_an_empty_shard_does_not_offload_the_memory_of_other_tensors():
    # As torch shards it: only padding rows, so the rank's shard is empty.
    padded = torch.ones(8)
    parameters, optimizer = adam(10)
    empty = torch.nn.Parameter(padded[:0])
    optimizer.add_param_group({"params": [empty]})
    memory_of(parameters, optimizer).offload_state()
    assert padded.untyped_storage().nbytes() == 8 * 4


def test_offloading_without_space_keeps_the_state(monkeypatch: pytest.MonkeyPatch):
    class Full(contextlib.nullcontext[None]):
        def __enter__(self) -> Any:
            return self

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    parameters, optimizer = adam(10)
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with pytest.raises(StreamError, match=r"offloaded to .*TMPDIR.*: No space left"):
        memory_of(parameters, optimizer).offload_state()
    step(parameters, optimizer)
