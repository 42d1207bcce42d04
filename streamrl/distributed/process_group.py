"""Default torch.distributed process group of a trainer, with a timeout on every collective."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from streamrl.distributed.devices import has_local_gpu, select_local_gpu
from streamrl.errors import ActorError, DeadlineError, RankLostError, get_first_line

LOST_PEER_MESSAGES = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "remote process exited",
)
"""Parts of the messages of gloo and nccl about a rank whose process has ended."""


def join_process_group(*, rank: int, world_size: int, timeout_s: float) -> None:
    """Initialize the default process group; do nothing in a process that has joined already.

    Uses nccl on GPUs and gloo on CPUs. With several ranks, rank 0 listens at MASTER_ADDR and
    MASTER_PORT of the environment; joining again after `leave_process_group` needs a new port.
    Raises DeadlineError if not all ranks join within `timeout_s` seconds.
    """
    if dist.is_initialized():
        current = (dist.get_rank(), dist.get_world_size())
        assert current == (rank, world_size), f"this process is rank {current} already"
        return
    select_local_gpu(rank)
    with translate_collective_errors(
        f"rank {rank} waited {timeout_s:g} s for all {world_size} ranks to join"
    ):
        dist.init_process_group(
            "nccl" if has_local_gpu() else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            store=_connect_store(rank, world_size, timeout_s),
        )


def _connect_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return the TCP store of the rendezvous, which rank 0 serves."""
    if world_size == 1:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0:
        return dist.TCPStore(host, port, world_size, False, timedelta(seconds=timeout_s))
    try:
        return serve_tcp_store(host, port, timeout_s, world_size=world_size)
    except OSError as error:
        raise ActorError(f"rank 0 cannot listen at {host}:{port}: {error.strerror}") from error


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_objects(value: Any) -> list[Any]:
    """Return the picklable values of all ranks. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def set_collective_timeout(timeout_s: float) -> None:
    """Set the timeout of all process groups of this process.

    DeepSpeed creates its own groups with torch's default of 30 minutes.
    """
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def allow_slow_ranks(wait_s: float, *, timeout_s: float) -> Iterator[None]:
    """Context in which ranks read or write files: collectives wait `wait_s` for a slower rank.

    timeout_s: timeout of all process groups afterwards, also of those made in the context.
    """
    set_collective_timeout(max(timeout_s, wait_s))
    try:
        yield
    finally:
        set_collective_timeout(timeout_s)


@contextmanager
def translate_collective_errors(message: str) -> Iterator[None]:
    """Turn a collective's timeout into DeadlineError and a lost connection into RankLostError.

    `message` says which collective waited. torch raises a plain RuntimeError for both, so the text
    of torch's message decides.
    """
    try:
        yield
    except RuntimeError as error:
        error_text = str(error).lower()
        if "timed out" in error_text:
            raise DeadlineError(f"{message}: {get_first_line(error)}") from error
        if any(words in error_text for words in LOST_PEER_MESSAGES):
            raise RankLostError(f"lost another rank: {get_first_line(error)}") from error
        raise


def serve_tcp_store(
    host: str, port: int, timeout_s: float, *, world_size: int | None = None
) -> dist.TCPStore:
    """Serve a TCP store for the rendezvous at `host`:`port`; port 0 takes any free port.

    With a `world_size`, wait until that many processes have connected, this process included.
    Raises OSError if the address cannot be bound, RuntimeError if processes are missing after
    `timeout_s` seconds.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as server_socket:
        port = server_socket.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            world_size,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=world_size is not None,
            master_listen_fd=server_socket.detach(),
        )
