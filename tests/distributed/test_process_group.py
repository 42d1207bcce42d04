"""Errors of a collective after another rank has ended."""

import os

import pytest
import torch
import torch.distributed as dist

from streamrl.distributed.process_group import join_process_group, translate_collective_errors
from streamrl.errors import RankLostError
from tests import forked
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")


def reduce_after_kill(rank: int, port: int) -> str | None:
    """Kill rank 1 after the join; return the error of rank 0's all-reduce."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    join_process_group(rank=rank, world_size=2, timeout_s=60.0)
    dist.barrier()
    if rank == 1:
        os._exit(9)
    with pytest.raises(RankLostError) as caught, translate_collective_errors("rank 0 waited"):
        for _ in range(100):
            dist.all_reduce(torch.ones(1 << 16))
    return str(caught.value)


def test_a_lost_rank_is_reported_by_the_remaining_ranks():
    (port,) = find_free_ports(1)
    message, _ = forked.run(reduce_after_kill, [(0, port), (1, port)], timeout_s=120, killed={1})
    assert message.startswith("lost another rank: ") and "\n" not in message
