"""Two processes with a trainer rank and a generation engine each: shared memory and equal results.

vLLM joins the trainers' process group as a replica per rank. The engine stays while trainers of
several backends follow each other.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from streamrl.distributed.process_group import join_process_group
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.fsdp_tp_backend import FsdpTpBackend
from streamrl.engines.training.model_trainer import WeightResharder, make_backend
from streamrl.engines.training.training_backend import TrainingBackend
from streamrl.engines.vllm.engine import EngineSpec
from streamrl.resharding.layouts import TensorShard
from streamrl.resharding.storage import ShardStorage
from tests.engines.moved_ranks import count_aliased_bytes
from tests.engines.tiny_qwen import save, tiny_model

WORLD = 2
UPDATES = 3
ODD_VOCABULARY = 50
"""Vocabulary size; vLLM pads it to a multiple of 64."""
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "deepspeed 0": {"zero_stage": 0},
    "deepspeed 1": {"zero_stage": 1},
    "deepspeed 2": {"zero_stage": 2},
    "deepspeed 3": {"zero_stage": 3},
    "torch, split": {"backend": "torch", "tensor_parallel": WORLD},
}


class HybridCase(NamedTuple):
    """A trainer in the process of the engine."""

    backend: str


SEQUENCE = np.array([3, 14, 15, 9, 26, 5, 35, 8, 9, 7], np.int32)
LR = 1e-2


def write_model(folder: Path) -> str:
    model = tiny_model(tied=True, seed=1, kv_heads=WORLD)
    model.resize_token_embeddings(ODD_VOCABULARY)
    return save(model, folder)


def run_rank(
    rank: int, model_path: str, port: int, cases: Sequence[HybridCase]
) -> dict[str, list[dict[str, Any]]]:
    """Return a rank's results for every version, by backend."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank=rank, world_size=WORLD, timeout_s=120.0)
    return asyncio.run(run_backends(model_path, cases))


async def run_backends(path: str, cases: Sequence[HybridCase]) -> dict[str, list[dict[str, Any]]]:
    engine = await GenerationEngine.start(EngineSpec(path, GeneratorConfig(), 64))
    version = 0
    results: dict[str, list[dict[str, Any]]] = {}
    for (name,) in cases:
        config = TrainerConfig(world_size=WORLD, **BACKENDS[name])
        module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        backend = make_backend(module, config)
        results[name] = []
        fill = await make_fill(engine, backend) if backend.has_sharded_params else None
        for _ in range(UPDATES + 1):
            if fill is None:
                loaded = await engine.load_weights(dict(backend.full_state()), version)
                stats = {"copied_bytes": loaded.copied_bytes}
            else:
                stats = await asyncio.to_thread(fill, version)
                loaded = await engine.activate_version(version)
                assert not loaded.copied_bytes
            version += 1
            results[name].append({**stats, **await measure_version(engine, backend)})
            await engine.pause("update")
            await asyncio.to_thread(update, backend, config)
            await engine.resume("update")
    return results


def get_weight_loader(engine: GenerationEngine) -> Any:
    """Return the weights that an engine holds."""
    return engine._thread._weight_loader


async def is_resharding_off(engine: GenerationEngine, backend: Any) -> bool:
    """Return whether resharding is off on all ranks if the storage of one cannot be written."""
    served = await engine.get_storage() if dist.get_rank() else None
    return await asyncio.to_thread(WeightResharder(60.0).run, backend, served, 0) is None


class HalvedShards(TrainingBackend):
    """Shards of a backend, in bfloat16."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend

    def iter_shards(self) -> Iterator[tuple[str, torch.Tensor, TensorShard]]:
        for name, tensor, shard in self._backend.iter_shards():
            yield name, tensor.bfloat16(), shard


async def casts_shards(engine: GenerationEngine, backend: Any) -> bool:
    """Return whether shards of another dtype are cast when served."""
    served = await engine.get_storage()
    assert served is not None
    halved = HalvedShards(backend)
    assert await asyncio.to_thread(WeightResharder(60.0).run, halved, served, 0) is not None
    full_state = await asyncio.to_thread(lambda: dict(backend.full_state()))
    return all(torch.equal(view, full_state[name].bfloat16().float()) for name, _, view in served)


async def make_fill(engine: GenerationEngine, backend: Any) -> Callable[[int], dict[str, Any]]:
    """Return a function that reshards a version into the engine and counts bytes."""
    is_off, casts = await is_resharding_off(engine, backend), await casts_shards(engine, backend)
    served = await engine.get_storage()
    assert served is not None
    resharder = WeightResharder(60.0)
    if isinstance(backend, FsdpTpBackend):
        return make_fill_in_place(resharder, engine, backend, served)
    local_bytes = sum(tensor.nbytes for _, tensor, _ in backend.iter_shards())
    memory = sum(b.live_tensors[0].nbytes for b in get_weight_loader(engine)._bound_parameters)

    def fill(version: int) -> dict[str, Any]:
        stats = resharder.run(backend, served, version)
        assert stats is not None
        return {
            "version": stats.version,
            "copied_bytes": stats.copied_bytes,
            "received_bytes": stats.received_bytes,
            "in_flight_bytes": stats.peak_bytes - local_bytes - memory,
            "is_off": is_off,
            "is_cast": casts,
            "model_bytes": sum(view.nbytes for _, _, view in served),
        }

    return fill


def make_fill_in_place(
    resharder: WeightResharder,
    engine: GenerationEngine,
    backend: FsdpTpBackend,
    served: ShardStorage,
) -> Callable[[int], dict[str, Any]]:
    """Return such a function for a trainer that moves its shards into the engine's memory."""

    def fill(version: int) -> dict[str, Any]:
        stats = resharder.run(backend, served, version)
        assert stats is not None
        return {
            "copied_bytes": stats.copied_bytes,
            "received_bytes": stats.received_bytes,
            "aliased_bytes": count_aliased_bytes(
                get_weight_loader(engine)._model.parameters(), backend
            ),
            "sizes": {name: view.nbytes for name, _, view in served},
        }

    return fill


def update(backend: Any, config: TrainerConfig) -> None:
    """Change every parameter by a step on different tokens per data-parallel rank."""
    ids = torch.from_numpy(SEQUENCE).long().roll(config.get_dp_rank(dist.get_rank()))[None]
    backend.backward(backend.forward(ids).logits.square().mean())
    backend.step(divisor=float(config.dp_size), lr=LR)


async def measure_version(engine: GenerationEngine, backend: Any) -> dict[str, Any]:
    """Return parameter addresses and the logprobs of trainer and engine for a sequence."""
    (served,) = await engine.compute_logprobs([SEQUENCE])
    ids = torch.from_numpy(SEQUENCE).long()
    with torch.no_grad():
        logits = backend.forward(ids[None]).logits[0, :-1].float()
    trained = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()
    addresses = {name: p.data_ptr() for name, p in backend.module.named_parameters()}
    # A fused parameter of the engine starts at the address of its first part.
    bound = get_weight_loader(engine)._bound_parameters
    return {
        "unaliased": [
            b.names for b in bound if b.live_tensors[0].data_ptr() != addresses[b.names[0]]
        ],
        "bound": len(bound),
        "difference": float(np.abs(served[1:] - trained).max()),
        "logprobs": served.tolist(),
    }
