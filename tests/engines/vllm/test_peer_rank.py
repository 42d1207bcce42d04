"""A peer rank's KV cache is freed by the leader, and training waits for that."""

import asyncio
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.errors import DeadlineError, GenerationError

pytestmark = pytest.mark.xdist_group("engines")

KV_CACHE_TAG = "kv_cache"


class GpuWorker:
    """Worker with vLLM's sleep mode."""

    has_kv_cache = True

    def discard(self, tags: tuple[str, ...]) -> None:
        assert tags == (KV_CACHE_TAG,)
        self.has_kv_cache = False

    def wake_up(self, tags: list[str]) -> None:
        self.has_kv_cache = True


class Leader:
    """The leader's end of the connection to a peer."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def call(self, method: str, tags: tuple[str, ...] | list[str]) -> None:
        self.connection.send((method, (tags,), {}, True))
        await asyncio.to_thread(self.connection.recv)


@pytest.mark.usefixtures("no_engine")
async def test_training_on_a_peer_waits_until_the_leader_has_freed_its_kv_cache(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in make_vllm_env("cpu").items():
        monkeypatch.setenv(name, value)
    from streamrl.engines.vllm import executor
    from streamrl.engines.vllm.peer_rank import PeerRank

    here, there = Pipe()
    worker, leader = GpuWorker(), Leader(here)
    monkeypatch.setattr(executor, "build_worker", lambda config, rank_group: worker)
    monkeypatch.setattr(executor, "_connect_leader", lambda rank_group: there)
    config, rank_group = GeneratorConfig(tensor_parallel=2), RankGroup(1, ((0, 1),))
    peer = PeerRank(EngineSpec("model", config, 64, rank_group=rank_group))
    peer_worker = executor.PeerWorker(None, rank_group)  # type: ignore[arg-type]

    def serve() -> None:
        with pytest.raises(GenerationError, match="has ended"):
            peer_worker.serve(peer._note_call)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        for _ in range(2):
            sleeping = asyncio.create_task(peer.sleep())
            await asyncio.sleep(0.05)
            assert worker.has_kv_cache and not sleeping.done()
            await leader.call("discard", (KV_CACHE_TAG,))
            await sleeping
            assert not worker.has_kv_cache
            await peer.sleep()
            await leader.call("wake_up", [KV_CACHE_TAG])
        monkeypatch.setattr(GeneratorConfig, "request_timeout_s", 0.05)
        with pytest.raises(DeadlineError, match=r"leader did not free it within 0.05 s"):
            await peer.sleep()
    finally:
        here.close()
        serving.join()
