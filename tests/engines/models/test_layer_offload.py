"""Layers in host memory, of models that tensor-parallel ranks split.

Order of copies and of computation: `tests/engines/test_simulated_gpu.py`.
"""

import mmap
import uuid

import pytest

from streamrl.engines.models.layer_offload import LAYER_OFFLOAD, keep_layers_on_host
from streamrl.weights.shared_copies import remove_run_copies
from tests import forked
from tests.engines.offload_ranks import REPLICAS, SPLIT, score_from_host
from tests.engines.tiny_qwen import tiny_model
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"])
def test_replicas_share_the_shards_of_their_ranks(family: str):
    (port,), token = find_free_ports(1), uuid.uuid4().hex
    world = REPLICAS * SPLIT
    try:
        ranks = forked.run(
            score_from_host, [(rank, port, family, token) for rank in range(world)], timeout_s=120
        )
    finally:
        remove_run_copies(token)
    replica_bytes = sum(rank["own_bytes"] for rank in ranks[:SPLIT])
    for rank in ranks:
        assert rank["equal"] == [True, True] and rank["changed"]
        for copied in rank["copied"]:
            padding = copied - replica_bytes
            assert 0 <= padding < SPLIT * rank["num_tensors"] * mmap.PAGESIZE, "one copy of two"
            assert padding < replica_bytes / 2


def test_without_a_gpu_nothing_changes():
    model = tiny_model(tied=False, seed=1)
    before = dict(model.named_parameters())
    keep_layers_on_host(model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert not hasattr(model, LAYER_OFFLOAD)
    assert not any(layer._forward_pre_hooks for layer in model.modules())
