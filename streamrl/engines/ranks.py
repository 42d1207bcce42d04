"""The ranks of a trainer as a torch.distributed group in which no collective waits for ever."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def join_ranks(*, rank: int, world_size: int, timeout_s: float) -> None:
    """Become one of the ranks; idempotent in a process that already is.

    With more than one rank, MASTER_ADDR and MASTER_PORT in the environment say where rank 0
    listens. nccl on GPUs, gloo on CPUs. Raises torch.distributed.DistError if the others do not
    come within `timeout_s`, s.
    """
    if dist.is_initialized():
        joined = (dist.get_rank(), dist.get_world_size())
        assert joined == (rank, world_size), f"this process is rank {joined} already"
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        store=dist.HashStore() if world_size == 1 else None,
    )


def bound_collectives(timeout_s: float) -> None:
    """Give every group of this process that timeout, s: DeepSpeed's own get torch's 30 minutes."""
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def leave_ranks() -> None:
    """Undo `join_ranks`; nothing if it was undone already."""
    if dist.is_initialized():
        dist.destroy_process_group()
