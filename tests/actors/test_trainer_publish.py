"""A rank's part in publishing when a send or a gather fails."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.actors.trainer import RendezvousInfo, TrainerActor
from streamrl.algorithms import AlgorithmConfig
from streamrl.config import ModelConfig, RunConfig
from streamrl.data.config import DataConfig
from streamrl.dataflow import EMA_REFERENCE, POLICY, CallKind, ModelCall
from streamrl.engines.reference_config import ReferenceConfig
from streamrl.engines.training.ema_reference import EmaReference
from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.rewards.interface.config import RewardConfig
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightBucket, WeightManifest, WeightsConfig
from streamrl.weights.buckets import unpack_tensors
from tests.weights.local_transport import LocalReader, LocalWriter

CALL = ModelCall("train", POLICY, CallKind.TRAIN, (), ())


class Rank:
    """Rank with sharded parameters, the next `failures` gathers of which fail midway.

    `gathered` counts the gathered tensors of each call.
    """

    def __init__(self, *, has_sharded_params: bool = True) -> None:
        self.has_sharded_params = has_sharded_params
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

    def load_training_state(self, folder: Path) -> None: ...


class Full(LocalWriter):
    """Transport whose next `failures` commits fail."""

    failures = 0

    def commit_bucket(self, bucket: WeightBucket, data: Array) -> Any:
        if self.failures:
            self.failures -= 1
            raise WeightsError("the disk is full")
        return super().commit_bucket(bucket, data)


@pytest.fixture(autouse=True)
def keep_crash_handler_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.actors.trainer.record_crash_stacks", lambda run_dir, actor: None)


async def start_actor(
    rank: Rank,
    number: int = 0,
    writers: Mapping[str, LocalWriter] | None = None,
    resume_dir: Path | None = None,
) -> TrainerActor:
    """Start the actor of a rank in a run with a moving reference; rank 0 publishes by `writers`."""
    config = RunConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(train="rows.jsonl"),
        rewards=[RewardConfig("exact")],
        algorithm=AlgorithmConfig(kl_coef=0.1),
        reference=ReferenceConfig(every=1, decay=0.5),
        weights=WeightsConfig(bucket_mb=1),
    )
    stage = SimpleNamespace(spans=SpanRecorder("trainer-0"))
    published = writers or {}
    context: Any = SimpleNamespace(
        config=config,
        make_stages=lambda calls, name: (stage,),
        train_columns=(),
        memory=None,
        max_length=8,
        run_dir=Path("a-run"),
        engines=SimpleNamespace(make_trainer=lambda config, max_length, rank_, role: rank),
        transport=SimpleNamespace(
            make_writer=lambda role, path: published.get(role) or LocalWriter()
        ),
    )
    actor = TrainerActor()
    rendezvous = RendezvousInfo(CALL, "trainer", "localhost", 1)
    await actor.start(context, number, rendezvous, resume_dir)
    return actor


def values(manifest: WeightManifest | None) -> list[float]:
    assert manifest is not None
    tensors = unpack_tensors(manifest, LocalReader().fetch_buckets(manifest))
    return sorted({float(value) for tensor in tensors.values() for value in tensor.unique()})


async def test_all_ranks_finish_gathering_after_a_failed_send() -> None:
    first, other, writer = Rank(), Rank(), Full()
    actor, other_actor = await start_actor(first, 0, {POLICY: writer}), await start_actor(other, 1)
    writer.failures = 1
    with pytest.raises(WeightsError, match="the disk is full"):
        await actor.publish_weights(1, [], False)
    assert await other_actor.publish_weights(1, [], False) is None
    assert first.gathered == other.gathered == [4]
    assert values(await actor.publish_weights(1, [], False)) == [1.0]
    assert await other_actor.publish_weights(1, [], False) is None
    assert first.gathered == other.gathered == [4, 4]


async def test_a_reference_is_updated_once_across_failed_sends() -> None:
    first, other, writer = Rank(), Rank(), Full()
    actor = await start_actor(first, 0, {EMA_REFERENCE: writer})
    other_actor = await start_actor(other, 1)
    assert values(await actor.publish_reference(0, [])) == [1.0]
    first.value = 2.0
    writer.failures = 1
    with pytest.raises(WeightsError, match="the disk is full"):
        await actor.publish_reference(1, [])
    assert values(await actor.publish_reference(1, [])) == [1.5]
    assert values(await actor.publish_reference(2, [])) == [1.75]
    for version in (0, 1, 1, 2):
        assert await other_actor.publish_reference(version, []) is None
    assert first.gathered == other.gathered == [4] * 4


@pytest.mark.parametrize(("resumes", "first"), [(False, 2.0), (True, 1.0)])
async def test_a_failed_first_publish_leaves_the_reference_on_its_schedule(
    tmp_path: Path, resumes: bool, first: float
) -> None:
    rank = Rank()
    saved = EmaReference(decay=0.5)
    saved.update_from_policy(rank.full_state(), moves=True)
    saved.save(tmp_path)
    actor = await start_actor(rank, resume_dir=tmp_path if resumes else None)
    rank.value, rank.failures = 2.0, 1
    with pytest.raises(WeightsError, match="was not gathered"):
        await actor.publish_reference(5, [])
    assert values(await actor.publish_reference(5, [])) == [first]
    rank.value = 4.0
    assert values(await actor.publish_reference(6, [])) == [(first + 4.0) / 2]


async def test_only_rank_0_reads_unsharded_parameters() -> None:
    rank = Rank(has_sharded_params=False)
    assert await (await start_actor(rank, 1)).publish_weights(1, [], False) is None
    assert rank.gathered == []
