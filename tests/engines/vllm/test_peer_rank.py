"""Training on a peer rank waits until the generator's leader has freed the rank's KV cache."""

import asyncio

import pytest

from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.errors import DeadlineError

pytestmark = pytest.mark.xdist_group("engines")


@pytest.mark.usefixtures("no_engine")
async def test_training_on_a_peer_waits_until_the_leader_has_freed_its_kv_cache(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in make_vllm_env("cpu").items():
        monkeypatch.setenv(name, value)
    from streamrl.engines.vllm.peer_rank import PeerRank  # loads vLLM

    config, rank_group = GeneratorConfig(tensor_parallel=2), RankGroup(1, ((0, 1),))
    peer = PeerRank(EngineSpec("model", config, 64, rank_group=rank_group))
    for _ in range(2):
        sleeping = asyncio.create_task(peer.sleep())
        # The calls of vLLM's sleep mode on a GPU, and one of another kind.
        await asyncio.to_thread(peer._note_call, "execute_model")
        await asyncio.sleep(0.05)
        assert not sleeping.done()
        await asyncio.to_thread(peer._note_call, "discard")
        await sleeping
        await peer.sleep()
        await asyncio.to_thread(peer._note_call, "wake_up")
    monkeypatch.setattr(GeneratorConfig, "request_timeout_s", 0.05)
    with pytest.raises(DeadlineError, match=r"leader did not free it within 0.05 s"):
        await peer.sleep()
