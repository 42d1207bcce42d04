"""Collectives after another rank has ended, and while another rank still loads its model."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from streamrl.distributed.process_group import (
    allow_slow_ranks,
    join_process_group,
    translate_collective_errors,
)
from streamrl.engines.trainer_config import LOAD_TIMEOUT_S
from streamrl.errors import DeadlineError, RankLostError
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


LATE_S = 2.0


def load_late(rank: int, port: int) -> str:
    """Let rank 1 load for longer than the timeout; afterwards, let it miss a collective."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    join_process_group(rank=rank, world_size=2, timeout_s=LATE_S)
    with allow_slow_ranks(LOAD_TIMEOUT_S, timeout_s=LATE_S):
        time.sleep(2 * LATE_S * rank)
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(3 * LATE_S)
        return ""
    with pytest.raises(DeadlineError) as caught, translate_collective_errors("rank 0 waited"):
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_rank_may_load_for_longer_than_a_collective_may_take():
    (port,) = find_free_ports(1)
    message, _ = forked.run(load_late, [(0, port), (1, port)], timeout_s=120)
    assert message.startswith("rank 0 waited")
