"""Trainer actor: memory beside a generator, and publishing when a send or a gather fails."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.actors import trainer
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import TrainerActor, prove_rank_files
from streamrl.algorithms import AlgorithmConfig
from streamrl.dataflow import EMA_REFERENCE, POLICY, CallKind, ModelCall
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.engines.trainer_config import ReferenceConfig
from streamrl.engines.training.ema_reference import EmaReference
from streamrl.errors import WeightsError
from streamrl.telemetry.spans import SpanRecorder
from streamrl.weights import WeightBucket, WeightManifest
from streamrl.weights.buckets import unpack_tensors
from tests.actors.fakes import FakeGenerator, make_config
from tests.weights.local_transport import LocalReader, LocalWriter


class Rank:
    """Trainer rank that records its calls."""

    has_sharded_params = False

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def full_state(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._calls.append(name)


def make_context(rank: Any, memory: WorkerMemory | None, **settings: Any) -> Any:
    """Make the context of a run whose trainer has this rank."""
    stage = SimpleNamespace(spans=SpanRecorder("trainer-0"))
    return SimpleNamespace(
        config=make_config(**settings),
        make_stages=lambda calls, name: (stage,),
        train_columns=(),
        memory=memory,
        max_length=8,
        run_dir=Path("a-run"),
        engines=SimpleNamespace(make_trainer=lambda config, max_length, number, role: rank),
    )


LITTLE_MEMORY = WorkerMemory(1, 1, 1, 1, 1, 1, 1, releases_kv=True, offloads_optimizer=True)


@pytest.fixture(autouse=True)
def keep_crash_handler_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "streamrl.actors.scoring_ranks.record_crash_stacks", lambda run_dir, actor: None
    )


RANKS = (
    ["trainer-0", "trainer-1"],
    [ModelCall("train", POLICY, CallKind.TRAIN, (), ())],
    ("localhost", 1),
)


@pytest.mark.parametrize("leads", [True, False])
async def test_an_offloaded_optimizer_is_in_device_memory_only_while_needed(
    leads: bool, tmp_path: Path
):
    calls: list[str] = []
    shared_weights = SharedWeights()
    actor = TrainerActor(shared_weights)
    starting = asyncio.create_task(
        actor.start(make_context(Rank(calls), LITTLE_MEMORY), 1, *RANKS, Path("checkpoint"))
    )
    await shared_weights.wait_for_trainer(10.0)
    # A generator may now allocate its memory.
    calls.append("generator starts")
    await starting
    if leads:
        await shared_weights.attach_generator(FakeGenerator(calls), should_fill_storage=False)  # type: ignore[arg-type]
    await actor.save_checkpoint(tmp_path, tmp_path)
    begins = ["load_training_state", "offload_optimizer", "generator starts"]
    saves = ["save_training_state", "save_model", "offload_optimizer"]
    if leads:
        saves = ["pause for save", "sleep", *saves, "resume from save"]
    assert calls == [*begins, *saves]


OF_RANK_0 = {"config.json", "trainer.json", "rng_00000.safetensors", "state_00000_001.st"}


@pytest.mark.parametrize(("rank", "names"), [(0, OF_RANK_0), (1, {"state_00001_000.st"})])
async def test_a_rank_proves_the_files_that_it_wrote(tmp_path: Path, rank: int, names: set[str]):
    model, state = tmp_path / "model", tmp_path / "trainer"
    for folder in (model, state):
        folder.mkdir()
    (model / "config.json").touch()
    for name in (OF_RANK_0 - {"config.json"}) | {"state_00001_000.st", "state_00010_000.st"}:
        (state / name).touch()
    actor = TrainerActor(SharedWeights())
    await actor.start(make_context(Rank([]), LITTLE_MEMORY), rank, *RANKS, None)
    assert {path.name for path in await actor.save_checkpoint(model, state)} == names


async def test_a_generator_that_may_sample_keeps_its_kv_cache():
    calls: list[str] = []
    shared_weights = SharedWeights()
    actor = TrainerActor(shared_weights)
    await actor.start(make_context(Rank(calls), LITTLE_MEMORY), 1, *RANKS, None)
    await shared_weights.attach_generator(FakeGenerator(calls), should_fill_storage=False)  # type: ignore[arg-type]
    await shared_weights.invalidate_weights()
    for label in ("changed", "sent again"):
        calls.append(label)
        await actor.publish_weights(3, {}, False)
    changed, resent = calls.index("changed"), calls.index("sent again")
    assert "sleep" in calls[changed:resent]
    assert "sleep" not in calls[resent:]


class ShardedRank:
    """Rank with sharded parameters; its next `failures` gathers fail midway.

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


