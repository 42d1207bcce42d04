"""Start, shutdown and death of engines; vLLM allows one at a time in a process."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.errors import ConfigError, DeadlineError, GenerationError, WeightsError
from tests.engines.flight import SHORT, start_engine
from tests.engines.tiny_qwen import (
    MAX_LENGTH,
    endless_model,
    save,
    tiny_model,
    weights_of,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.xdist_group("engines"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(autouse=True)
def environment(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in make_vllm_env("cpu").items():
        monkeypatch.setenv(name, value)
    yield
    # A dying thread reports its error to threading's hook after its listener.
    for thread in threading.enumerate():
        if thread.name == "vllm-engine":
            thread.join(timeout=60)


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
        # Calls fail at once, not after request_timeout_s.
        assert time.monotonic() - start < GeneratorConfig().request_timeout_s / 10
        assert [type(error) for error in errors] == [GenerationError] * 8
        with pytest.raises(GenerationError, match="died: NotImplementedError: Cannot copy out"):
            await engine.generate(SHORT, seeds=[1])
        with pytest.raises(GenerationError, match="died"):
            await engine.load_weights(weights_of(model), 2)
        assert engine.version == 0


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


async def test_settings_that_do_not_fit_the_model_are_rejected_at_start(tmp_path: Path):
    folder = save(tiny_model(tied=True, seed=1), tmp_path)
    with pytest.raises(ConfigError, match="max_model_len"):
        await GenerationEngine.start(EngineSpec(folder, GeneratorConfig(), 2 * MAX_LENGTH))


async def test_a_start_past_its_deadline_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    release = threading.Event()

    def stuck(spec: EngineSpec) -> None:
        release.wait()
        raise RuntimeError("too late")

    monkeypatch.setattr("streamrl.engines.vllm.engine.build_vllm_engine", stuck)
    folder = save(tiny_model(tied=True, seed=1), tmp_path)
    config = GeneratorConfig(start_timeout_s=0.01)
    with pytest.raises(DeadlineError, match=r"did not start .* within 0.01 s"):
        await GenerationEngine.start(EngineSpec(folder, config, MAX_LENGTH))
    release.set()


async def test_a_process_without_the_vllm_environment_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    folder = save(tiny_model(tied=True, seed=1), tmp_path)
    with pytest.raises(GenerationError, match="make_vllm_env"):
        await GenerationEngine.start(EngineSpec(folder, GeneratorConfig(), MAX_LENGTH))
