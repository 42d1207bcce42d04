"""One rank's part in publishing, where a version cannot be sent at once."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.actors.weight_sender import WeightSender
from streamrl.dataflow import EMA_REFERENCE, POLICY
from streamrl.engines.training.ema_reference import EmaReference
from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights import WeightBucket, WeightManifest, WeightsConfig
from streamrl.weights.unpack import unpack_tensors
from tests.weights.local_transport import LocalReader, LocalWriter


class Rank:
    """Its parameters are gathered one by one; so many of them were, by each call."""

    has_sharded_params = True

    def __init__(self) -> None:
        self.value = 1.0
        self.gathered: list[int] = []

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        self.gathered.append(0)
        for index in range(4):
            self.gathered[-1] += 1
            yield f"layers.{index}.weight", torch.full((300_000,), self.value)


class Full(LocalWriter):
    """A disk on which a bucket of some versions has no room, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        if self.failures:
            self.failures -= 1
            raise WeightsError("the disk is full")
        return super().commit_bucket(bucket, data)


def sender(rank: Rank, outlets: dict[str, LocalWriter], *, decay: float = 0.5) -> WeightSender:
    weights = WeightsConfig(bucket_mb=1)
    return WeightSender(rank, POLICY, outlets, weights, EmaReference(decay))  # type: ignore[arg-type]


def values(manifest: WeightManifest | None) -> Sequence[float]:
    assert manifest is not None
    tensors = unpack_tensors(manifest, LocalReader().fetch_buckets(manifest))
    return sorted({float(value) for tensor in tensors.values() for value in tensor.unique()})


def test_all_ranks_gather_as_much_when_the_first_bucket_cannot_be_sent() -> None:
    first, other, outlet = Rank(), Rank(), Full()
    outlet.failures = 1
    senders = [sender(first, {POLICY: outlet}), sender(other, {})]
    with pytest.raises(WeightsError, match="the disk is full"):
        senders[0].send_model(1, [])
    assert senders[1].send_model(1, []) is None
    assert first.gathered == other.gathered == [4]
    assert values(senders[0].send_model(1, [])) == [1.0]
    assert senders[1].send_model(1, []) is None
    assert first.gathered == other.gathered == [4, 4]


def test_a_reference_that_could_not_be_sent_is_moved_once_and_all_ranks_gather() -> None:
    first, other, outlet = Rank(), Rank(), Full()
    senders = [sender(first, {EMA_REFERENCE: outlet}), sender(other, {})]
    assert values(senders[0].send_reference(0, [], moves=False)) == [1.0]
    first.value = 2.0
    outlet.failures = 1
    with pytest.raises(WeightsError, match="the disk is full"):
        senders[0].send_reference(1, [], moves=True)
    assert values(senders[0].send_reference(1, [], moves=True)) == [1.5]
    assert values(senders[0].send_reference(2, [], moves=True)) == [1.75]
    for version in (0, 1, 1, 2):
        assert senders[1].send_reference(version, [], moves=True) is None
    assert first.gathered == other.gathered == [4] * 4


def test_of_ranks_that_have_all_parameters_only_the_first_reads_them() -> None:
    rank = Rank()
    rank.has_sharded_params = False
    assert sender(rank, {}).send_model(1, []) is None
    assert rank.gathered == []
