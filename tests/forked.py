"""Processes that are forked from one server, which has imported what ranks and readers need.

To import torch, transformers, DeepSpeed and vLLM takes 15 s of a processor; the server does it once
in a session. It has one thread, no process group and no GPU, so a fork is as good as a start.
"""

import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch

from streamrl.engines.vllm.environment import make_vllm_env

IMPORTED = [
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "streamrl.engines.training.trainer",
    "deepspeed",
    "tests.engines.hybrid_ranks",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
]


@cache
def context() -> ForkServerContext:
    """What makes such processes; the server is started with the first."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        # What is imported reads some of it as it is imported.
        for name, value in (*make_vllm_env("cpu").items(), ("DS_ACCELERATOR", "cpu")):
            patch.setenv(name, value)
        forkserver.ensure_running()  # type: ignore[attr-defined]
    return found


def run(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float,
    killed: Collection[int] = (),
) -> list[Any]:
    """Call a function with each of the arguments, side by side; what they return, in order.

    No process ends before all have returned. Those in `killed` end without a word, for None. Raises
    AssertionError with the trace of one that fails, or if one takes longer.
    """
    processes, pipes = [], []
    for given in arguments:
        here, there = context().Pipe()
        process = context().Process(target=_answer, args=(there, function, given), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    found: list[Any] = [None] * len(pipes)
    waiting: dict[Any, int] = {pipe: i for i, pipe in enumerate(pipes) if i not in killed}
    deadline = time.monotonic() + timeout_s
    try:
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            assert ready, f"{sorted(waiting.values())} did not return within {timeout_s:g} s"
            for pipe in ready:
                found[waiting.pop(pipe)] = _read(pipe)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _answer(pipe: Connection, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """The life of a process: others may need what is left of it, until nobody waits for any."""
    try:
        answer = (True, function(*given))
    except BaseException:  # noqa: BLE001 - it goes to who waits
        answer = (False, traceback.format_exc())
    text = io.BytesIO()
    torch.save(answer, text)
    with suppress(EOFError, OSError):
        pipe.send_bytes(text.getvalue())
        pipe.recv_bytes()
    os._exit(0)


def _read(pipe: Any) -> Any:
    try:
        returned, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        raise AssertionError("a process ended before it returned") from None
    assert returned, value
    return value