class FailingWriter(LocalWriter):
    """Transport whose next `failures` commits fail."""

    failures = 0

    def commit_bucket(self, bucket: WeightBucket, data: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise WeightsError("the disk is full")
        return super().commit_bucket(bucket, data)


async def start_actor(
    rank: ShardedRank,
    number: int = 0,
    writers: Mapping[str, LocalWriter] | None = None,
    resume_dir: Path | None = None,
) -> TrainerActor:
    """Start the actor of a rank in a run with an EMA reference; rank 0 publishes by `writers`."""
    context = make_context(
        rank,
        None,
        algorithm=AlgorithmConfig(kl_coef=0.1),
        reference=ReferenceConfig(every=1, decay=0.5),
    )
    published = {POLICY: LocalWriter(), EMA_REFERENCE: LocalWriter(), **(writers or {})}
    context.transport = SimpleNamespace(make_writer=lambda role: published[role])
    actor = TrainerActor()
    await actor.start(context, number, *RANKS, resume_dir)
    return actor


def values(manifest: WeightManifest | None) -> list[float]:
    assert manifest is not None
    tensors = unpack_tensors(manifest, LocalReader().fetch_buckets(manifest))
    return sorted({float(value) for tensor in tensors.values() for value in tensor.unique()})


async def test_all_ranks_finish_gathering_after_a_failed_send():
    rank_0, rank_1, writer = ShardedRank(), ShardedRank(), FailingWriter()
    actor_0, actor_1 = await start_actor(rank_0, 0, {POLICY: writer}), await start_actor(rank_1, 1)
    writer.failures = 1
    with pytest.raises(WeightsError, match="the disk is full"):
        await actor_0.publish_weights(1, {}, False)
    assert await actor_1.publish_weights(1, {}, False) is None
    assert rank_0.gathered == rank_1.gathered == [4]
    assert values(await actor_0.publish_weights(1, {}, False)) == [1.0]
    assert await actor_1.publish_weights(1, {}, False) is None
    assert rank_0.gathered == rank_1.gathered == [4, 4]


async def test_a_reference_is_updated_once_across_failed_sends():
    rank_0, rank_1, writer = ShardedRank(), ShardedRank(), FailingWriter()
    actor_0 = await start_actor(rank_0, 0, {EMA_REFERENCE: writer})
    actor_1 = await start_actor(rank_1, 1)
    assert values(await actor_0.publish_reference(0, {})) == [1.0]
    rank_0.value = 2.0
    writer.failures = 1
    with pytest.raises(WeightsError, match="the disk is full"):
        await actor_0.publish_reference(1, {})
    assert values(await actor_0.publish_reference(1, {})) == [1.5]
    assert values(await actor_0.publish_reference(2, {})) == [1.75]
    for version in (0, 1, 1, 2):
        assert await actor_1.publish_reference(version, {}) is None
    assert rank_0.gathered == rank_1.gathered == [4] * 4


@pytest.mark.parametrize(("resumes", "first_value"), [(False, 2.0), (True, 1.0)])
async def test_a_failed_first_publish_leaves_the_reference_on_its_schedule(
    tmp_path: Path, resumes: bool, first_value: float
):
    rank = ShardedRank()
    saved = EmaReference(decay=0.5)
    saved.update_from_policy(rank.full_state(), moves=True)
    saved.save(tmp_path)
    actor = await start_actor(rank, resume_dir=tmp_path if resumes else None)
    rank.value, rank.failures = 2.0, 1
    with pytest.raises(WeightsError, match="was not gathered"):
        await actor.publish_reference(5, {})
    assert values(await actor.publish_reference(5, {})) == [first_value]
    rank.value = 4.0
    assert values(await actor.publish_reference(6, {})) == [(first_value + 4.0) / 2]


async def test_only_rank_0_reads_unsharded_parameters():
    rank = ShardedRank(has_sharded_params=False)
    assert await (await start_actor(rank, 1)).publish_weights(1, {}, False) is None
    assert rank.gathered == []


@pytest.mark.parametrize("is_sharded", [False, True])
async def test_only_whole_parameters_are_read_on_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch, is_sharded: bool
):
    """Sharded ones are gathered on the stream of the model, as its other collectives."""
    side_streams: list[str] = []
    read_aside: list[bool] = []

    @contextmanager
    def note_side_stream(stream: str) -> Iterator[None]:
        side_streams.append(stream)
        yield
        side_streams.pop()

    class NotingRank(ShardedRank):
        def full_state(self) -> Iterator[tuple[str, Tensor]]:
            for pair in super().full_state():
                read_aside.append(bool(side_streams))
                yield pair

    monkeypatch.setattr(trainer, "use_side_stream", note_side_stream)
    monkeypatch.setattr(trainer, "has_local_gpu", lambda: True)
    monkeypatch.setattr(trainer, "make_gpu_stream", lambda: "side stream")
    actor = await start_actor(NotingRank(has_sharded_params=is_sharded))
    await actor.publish_weights(1, {}, False)
    await actor.publish_reference(1, {})
    assert read_aside == [not is_sharded] * 8


def test_a_rank_proves_its_own_files_while_others_are_still_writing(tmp_path: Path):
    # safetensors writes into a hidden file, which it renames.
    names = ("trainer.json", ".tmpJJ9aav", "rng_00000.safetensors", "state_00001_000.safetensors")
    model, state = tmp_path / "model", tmp_path / "trainer"
    model.mkdir()
    state.mkdir()
    for name in names:
        (state / name).write_text(name)
    proven = [{path.name for path in prove_rank_files(model, state, rank)} for rank in (0, 1)]
    assert proven == [
        {"trainer.json", "rng_00000.safetensors"},
        {"state_00001_000.safetensors"},
    ]
