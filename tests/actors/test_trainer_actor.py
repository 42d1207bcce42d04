"""Memory of a trainer rank that shares its process with a generator: when state is offloaded."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.trainer import RendezvousInfo, TrainerActor
from streamrl.config import ModelConfig, RunConfig
from streamrl.data.config import DataConfig
from streamrl.dataflow import POLICY, CallKind, ModelCall
from streamrl.placement.colocated_memory import WorkerMemory
from streamrl.rewards.interface.config import RewardConfig
from streamrl.telemetry.spans import SpanRecorder


class Rank:
    """Records its calls."""

    has_sharded_params = False

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def full_state(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._calls.append(name)


class Generator:
    """Records pauses and freeing of the KV cache."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    async def sleep(self) -> None:
        self._calls.append("sleep")

    async def pause(self, reason: str) -> None:
        self._calls.append(f"pause for {reason}")

    async def resume(self, reason: str) -> None:
        self._calls.append(f"resume from {reason}")


def make_context(calls: list[str]) -> Any:
    """Make the context of a run with little memory."""
    config = RunConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(train="rows.jsonl"),
        rewards=[RewardConfig("exact")],
    )
    stage = SimpleNamespace(spans=SpanRecorder("trainer-0"))
    return SimpleNamespace(
        config=config,
        make_stages=lambda calls, name: (stage,),
        train_columns=(),
        memory=WorkerMemory(1, 1, 1, 1, 1, 1, 1, releases_kv=True, offloads_optimizer=True),
        max_length=8,
        run_dir=Path("a-run"),
        engines=SimpleNamespace(make_trainer=lambda config, max_length, rank, role: Rank(calls)),
    )


@pytest.fixture(autouse=True)
def keep_crash_handler_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.actors.trainer.record_crash_stacks", lambda run_dir, actor: None)


RENDEZVOUS = RendezvousInfo(
    ModelCall("train", POLICY, CallKind.TRAIN, (), ()), "trainer", "localhost", 1
)


@pytest.mark.parametrize("leads", [True, False])
def test_an_offloaded_optimizer_is_in_device_memory_only_while_needed(leads: bool) -> None:
    calls: list[str] = []

    async def main() -> None:
        shared_weights = SharedWeights()
        actor = TrainerActor(shared_weights)
        starting = asyncio.create_task(
            actor.start(make_context(calls), 1, RENDEZVOUS, Path("checkpoint"))
        )
        await shared_weights.wait_for_trainer(10.0)
        # From now on a generator may allocate its memory.
        calls.append("generator comes")
        await starting
        if leads:
            await shared_weights.attach_generator(Generator(calls), should_fill_storage=False)  # type: ignore[arg-type]
        await actor.save_checkpoint(Path("model"), Path("state"))

    asyncio.run(main())
    begins = ["load_training_state", "offload_optimizer", "generator comes"]
    saves = ["save_training_state", "save_model", "offload_optimizer"]
    if leads:
        saves = ["pause for save", "sleep", *saves, "resume from save"]
    assert calls == [*begins, *saves]


def test_a_generator_that_may_sample_keeps_its_kv_cache() -> None:
    calls: list[str] = []

    async def main() -> None:
        shared_weights = SharedWeights()
        actor = TrainerActor(shared_weights)
        await actor.start(make_context(calls), 1, RENDEZVOUS, None)
        await shared_weights.attach_generator(Generator(calls), should_fill_storage=False)  # type: ignore[arg-type]
        await shared_weights.invalidate_weights()
        for what in ("changed", "sent again"):
            calls.append(what)
            await actor.publish_weights(3, (), False)

    asyncio.run(main())
    changed, again = calls.index("changed"), calls.index("sent again")
    assert "sleep" in calls[changed:again]
    assert "sleep" not in calls[again:]
