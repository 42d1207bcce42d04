"""An engine under test with a log of its own: which request got a token under which weights."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from streamrl.engines.generation.generator import GenerationEngine, GeneratorConfig, WeightLoadStats
from streamrl.engines.vllm import engine as vllm_engine
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.messages import Rollout
from streamrl.weights import logprob_probe
from tests.engines.tiny_qwen import MAX_LENGTH, weights_of


class StepLog:
    """Written by the engine's thread: per request, a fingerprint of the weights of each token.

    The fingerprint is read from the model itself at each step, not from what vLLM says is loaded.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, list[float]] = defaultdict(list)
        self.num_steps = 0

    def watched(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """`build_vllm_engine`, with the log tied to the engine it builds."""

        def build_watched(spec: vllm_engine.EngineSpec) -> Any:
            engine = build(spec)
            runner = engine.model_executor.driver_worker.worker.model_runner
            core = engine.engine_core
            get_output = core.get_output

            def logged() -> Any:
                print_now = fingerprint_of(runner.get_model())
                outputs = get_output()
                self.num_steps += 1
                for output in outputs.outputs:
                    name = output.request_id.split("-")[0]
                    self.tokens[name] += [print_now] * len(output.new_token_ids)
                return outputs

            core.get_output = logged
            return engine

        return build_watched


def fingerprint_of(model: torch.nn.Module) -> float:
    """A number that tells the models of different seeds apart."""
    return float(model.get_parameter("model.norm.weight").detach()[1])


@dataclass
class Flight:
    """An engine, its log and the model of every version it was given."""

    engine: GenerationEngine
    policy: str
    config: GeneratorConfig
    log: StepLog
    models: dict[int, PreTrainedModel] = field(default_factory=dict)

    async def load(self, model: PreTrainedModel) -> WeightLoadStats:
        """Load the model as the next version."""
        version = max(self.engine.version, *self.models, -1) + 1
        self.models[version] = model
        return await self.engine.load_weights(weights_of(model), version)

    async def steps(self, num: int) -> None:
        """Wait until the engine has made so many steps more."""
        wanted = self.log.num_steps + num
        async with asyncio.timeout(60):
            while self.log.num_steps < wanted:
                await asyncio.sleep(0.001)

    def logged_versions(self, number: int, num_rollouts: int) -> list[list[int]]:
        """By the log, the versions of the tokens of each rollout of a request."""
        versions = {fingerprint_of(model): version for version, model in self.models.items()}
        names = [f"{number}:{index}" for index in range(num_rollouts)]
        return [[versions[seen] for seen in self.log.tokens[name]] for name in names]


def sampled_versions(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """What the rollouts say of the versions of their tokens."""
    return [rollout.policy_version[rollout.loss_mask].tolist() for rollout in rollouts]


CONCURRENT = 64
# The engine itself runs a probe more than it is asked for.
WIDE = GeneratorConfig(
    max_new_tokens=150, max_concurrent_rollouts=CONCURRENT - logprob_probe.NUM_SEQUENCES
)
"""Settings of the engine that most tests share."""
POLICIES: Mapping[str, dict[str, bool]] = {
    "recompute": {},
    "keep": {"should_keep_kv": True},
    "drain": {"should_drain": True},
}


class Engines:
    """The engine of this process, kept for as long as tests want one of its kind: vLLM allows one.

    Its model directory holds the untied tiny model of seed 1.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._kept = AsyncExitStack()
        self._flight: Flight | None = None
        self._kind: object = None

    async def get(self, config: GeneratorConfig, policy: str = "recompute") -> Flight:
        """The engine of these settings, started if it is not there, with no model noted."""
        kind = (policy, replace(config))
        if self._flight is None or kind != self._kind:
            await self.close()
            flying_one = flying(self._folder, policy, replace(config))
            self._flight = await self._kept.enter_async_context(flying_one)
            self._kind = kind
        self._flight.models.clear()
        return self._flight

    async def close(self) -> None:
        """Make room for an engine of a test's own."""
        self._flight = None
        await self._kept.aclose()


@asynccontextmanager
async def flying(folder: str, policy: str, config: GeneratorConfig) -> AsyncIterator[Flight]:
    """An engine that goes over to new weights in one of the ways of POLICIES."""
    log = StepLog()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in make_vllm_env("cpu").items():
            patch.setenv(name, value)
        patch.setattr(vllm_engine, "build_vllm_engine", log.watched(vllm_engine.build_vllm_engine))
        engine = await GenerationEngine.start(
            folder, config, seed=0, max_length=MAX_LENGTH, **POLICIES[policy]
        )
        try:
            yield Flight(engine, policy, config, log)
        finally:
            await engine.close()
