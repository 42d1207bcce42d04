"""A rank's part in publishing when a send fails."""

from collections.abc import Iterator, Sequence
from pathlib import Path
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
from streamrl.weights.buckets import unpack_tensors
from tests.weights.local_transport import LocalReader, LocalWriter


class Rank:
    """Rank with sharded parameters, the next `failures` gathers of which fail midway.

    `gathered` counts the gathered tensors of each call.
    """

    has_sharded_params = True

    def __init__(self) -> None:
        self.value = 1.0
        self.gathered: list[int] = []
        self.failures = 0

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        self.gathered.append(0)
        for index in range(4):
            if index == 2 and self.failures:
                self.failures -= 1
                raise WeightsError("a parameter was not gathered")
            self.gathered[-1] += 1
            yield f"layers.{index}.weight", torch.full((300_000,), self.value)


class Full(LocalWriter):
    """Transport whose next `failures` commits fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        if self.failures:
            self.failures -= 1
            raise WeightsError("the disk is full")
        return super().commit_bucket(bucket, data)


def sender(rank: Rank, writers: dict[str, LocalWriter], *, decay: float = 0.5) -> WeightSender:
    weights = WeightsConfig(bucket_mb=1)
    return WeightSender(rank, POLICY, writers, weights, EmaReference(decay))  # type: ignore[arg-type]


def values(manifest: WeightManifest | None) -> Sequence[float]:
    assert manifest is not None
    tensors = unpack_tensors(manifest, LocalReader().fetch_buckets(manifest))
    return sorted({float(value) for tensor in tensors.values() for value in tensor.unique()})


def test_all_ranks_finish_gathering_after_a_failed_send() -> None:
    first, other, writer = Rank(), Rank(), Full()
    writer.failures = 1
    senders = [sender(first, {POLICY: writer}), sender(other, {})]
    with pytest.raises(WeightsError, match="the disk is full"):
        senders[0].send_model(1, [])
    assert senders[1].send_model(1, []) is None
    assert first.gathered == other.gathered == [4]
    assert values(senders[0].send_model(1, [])) == [1.0]
    assert senders[1].send_model(1, []) is None
    assert first.gathered == other.gathered == [4, 4]


def test_a_reference_is_updated_once_across_failed_sends() -> None:
    first, other, writer = Rank(), Rank(), Full()
    senders = [sender(first, {EMA_REFERENCE: writer}), sender(other, {})]
    assert values(senders[0].send_reference(0, [])) == [1.0]
    first.value = 2.0
    writer.failures = 1
    with pytest.raises(WeightsError, match="the disk is full"):
        senders[0].send_reference(1, [])
    assert values(senders[0].send_reference(1, [])) == [1.5]
    assert values(senders[0].send_reference(2, [])) == [1.75]
    for version in (0, 1, 1, 2):
        assert senders[1].send_reference(version, []) is None
    assert first.gathered == other.gathered == [4] * 4


@pytest.mark.parametrize(("resumes", "first"), [(False, 2.0), (True, 1.0)])
def test_a_failed_first_publish_leaves_the_reference_on_its_schedule(
    tmp_path: Path, resumes: bool, first: float
) -> None:
    rank, reference = Rank(), EmaReference(decay=0.5)
    if resumes:
        saved = EmaReference(decay=0.5)
        saved.update_from_policy(rank.full_state(), moves=True)
        saved.save(tmp_path)
        reference.load(tmp_path)
    publishing = WeightSender(
        rank,  # type: ignore[arg-type]
        POLICY,
        {EMA_REFERENCE: LocalWriter()},
        WeightsConfig(),
        reference,
    )
    rank.value, rank.failures = 2.0, 1
    with pytest.raises(WeightsError, match="was not gathered"):
        publishing.send_reference(5, [])
    assert values(publishing.send_reference(5, [])) == [first]
    rank.value = 4.0
    assert values(publishing.send_reference(6, [])) == [(first + 4.0) / 2]


def test_only_rank_0_reads_unsharded_parameters() -> None:
    rank = Rank()
    rank.has_sharded_params = False
    assert sender(rank, {}).send_model(1, []) is None
    assert rank.gathered == []
