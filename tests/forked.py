"""Processes forked from a server that has imported the libraries of ranks and readers.

Importing torch, transformers, DeepSpeed and vLLM takes 15 s of CPU time; the server does it once in
a session. It has one thread, no process group and no GPU, so forking is safe.
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
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from streamrl.engines.vllm.environment import make_vllm_env

IMPORTED = [
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "streamrl.engines.training.model_trainer",
    "deepspeed",
    "tests.engines.rank_group_ranks",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
]


@cache
def context() -> ForkServerContext:
    """Start the fork server at the first call; return its multiprocessing context."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        # Some libraries read these variables at import.
        for name, value in (*make_vllm_env("cpu").items(), ("DS_ACCELERATOR", "cpu")):
            patch.setenv(name, value)
        forkserver.ensure_running()  # type: ignore[attr-defined]
    return server


def run(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float,
    killed: Collection[int] = (),
) -> list[Any]:
    """Call a function once per argument tuple, each in its own process; return results in order.

    No process ends before all calls have returned. Processes in `killed` die without a result:
    their entry is None. Raises AssertionError with the traceback of a failed call, or on timeout.
    """
    processes, pipes = [], []
    for call_args in arguments:
        process, parent_end = start(_answer, function, call_args)
        processes.append(process)
        pipes.append(parent_end)
    results: list[Any] = [None] * len(pipes)
    waiting: dict[Any, int] = {pipe: i for i, pipe in enumerate(pipes) if i not in killed}
    deadline = time.monotonic() + timeout_s
    try:
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            assert ready, f"{sorted(waiting.values())} did not return within {timeout_s:g} s"
            for pipe in ready:
                results[waiting.pop(pipe)] = _read(pipe)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def start(
    target: Callable[..., None], *arguments: Any, **keywords: Any
) -> tuple[BaseProcess, Connection]:
    """Start a process that calls `target(pipe, *arguments)`; return it and the pipe's other end."""
    parent_end, child_end = context().Pipe()
    process = context().Process(
        target=target, args=(child_end, *arguments), kwargs=keywords, daemon=True
    )
    process.start()
    child_end.close()
    return process, parent_end


def _answer(pipe: Connection, function: Callable[..., Any], call_args: tuple[Any, ...]) -> None:
    """Send the result of a call, then live until killed: peers may still use its shared memory."""
    try:
        answer = (True, function(*call_args))
    except BaseException:  # noqa: BLE001 - the parent raises it
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
