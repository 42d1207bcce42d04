"""A rank that shares its process with a generator: what it puts aside, and when."""

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
from streamrl.placement import WorkerMemory
from streamrl.rewards.interface.config import RewardConfig
from streamrl.telemetry.spans import SpanRecorder


class Rank:
    """Notes what it is told."""

    gathers = False

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def full_state(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._told.append(name)


class Generator:
    """Notes when it stands still, and when its keys and values go."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    async def release_kv(self) -> None:
        self._told.append("release_kv")

    async def suspend(self, reason: str) -> None:
        self._told.append(f"suspend for {reason}")

    async def resume(self, reason: str) -> None:
        self._told.append(f"resume from {reason}")


def wiring(told: list[str]) -> Any:
    """Of a run whose workers have little room."""
    config = RunConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(train="rows.jsonl"),
        rewards=[RewardConfig("exact")],
    )
    stage = SimpleNamespace(spans=SpanRecorder("trainer-0"))
    return SimpleNamespace(
        config=config,
        stages=lambda calls, name: (stage,),
        train_columns=(),
        memory=WorkerMemory(1, 1, 1, 1, 1, 1, 1, releases_kv=True, offloads_optimizer=True),
        max_length=8,
        run_dir=Path("a-run"),
        engines=SimpleNamespace(trainer=lambda config, max_length, rank, role: Rank(told)),
    )


@pytest.fixture(autouse=True)
def _tests_keep_their_own_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.actors.trainer.record_crash_stacks", lambda run_dir, actor: None)


MEETING = RendezvousInfo(
    ModelCall("train", POLICY, CallKind.TRAIN, (), ()), "trainer", "localhost", 1
)


@pytest.mark.parametrize("leads", [True, False])
def test_whoever_is_to_put_the_optimizer_aside_has_it_only_while_it_is_needed(leads: bool) -> None:
    told: list[str] = []

    async def main() -> None:
        residence = SharedWeights()
        actor = TrainerActor(residence)
        starting = asyncio.create_task(actor.start(wiring(told), 1, MEETING, Path("checkpoint")))
        await residence.wait_for_trainer(10.0)
        # A generator begins to take its memory now.
        told.append("generator comes")
        await starting
        if leads:
            await residence.attach_generator(Generator(told), should_fill_storage=False)  # type: ignore[arg-type]
        await actor.save_checkpoint(Path("model"), Path("state"))

    asyncio.run(main())
    begins = ["load", "offload_optimizer", "generator comes"]
    saves = ["save", "save_model", "offload_optimizer"]
    if leads:
        saves = ["suspend for save", "release_kv", *saves, "resume from save"]
    assert told == [*begins, *saves]


def test_keys_and_values_are_not_taken_from_a_generator_that_may_sample() -> None:
    told: list[str] = []

    async def main() -> None:
        residence = SharedWeights()
        actor = TrainerActor(residence)
        await actor.start(wiring(told), 1, MEETING, None)
        await residence.attach_generator(Generator(told), should_fill_storage=False)  # type: ignore[arg-type]
        await residence.invalidate_weights()
        for what in ("changed", "sent again"):
            told.append(what)
            await actor.publish_weights(3, (), False)

    asyncio.run(main())
    changed, again = told.index("changed"), told.index("sent again")
    assert "release_kv" in told[changed:again]
    assert "release_kv" not in told[again:]
