"""How a follower fetches a version: slices of its ranks if it takes them, else whole tensors."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors import replica
from streamrl.actors.replica import RemoteWeightChannel
from streamrl.errors import VersionNotStoredError, WeightsError
from streamrl.messages import Array
from streamrl.weights import TransportReader, WeightManifest
from streamrl.weights.rank_slices import RankSlices
from streamrl.weights.versions import FollowerState, PullStats
from tests.weights.broadcast_processes import VERSIONS
from tests.weights.local_transport import LocalWriter

WHOLE = VERSIONS.publish(LocalWriter(), 0)
MANIFEST = replace(WHOLE, rank_manifests=(WHOLE, WHOLE))
LAYOUT = {"t0": [(slice(0, 1),)]}


class Reader(TransportReader):
    """Reader whose ranks miss a version, and which may find no copy of whole tensors."""

    slices_fault = whole_fault = ""

    def fetch_slices(self, manifest: WeightManifest) -> Sequence[Sequence[Array]]:
        if self.slices_fault:
            raise WeightsError(self.slices_fault)
        return [rank.handles for rank in manifest.rank_manifests]

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        if self.whole_fault:
            raise VersionNotStoredError(self.whole_fault)
        return manifest.handles


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def answer(*_: Any, **__: Any) -> WeightManifest:
        return MANIFEST

    monkeypatch.setattr(replica, "call_actor", answer)
    transport = SimpleNamespace(make_reader=lambda role, follower: Reader())
    context: Any = SimpleNamespace(coordinator=None, transport=transport)
    return RemoteWeightChannel(context, "policy", "generator-0", None)


async def report(channel: RemoteWeightChannel, *layouts: Any) -> None:
    state = FollowerState(0, PullStats(layouts=layouts))
    assert await channel.wait_for_newer(state, wait_s=1.0) is MANIFEST


async def test_slices_are_fetched_once_the_ranks_have_told_what_they_read(channel: Any):
    assert not isinstance((await channel.fetch_weights(MANIFEST)).tensors, RankSlices)
    await report(channel, LAYOUT, LAYOUT)
    fetched = await channel.fetch_weights(MANIFEST)
    assert isinstance(fetched.tensors, RankSlices) and not fetched.fallback_reason
    await report(channel)
    assert not isinstance((await channel.fetch_weights(MANIFEST)).tensors, RankSlices)


async def test_a_version_whose_slices_fail_is_fetched_whole_with_the_reason(channel: Any):
    await report(channel, LAYOUT, LAYOUT)
    channel._transport_reader.slices_fault = "rank 1 was late"
    fetched = await channel.fetch_weights(MANIFEST)
    assert VERSIONS.are_equal(fetched.tensors, 0)
    assert fetched.fallback_reason == "rank 1 was late"
    channel._transport_reader.whole_fault = "went to its readers only"
    with pytest.raises(VersionNotStoredError, match=r"its readers only \(rank 1 was late\)"):
        await channel.fetch_weights(MANIFEST)
