"""Weights shared in place: activation by the generator, and when it may sample."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.actors.shared_weights import SharedWeights
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.errors import VersionSupersededError
from streamrl.resharding.executors import ReshardingStats
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import WeightLoadStats

TIGHT_MEMORY = WorkerMemory(1, 1, 1, 1, 1, 1, 1, releases_kv=True)


class Rank:
    """Trainer rank with sharded weights if `gathers`; can reshard into a storage if `fills`."""

    def __init__(self, *, gathers: bool, fills: bool = True) -> None:
        self.has_sharded_params = gathers
        self._fills = fills
        self.filled: list[int] = []

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.zeros(4)

    def count_received_bytes(self, gathered: Mapping[str, Tensor]) -> int:
        num_bytes = sum(tensor.nbytes for tensor in gathered.values())
        return num_bytes // 2 if self.has_sharded_params else 0

    def reshard_to_generator(
        self, storage: ShardStorage | None, version: int
    ) -> ReshardingStats | None:
        if storage is None or not self._fills:
            return None
        self.filled.append(version)
        return ReshardingStats(12, 12, 4)


class Generator:
    """Generator that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def get_storage(self) -> ShardStorage:
        self.calls.append("storage")
        return ShardStorage({})

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def pause(self, reason: str) -> None:
        self.calls.append("pause")

    async def resume(self, reason: str) -> None:
        self.calls.append("resume")

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        self.calls.append((sorted(tensors), version))
        return WeightLoadStats()

    async def activate_version(self, version: int) -> WeightLoadStats:
        self.calls.append(version)
        return WeightLoadStats()


async def update_weights(rank: Rank, generator: Generator) -> tuple[int, float]:
    """Publish and activate version 3; return the received and the copied bytes."""
    shared_weights = SharedWeights()
    await shared_weights.attach_trainer(rank, None)  # type: ignore[arg-type]
    await shared_weights.attach_generator(generator, should_fill_storage=rank.has_sharded_params)  # type: ignore[arg-type]
    await shared_weights.invalidate_weights()
    shared_weights.publish_version(3)
    fetched = shared_weights.fetch_version(3)
    await shared_weights.load_weights(fetched.tensors, 3)
    return fetched.num_bytes, fetched.copied_bytes


async def test_whole_weights_are_loaded_in_place_without_moving_bytes():
    rank, generator = Rank(gathers=False), Generator()
    assert await update_weights(rank, generator) == (0, 0)
    assert generator.calls == ["pause", (["weight"], 3), "resume"]
    assert not rank.filled


async def test_sharded_weights_are_resharded_into_the_generators_storage():
    rank, generator = Rank(gathers=True), Generator()
    assert await update_weights(rank, generator) == (12, 4)
    assert generator.calls == ["storage", "pause", 3, "resume"]
    assert rank.filled == [3]


async def test_weights_are_gathered_if_the_storage_cannot_be_filled():
    generator = Generator()
    # The generator itself reports bytes that it copies during load_weights.
    assert await update_weights(Rank(gathers=True, fills=False), generator) == (8, 0)
    assert generator.calls == ["storage", "pause", (["weight"], 3), "resume"]


async def test_a_superseded_version_is_not_activated():
    shared_weights, generator = SharedWeights(), Generator()
    await shared_weights.attach_trainer(Rank(gathers=True), None)  # type: ignore[arg-type]
    await shared_weights.attach_generator(generator, should_fill_storage=True)  # type: ignore[arg-type]
    shared_weights.publish_version(3)
    await shared_weights.invalidate_weights()
    with pytest.raises(VersionSupersededError, match="version 3 is superseded"):
        shared_weights.fetch_version(3)
    with pytest.raises(VersionSupersededError, match="version 3 is superseded"):
        await shared_weights.load_weights({}, 3)
    assert generator.calls == ["storage", "pause"]


class PeerRank:
    """Peer rank that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def get_storage(self) -> ShardStorage:
        return ShardStorage({})

    async def sleep(self) -> None:
        self.calls.append("sleep")

    def fill_shard(self, tensors: Mapping[str, Any]) -> int:
        self.calls.append(sorted(tensors))
        return 6


@pytest.mark.parametrize("fills", [True, False])
async def test_a_peer_rank_holds_a_version_once_it_is_published(fills: bool):
    shared_weights, peer_rank = SharedWeights(), PeerRank()
    await shared_weights.attach_trainer(Rank(gathers=True, fills=fills), TIGHT_MEMORY)  # type: ignore[arg-type]
    await shared_weights.attach_peer_rank(peer_rank)  # type: ignore[arg-type]
    await shared_weights.invalidate_weights()
    shared_weights.publish_version(3)
    fetched = shared_weights.fetch_version(3)
    assert (dict(fetched.tensors), fetched.num_bytes) == ({}, 12 if fills else 8)
    assert fetched.copied_bytes == (4 if fills else 6)
    await shared_weights.load_weights(fetched.tensors, 3)
    await shared_weights.invalidate_weights()
    with pytest.raises(VersionSupersededError, match="version 3 is superseded"):
        await shared_weights.load_weights({}, 3)
    async with shared_weights.run_training_phase():
        pass
    assert peer_rank.calls == ([] if fills else [["weight"]]) + ["sleep"]


@pytest.mark.parametrize("releases", [True, False])
async def test_the_kv_cache_is_freed_for_training_only_if_the_generator_is_idle(releases: bool):
    shared_weights, generator = SharedWeights(), Generator()
    await shared_weights.attach_trainer(Rank(gathers=False), TIGHT_MEMORY)  # type: ignore[arg-type]
    await shared_weights.attach_generator(generator, should_fill_storage=False)  # type: ignore[arg-type]
    async with shared_weights.run_training_phase(may_release_kv=releases):
        tensor = torch.ones(100 << 18)
    del tensor
    assert generator.calls == (["sleep"] if releases else [])
    peaks = shared_weights.peak_memory.drain_peaks()
    assert peaks["train"] >= peaks["generate"] + 90
