"""Processes forked from a server that has imported the libraries of ranks and readers.

Importing torch, transformers, DeepSpeed and vLLM takes 15 s of CPU time; the server does it once in
a session. It has one thread, no process group and no GPU, so forking is safe. With GPUs, where
imports may use CUDA, each process imports for itself, and sees one GPU, as an actor in a run.
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
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch

from scripts.gpu_check import alias_torch_functions
from streamrl.distributed.devices import count_local_gpus, has_local_gpu
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
def context() -> ForkServerContext | SpawnContext:
    """Start the fork server at the first call; return its multiprocessing context."""
    if has_local_gpu():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    # Some libraries read these variables at import.
    with mock.patch.dict(os.environ, {**make_vllm_env("cpu"), "DS_ACCELERATOR": "cpu"}):
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

    With GPUs, process i sees GPU i only. Tensors of results are on the CPU. No process ends before
    all calls have returned. Processes in `killed` die without a result: their entry is None.

    Raises AssertionError with the traceback of a failed call, or on timeout, and
    ModuleNotFoundError if a package is not installed.
    """
    processes, pipes = [], []
    for index, call_args in enumerate(arguments):
        process, parent_end = start(_answer, function, call_args, gpu=index)
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
    target: Callable[..., None],
    *arguments: Any,
    gpu: int = 0,
    num_gpus: int = 1,
    **keywords: Any,
) -> tuple[BaseProcess, Connection]:
    """Start a process that calls `target(pipe, *arguments)`; return it and the pipe's other end.

    gpu: index of the first of the GPUs that the process sees, if there are GPUs.
    """
    parent_end, child_end = context().Pipe()
    process = context().Process(
        target=target, args=(child_end, *arguments), kwargs=keywords, daemon=True
    )
    visible = list_visible_gpus()[gpu : gpu + num_gpus]
    env = {"CUDA_VISIBLE_DEVICES": ",".join(visible)} if has_local_gpu() else {}
    with mock.patch.dict(os.environ, env):
        process.start()
    child_end.close()
    return process, parent_end


def list_visible_gpus() -> list[str]:
    """Return the names by which CUDA_VISIBLE_DEVICES selects the GPUs of this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(count_local_gpus())]


def _answer(pipe: Connection, function: Callable[..., Any], call_args: tuple[Any, ...]) -> None:
    """Send the result of a call, then live until killed: peers may still use its shared memory."""
    answer: tuple[bool, Any]
    alias_torch_functions()
    try:
        answer = (True, function(*call_args))
    except ModuleNotFoundError as error:
        answer = (False, error)
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
        received = io.BytesIO(pipe.recv_bytes())
        returned, value = torch.load(received, map_location="cpu", weights_only=False)
    except EOFError:
        raise AssertionError("a process ended before it returned") from None
    if isinstance(value, ModuleNotFoundError):
        raise value
    assert returned, value
    return value
