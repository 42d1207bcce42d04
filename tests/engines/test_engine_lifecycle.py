"""Start, shutdown and death of engines; vLLM allows one at a time in a process."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm import engine as vllm_engine
from streamrl.engines.vllm.engine import EngineSpec
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.errors import ConfigError, DeadlineError, GenerationError, WeightsError
from tests.engines.flight import SHORT, start_engine
from tests.engines.tiny_qwen import (
    MAX_LENGTH,
    endless_model,
    save,
    tiny_model,
    weights_of,
    worst_error,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("engines")]


@pytest.fixture(autouse=True)
def environment(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in make_vllm_env("cpu").items():
        monkeypatch.setenv(name, value)
    yield
    # A dying thread reports its error to threading's hook after its listener.
    for thread in threading.enumerate():
        if thread.name == "vllm-engine":
            thread.join(timeout=60)


async def test_a_tied_model_needs_each_parameter_once(tmp_path: Path):
    models = {version: tiny_model(tied=True, seed=version) for version in range(3)}
    folder = save(models[0], tmp_path)
    async with start_engine(folder, GeneratorConfig(max_new_tokens=32)) as engine:
        assert engine.version == -1
        with pytest.raises(WeightsError, match="no weights yet"):
            await engine.generate(SHORT, seeds=[1])
        for version, model in models.items():
            weights = weights_of(model)
            assert "lm_head.weight" not in weights
            await engine.load_weights(weights, version)
            rollouts = await engine.generate(SHORT, seeds=range(16))
            assert worst_error(rollouts, models) < 1e-4


@pytest.mark.slow
async def test_replicas_give_the_same_tokens_for_the_same_seeds(tmp_path: Path):
    # The second engine has another seed, fewer slots and so little KV cache that rollouts preempt
    # each other and are resumed.
    model = endless_model(seed=1)
    folder = save(model, tmp_path)
    samples = []
    for seed, config in enumerate(
        (GeneratorConfig(), GeneratorConfig(kv_cache_mb=1, max_concurrent_rollouts=20))
    ):
        async with start_engine(folder, config, seed=seed) as engine:
            await engine.load_weights(weights_of(model), 0)
            calls = (engine.generate(SHORT, seeds=[i], max_new_tokens=150) for i in range(24))
            groups = await asyncio.gather(*calls)
        samples.append([rollout.token_ids.tolist() for (rollout,) in groups])
    assert samples[0] == samples[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_weight_load_that_fails_half_way_fails_pending_and_later_calls(tmp_path: Path):
    model = endless_model(seed=1)
    async with start_engine(save(model, tmp_path), GeneratorConfig()) as engine:
        await engine.load_weights(weights_of(model), 0)
        running = asyncio.gather(
            *(engine.generate(SHORT, seeds=[i], max_new_tokens=500) for i in range(8)),
            return_exceptions=True,
        )
        await asyncio.sleep(0.05)
        # Meta tensors have valid names and shapes and cannot be read.
        broken = {name: tensor.to("meta") for name, tensor in weights_of(model).items()}
        start = time.monotonic()
        with pytest.raises(WeightsError, match=r"version 1 was not loaded: the engine of .* died"):
            await engine.load_weights(broken, 1)
        errors = await running
        # Calls fail at once, not after generator.request_timeout_s.
        assert time.monotonic() - start < GeneratorConfig().request_timeout_s / 10
        assert [type(error) for error in errors] == [GenerationError] * 8
        with pytest.raises(GenerationError, match="died: NotImplementedError: Cannot copy out"):
            await engine.generate(SHORT, seeds=[1])
        with pytest.raises(GenerationError, match="died"):
            await engine.load_weights(weights_of(model), 2)
        assert engine.version == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "failure"),
    [("weights", "version 1 was not loaded"), ("logprobs", "generate: 1 of 1 rollouts")],
)
async def test_work_past_its_deadline_ends_the_engine(tmp_path: Path, work: str, failure: str):
    model = endless_model(seed=1)
    config = GeneratorConfig()
    async with start_engine(save(model, tmp_path), config) as engine:
        await engine.load_weights(weights_of(model), 0)
        config.request_timeout_s = 1e-6
        with pytest.raises(GenerationError, match=f"{failure}.* in 1e-06 s"):
            if work == "weights":
                await engine.load_weights(weights_of(model), 1)
            else:
                await engine.compute_logprobs([SHORT])
        with pytest.raises(GenerationError, match=failure):
            await engine.generate(SHORT, seeds=[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_process_has_at_most_one_engine_and_a_closed_one_raises(tmp_path: Path):
    model = endless_model(seed=1)
    folder = save(model, tmp_path)
    async with start_engine(folder, GeneratorConfig()) as engine:
        with pytest.raises(GenerationError, match="has a generation engine already"):
            await GenerationEngine.start(EngineSpec(folder, GeneratorConfig(), 64, 1))
        await engine.load_weights(weights_of(model), 0)
        running = asyncio.create_task(engine.generate(SHORT, seeds=[1], max_new_tokens=500))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(GenerationError, match="closed"):
            await running
        with pytest.raises(GenerationError, match="closed"):
            await engine.generate(SHORT, seeds=[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("config", "max_length"),
    [(GeneratorConfig(), 2 * MAX_LENGTH), (GeneratorConfig(kv_cache_mb=1, threads=1), 10**6)],
)
async def test_settings_that_do_not_fit_the_model_are_rejected_at_start(
    tmp_path: Path, config: GeneratorConfig, max_length: int
):
    folder = save(tiny_model(tied=True, seed=1), tmp_path)
    with pytest.raises(ConfigError, match="max_model_len"):
        await GenerationEngine.start(EngineSpec(folder, config, max_length))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_start_past_its_deadline_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    release = threading.Event()

    def stuck(spec: EngineSpec) -> None:
        release.wait()
        raise RuntimeError("too late")

    monkeypatch.setattr(vllm_engine, "build_vllm_engine", stuck)
    folder = save(tiny_model(tied=True, seed=1), tmp_path)
    config = GeneratorConfig(start_timeout_s=0.01)
    with pytest.raises(DeadlineError, match=r"did not start .* within 0.01 s"):
        await GenerationEngine.start(EngineSpec(folder, config, MAX_LENGTH))
    release.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_process_without_the_vllm_environment_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    folder = save(tiny_model(tied=True, seed=1), tmp_path)
    with pytest.raises(GenerationError, match="make_vllm_env"):
        await GenerationEngine.start(EngineSpec(folder, GeneratorConfig(), MAX_LENGTH))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_directory_without_a_model_is_rejected(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"cannot start {tmp_path}"):
        await GenerationEngine.start(EngineSpec(str(tmp_path), GeneratorConfig(), MAX_LENGTH))
