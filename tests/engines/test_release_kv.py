"""Sleep and wake up: a paused engine frees its KV cache and rollouts continue afterwards."""

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from streamrl.distributed.devices import synchronize_device
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.messages import Rollout
from tests.engines.flight import SHORT, Engines, Flight, start_engine
from tests.engines.tiny_qwen import endless_model, save, weights_of, worst_error

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.xdist_group("engines")]

KV_MB = 256
MB = 1 << 20
BF16_ERROR = 0.1
"""On a GPU vLLM runs models of float32 in bfloat16."""
SEEDS = range(4)
CONFIG = GeneratorConfig(max_new_tokens=100, max_concurrent_rollouts=8, kv_cache_mb=KV_MB)


def measure_resident_mb() -> float:
    return psutil.Process().memory_info().rss / MB


async def sample(flight: Flight) -> list[Rollout]:
    return await flight.engine.generate(SHORT, seeds=SEEDS)


async def test_rollouts_continue_with_the_same_tokens_after_sleep(engines: Engines):
    flight = await engines.get(CONFIG)
    await flight.load(endless_model(seed=3))
    undisturbed = await sample(flight)
    running = asyncio.create_task(sample(flight))
    await flight.wait_for_steps(30)
    for reason in ("lease", "lease again"):
        await flight.engine.pause(reason)
        before_mb = measure_resident_mb()
        await flight.engine.sleep()
        await flight.engine.sleep()
        assert before_mb - measure_resident_mb() > 0.9 * KV_MB
        assert flight.engine.num_running == len(SEEDS)
        num_steps = flight.log.num_steps
        late = asyncio.create_task(flight.engine.generate(SHORT, seeds=[3], max_new_tokens=5))
        await asyncio.sleep(0.3)
        assert flight.log.num_steps == num_steps and not late.done(), "late requests wait as well"
        await flight.engine.resume(reason)
        await late
        await flight.wait_for_steps(10)
        # Other memory that the process has freed meanwhile is not allocated again.
        assert before_mb - measure_resident_mb() < 0.5 * KV_MB
    disturbed = await running
    for expected, rollout in zip(undisturbed, disturbed, strict=True):
        assert np.array_equal(expected.token_ids, rollout.token_ids)
    assert worst_error(disturbed, flight.models) < 1e-4


@pytest.mark.gpu
async def test_sleep_frees_gpu_memory(tmp_path: Path):
    model = endless_model(seed=3)
    async with start_engine(save(model, tmp_path), CONFIG, device="cuda") as engine:
        await engine.load_weights(weights_of(model), 0)
        running = asyncio.create_task(engine.generate(SHORT, seeds=SEEDS))
        await asyncio.sleep(0.2)
        await engine.pause("lease")
        before, _ = torch.cuda.mem_get_info()
        await engine.sleep()
        after, _ = torch.cuda.mem_get_info()
        assert after - before > 0.9 * KV_MB * MB
        await engine.resume("lease")
        assert worst_error(await running, {0: model}) < BF16_ERROR


@pytest.mark.gpu
async def test_weights_are_written_in_place_on_a_gpu(tmp_path: Path):
    folder = save(endless_model(seed=3), tmp_path)
    async with start_engine(folder, CONFIG, device="cuda") as engine:
        served = await engine.get_storage()
        assert served is not None and served.device.type == "cuda"
        model = endless_model(seed=4)
        trained = weights_of(model)
        for name, box, view in served:
            view.copy_(torch.as_tensor(trained[name])[box.slices])
        synchronize_device()
        assert not (await engine.activate_version(1)).copied_bytes
        rollouts = await engine.generate(SHORT, seeds=SEEDS)
        assert worst_error(rollouts, {1: model}) < BF16_ERROR
