"""An engine under test with a log of the weights that sampled each token."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.messages import Rollout
from streamrl.weights import WeightLoadStats
from streamrl.weights.versions import NUM_SEQUENCES
from tests.engines.tiny_qwen import MAX_LENGTH, prompt, weights_of


class StepLog:
    """Fingerprints of the weights of each token, by request; written by the engine's thread.

    The fingerprint is computed from the model at each step, independent of vLLM's version records.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, list[float]] = defaultdict(list)
        self.num_steps = 0
        self.target: int | None = None
        self.has_command: Callable[[], bool] = lambda: False

    def wrap_build(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `build_vllm_engine` so that the log observes the engine it builds."""

        def build_logged(spec: EngineSpec) -> Any:
            engine = build(spec)
            runner = engine.model_executor.driver_worker.worker.model_runner
            core = engine.engine_core
            get_output = core.get_output

            def get_logged_output() -> Any:
                fingerprint = fingerprint_of(runner.get_model())
                outputs = get_output()
                self.num_steps += 1
                for output in outputs.outputs:
                    name = output.request_id.split("-")[0]
                    self.tokens[name] += [fingerprint] * len(output.new_token_ids)
                self._wait_at_target()
                return outputs

            core.get_output = get_logged_output
            return engine

        return build_logged

    def _wait_at_target(self) -> None:
        """Let a test that waited for this step give its next command before further steps."""
        if self.target is None or self.num_steps < self.target:
            return
        self.target, deadline = None, time.monotonic() + 1.0
        while not self.has_command() and time.monotonic() < deadline:
            time.sleep(0.001)


def fingerprint_of(model: torch.nn.Module) -> float:
    """Return a number that differs between models of different seeds."""
    return float(model.get_parameter("model.norm.weight").detach()[1])


@dataclass
class Flight:
    """An engine, its log and the model of every loaded version."""

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

    async def wait_for_steps(self, num: int) -> None:
        """Wait until the engine has made `num` more steps."""
        self.log.target = target = self.log.num_steps + num
        async with asyncio.timeout(60):
            while self.log.num_steps < target:
                await asyncio.sleep(0.001)

    def logged_versions(self, number: int, num_rollouts: int) -> list[list[int]]:
        """Return the logged versions of the tokens of each rollout of a request."""
        versions = {fingerprint_of(model): version for version, model in self.models.items()}
        names = [f"{number}:{index}" for index in range(num_rollouts)]
        return [[versions[fingerprint] for fingerprint in self.log.tokens[name]] for name in names]


def sampled_versions(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Return the versions that the rollouts record for their tokens."""
    return [rollout.policy_version[rollout.loss_mask].tolist() for rollout in rollouts]


@asynccontextmanager
async def start_engine(
    folder: str, config: GeneratorConfig, *, seed: int = 0, device: str = "cpu", **settings: Any
) -> AsyncIterator[GenerationEngine]:
    """Start an engine of a model directory in vLLM's environment; close it at the end.

    `settings` are those of its EngineSpec.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in make_vllm_env(device).items():
            patch.setenv(name, value)
        from vllm.model_executor.models import registry  # loads vLLM

        # vLLM would start a Python that imports it again to look at each class of models.
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        engine = await GenerationEngine.start(
            EngineSpec(folder, config, MAX_LENGTH, seed, **settings)
        )
        try:
            yield engine
        finally:
            await engine.close()


SHORT = prompt(5, 14, 6, 18)
LONG = prompt(*(4 + i * i % 57 for i in range(300)))
CONCURRENT = 64
# The engine adds slots for a logprob check.
WIDE = GeneratorConfig(max_new_tokens=150, max_concurrent_rollouts=CONCURRENT - NUM_SEQUENCES)
"""Settings of the engine that most tests share."""
POLICIES: Mapping[str, dict[str, Any]] = {
    "keep": {"should_keep_kv": True},
    # Last, as most other tests share this engine.
    "recompute": {},
}


class Engines:
    """Provides this process's only engine and keeps it while tests want the same settings.

    The model directory holds the untied tiny model of seed 1.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._exit_stack = AsyncExitStack()
        self._flight: Flight | None = None
        self._kind: object = None

    async def get(self, config: GeneratorConfig, policy: str = "recompute") -> Flight:
        """Return the engine of these settings, started if needed, with no model loaded."""
        kind = (policy, replace(config))
        if self._flight is None or kind != self._kind:
            await self.close()
            context = start_flight(self._folder, policy, replace(config))
            self._flight = await self._exit_stack.enter_async_context(context)
            self._kind = kind
        self._flight.models.clear()
        return self._flight

    async def close(self) -> None:
        """Close the engine, so that a test can start its own."""
        self._flight = None
        await self._exit_stack.aclose()


@asynccontextmanager
async def start_flight(folder: str, policy: str, config: GeneratorConfig) -> AsyncIterator[Flight]:
    """Start an engine with a policy of POLICIES for weight loads."""
    log = StepLog()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in make_vllm_env("cpu").items():
            patch.setenv(name, value)
        from streamrl.engines.vllm import engine as vllm_engine  # loads vLLM

        patch.setattr(
            vllm_engine, "build_vllm_engine", log.wrap_build(vllm_engine.build_vllm_engine)
        )
        spec = EngineSpec(folder, config, MAX_LENGTH, group_size=4, **POLICIES[policy])
        engine = await GenerationEngine.start(spec)
        log.has_command = lambda: not engine._thread._commands.empty()
        try:
            yield Flight(engine, policy, config, log)
        finally:
            await engine.close()
