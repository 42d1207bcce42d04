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
from tests.actors.fakes import FakeGenerator

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


async def share(rank: Rank, generator: FakeGenerator, *, fills: bool) -> SharedWeights:
    """Return weights that the trainer rank and the generator share."""
    shared_weights = SharedWeights()
    await shared_weights.attach_trainer(rank, None)  # type: ignore[arg-type]
    await shared_weights.attach_generator(generator, should_fill_storage=fills)  # type: ignore[arg-type]
    return shared_weights


@pytest.mark.parametrize(
    ("gathers", "fills", "moved_and_copied", "loaded"),
    [
        (False, True, (0, 0), (["weight"], 3)),  # in place
        (True, True, (12, 4), 3),  # resharded into the generator's storage
        # Gathered; the generator itself reports the bytes that it copies.
        (True, False, (8, 0), (["weight"], 3)),
    ],
)
async def test_a_version_is_loaded_in_place_resharded_or_gathered(
    gathers: bool, fills: bool, moved_and_copied: tuple[int, int], loaded: Any
):
    rank, generator = Rank(gathers=gathers, fills=fills), FakeGenerator()
    shared_weights = await share(rank, generator, fills=gathers)
    await shared_weights.invalidate_weights()
    shared_weights.publish_version(3)
    fetched = shared_weights.fetch_version(3)
    await shared_weights.load_weights(fetched.tensors, 3)
    assert (fetched.num_bytes, fetched.copied_bytes) == moved_and_copied
    calls = ["pause for update", loaded, "resume from update"]
    assert generator.calls == [*["storage"] * gathers, *calls]
    assert rank.filled == [3] * (gathers and fills)


async def test_a_superseded_version_is_not_activated():
    generator = FakeGenerator()
    shared_weights = await share(Rank(gathers=True), generator, fills=True)
    shared_weights.publish_version(3)
    await shared_weights.invalidate_weights()
    with pytest.raises(VersionSupersededError, match="version 3 is superseded"):
        shared_weights.fetch_version(3)
    with pytest.raises(VersionSupersededError, match="version 3 is superseded"):
        await shared_weights.load_weights({}, 3)
    assert generator.calls == ["storage", "pause for update"]


class PeerRank(FakeGenerator):
    """Peer rank that records its calls."""

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
    assert peer_rank.calls == ["storage", *([] if fills else [["weight"]]), "sleep"]


@pytest.mark.parametrize("releases", [True, False])
async def test_the_kv_cache_is_freed_for_training_only_if_the_generator_is_idle(releases: bool):
    shared_weights, generator = SharedWeights(), FakeGenerator()
    await shared_weights.attach_trainer(Rank(gathers=False), TIGHT_MEMORY)  # type: ignore[arg-type]
    await shared_weights.attach_generator(generator, should_fill_storage=False)  # type: ignore[arg-type]
    async with shared_weights.run_training_phase(may_release_kv=releases):
        tensor = torch.ones(100 << 18)
    del tensor
    assert generator.calls == (["sleep"] if releases else [])
    peaks = shared_weights.peak_memory.drain_peaks()
    assert peaks["train"] >= peaks["generate"] + 90
