"""Weights of one process: what the generator takes up, where it lies, and when it may sample."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.actors.shared_weights import PrefilledFollower, SharedWeights, SharedWeightsFollower
from streamrl.errors import VersionSupersededError
from streamrl.messages import Array
from streamrl.resharding.executors import ReshardingStats
from streamrl.resharding.storage import ShardStorage
from streamrl.weights import WeightLoadStats


class Rank:
    """Has its weights whole, or in parts with others; its shards can be filled in, or not."""

    def __init__(self, *, gathers: bool, fills: bool = True) -> None:
        self.gathers = gathers
        self._fills = fills
        self.filled: list[int] = []

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.zeros(4)

    def received_bytes(self, gathered: Mapping[str, Tensor]) -> int:
        return sum(tensor.nbytes for tensor in gathered.values()) // 2 if self.gathers else 0

    def switch(self, served: ShardStorage | None, version: int) -> ReshardingStats | None:
        if served is None or not self._fills:
            return None
        self.filled.append(version)
        return ReshardingStats(version, 12, 12, 4, 100, 1, 0.1)


class Generator:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def get_storage(self) -> ShardStorage:
        self.told.append("storage")
        return ShardStorage({})

    async def sleep(self) -> None:
        self.told.append("release_kv")

    async def pause(self, reason: str) -> None:
        self.told.append("suspend")

    async def resume(self, reason: str) -> None:
        self.told.append("resume")

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        self.told.append((sorted(tensors), version))
        return WeightLoadStats()

    async def activate_version(self, version: int) -> WeightLoadStats:
        self.told.append(version)
        return WeightLoadStats()

    async def compute_logprobs(self, sequences: Sequence[Array]) -> None: ...


async def updated(rank: Rank, generator: Generator) -> tuple[int, float]:
    """Let both in, and make version 3; what came from other ranks for it, and what was copied of
    what is here, bytes.
    """
    residence = SharedWeights()
    await residence.attach_generator(generator, should_fill_storage=rank.gathers)
    await residence.invalidate_weights()
    residence.publish_version(rank, 3)  # type: ignore[arg-type]
    fetched = residence.fetch_version(3)
    await SharedWeightsFollower(generator, residence).load_weights(fetched.tensors, 3)
    return fetched.num_bytes, fetched.copied_bytes


def test_what_every_rank_has_whole_is_looked_at_where_it_lies() -> None:
    generator = Generator()
    assert asyncio.run(updated(rank := Rank(gathers=False), generator)) == (0, 0)
    assert generator.told == ["suspend", (["weight"], 3), "resume"]
    assert not rank.filled


def test_what_ranks_have_parts_of_is_filled_in_and_counted() -> None:
    generator = Generator()
    assert asyncio.run(updated(rank := Rank(gathers=True), generator)) == (12, 4)
    assert generator.told == ["storage", "suspend", 3, "resume"]
    assert rank.filled == [3]


def test_what_cannot_be_filled_in_is_gathered() -> None:
    generator = Generator()
    # What is copied then the generator tells, as it copies.
    assert asyncio.run(updated(Rank(gathers=True, fills=False), generator)) == (8, 0)
    assert generator.told == ["storage", "suspend", (["weight"], 3), "resume"]


def test_a_version_that_has_been_updated_is_not_taken_up() -> None:
    async def late() -> None:
        residence, generator = SharedWeights(), Generator()
        await residence.attach_generator(generator, should_fill_storage=True)
        residence.publish_version(Rank(gathers=True), 3)  # type: ignore[arg-type]
        await residence.invalidate_weights()
        with pytest.raises(VersionSupersededError, match="version 3 is gone"):
            residence.fetch_version(3)
        with pytest.raises(VersionSupersededError, match="version 3 is gone"):
            await SharedWeightsFollower(generator, residence).load_weights({}, 3)
        assert generator.told == ["storage", "suspend"]

    asyncio.run(late())


class Part:
    """A part of a generator, which notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def get_storage(self) -> ShardStorage:
        return ShardStorage({})

    async def sleep(self) -> None:
        self.told.append("release_kv")

    def fill_shard(self, tensors: Mapping[str, Any]) -> int:
        self.told.append(sorted(tensors))
        return 6


@pytest.mark.parametrize("fills", [True, False])
def test_a_part_has_a_version_in_it_by_the_time_it_is_published(fills: bool) -> None:
    async def told() -> list[Any]:
        residence, part = SharedWeights(), Part()
        await residence.attach_follower_rank(part)
        await residence.invalidate_weights()
        residence.publish_version(Rank(gathers=True, fills=fills), 3)  # type: ignore[arg-type]
        fetched = residence.fetch_version(3)
        assert (dict(fetched.tensors), fetched.num_bytes) == ({}, 12 if fills else 8)
        assert fetched.copied_bytes == (4 if fills else 6)
        follower = PrefilledFollower(residence)
        await follower.load_weights(fetched.tensors, 3)
        await residence.invalidate_weights()
        with pytest.raises(VersionSupersededError, match="version 3 is gone"):
            await follower.load_weights({}, 3)
        async with residence.run_training_phase(releases_kv=True):
            pass
        return part.told

    assert asyncio.run(told()) == ([] if fills else [["weight"]]) + ["release_kv"]


def test_what_every_rank_has_whole_may_be_filled_into_parts_of_it() -> None:
    async def filled() -> list[int]:
        residence, rank = SharedWeights(), Rank(gathers=False)
        await residence.attach_generator(Generator(), should_fill_storage=True)
        residence.publish_version(rank, 3)  # type: ignore[arg-type]
        return rank.filled

    assert asyncio.run(filled()) == [3]


@pytest.mark.parametrize("releases", [True, False])
def test_keys_and_values_make_room_for_training_if_they_are_to(releases: bool) -> None:
    async def trained() -> tuple[list[Any], dict[str, float]]:
        residence, generator = SharedWeights(), Generator()
        await residence.attach_generator(generator, should_fill_storage=False)
        async with residence.run_training_phase(releases_kv=releases):
            held = torch.ones(100 << 18)
        del held
        return generator.told, residence.peak_memory.drain_peaks()

    told, peaks = asyncio.run(trained())
    assert told == (["release_kv"] if releases else [])
    assert peaks["train"] >= peaks["generate"] + 90
