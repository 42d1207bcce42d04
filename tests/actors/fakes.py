"""Fakes of actors: handles, and the config of a run that none of its files need to exist for."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from streamrl.config.preflight import PreparedRun
from streamrl.config.run_config import ModelConfig, RunConfig
from streamrl.data.config import DataConfig
from streamrl.messages import Array
from streamrl.resharding.storage import ShardStorage
from streamrl.rewards.interface.config import RewardConfig
from streamrl.weights import WeightLoadStats

RECIPE = Path(__file__).parents[2] / "configs" / "grpo_arithmetic.yaml"


class FakeActor:
    """Handle whose `method.remote(...)` runs the method of an object as a task."""

    def __init__(self, target: object) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)
        return SimpleNamespace(remote=lambda *values: asyncio.ensure_future(method(*values)))


def make_config(model_path: str = "model", **settings: Any) -> RunConfig:
    """Make the config of a run whose data need not exist, nor its model where none is read."""
    return RunConfig(
        model=ModelConfig(path=model_path),
        data=DataConfig(train="rows.jsonl"),
        rewards=[RewardConfig("exact")],
        **settings,
    )


def make_prepared(config: RunConfig) -> PreparedRun:
    """Return the prepared run of a config, without prompts."""
    nothing: Any = None
    model_bytes = dict.fromkeys(config.dataflow.calls_by_role, 0)
    return PreparedRun(nothing, {}, 8, model_bytes, ())


class FakeGenerator:
    """Generator that records its calls."""

    def __init__(self, calls: list[Any] | None = None) -> None:
        self.calls: list[Any] = [] if calls is None else calls

    async def get_storage(self) -> ShardStorage:
        self.calls.append("storage")
        return ShardStorage({})

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def pause(self, reason: str) -> None:
        self.calls.append(f"pause for {reason}")

    async def resume(self, reason: str) -> None:
        self.calls.append(f"resume from {reason}")

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        self.calls.append((sorted(tensors), version))
        return WeightLoadStats()

    async def activate_version(self, version: int) -> WeightLoadStats:
        self.calls.append(version)
        return WeightLoadStats()


def make_rollout_columns(tokens: int, seed: Sequence[int] = ()) -> dict[str, Array]:
    """Return the columns of a group of two rollouts."""
    rng = np.random.default_rng(seed)
    return {
        "token_ids": rng.integers(0, 50_000, tokens, np.int32),
        "loss_mask": np.ones(tokens, np.bool_),
        "generator_logprobs": -rng.random(tokens, np.float32),
        "policy_version": np.zeros(tokens, np.int32),
        "lengths": np.array([tokens - 2, 2], np.int32),
        "finish_reason": np.zeros(2, np.int8),
    }
