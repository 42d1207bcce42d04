"""The ranks of a trainer as a torch.distributed group in which no collective waits for ever."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from streamrl.distributed.tcp_store import serve_tcp_store
from streamrl.errors import ActorError, DeadlineError, RankLostError

LOST_PEER_MESSAGES = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "remote process exited",
)
"""What gloo and nccl say of a peer whose process has ended."""


def join_process_group(*, rank: int, world_size: int, timeout_s: float) -> None:
    """Become one of the ranks; nothing happens in a process that already is.

    nccl on GPUs, gloo on CPUs. With more than one rank, MASTER_ADDR and MASTER_PORT in the
    environment say where rank 0 listens; after `leave_process_group` that has to be another port.
    Raises DeadlineError if the others do not come within `timeout_s`, s.
    """
    if dist.is_initialized():
        joined = (dist.get_rank(), dist.get_world_size())
        assert joined == (rank, world_size), f"this process is rank {joined} already"
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with translate_collective_errors(
        f"rank {rank} waited {timeout_s:g} s for all {world_size} ranks to join"
    ):
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            store=_connect_store(rank, world_size, timeout_s),
        )


def _connect_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Serve the store of the ranks, or connect to it."""
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
    """Undo `join_process_group`; nothing if it was undone already."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_collective_timeout(timeout_s: float) -> None:
    """Give every group of this process that timeout, s: DeepSpeed's own get torch's 30 minutes."""
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def translate_collective_errors(message: str) -> Iterator[None]:
    """Turn a collective's timeout into a DeadlineError, and a lost connection into RankLostError.

    torch has no types of its own for them.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        if "timed out" in said:
            raise DeadlineError(f"{message}: {str(error).splitlines()[0]}") from error
        if any(words in said for words in LOST_PEER_MESSAGES):
            raise RankLostError(f"another rank is gone: {str(error).splitlines()[0]}") from error
        raise
