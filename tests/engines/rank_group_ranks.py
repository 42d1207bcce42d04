"""Processes that each host a trainer rank and a generator, or a shard of one.

The same generators serve a sequence of trainers with different meshes.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from streamrl.distributed.devices import get_local_device
from streamrl.distributed.process_group import join_process_group
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import KV_CACHE_MB_ON_CPU, GeneratorConfig
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.model_trainer import WeightResharder
from streamrl.engines.training.training_backend import TrainingBackend, make_backend
from streamrl.engines.vllm.local_pieces import make_storage
from streamrl.engines.vllm.rank_groups import RankGroup, assign_rank_groups
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.errors import GenerationError, LogprobCheckError
from streamrl.resharding.boxes import count_elements, subtract_boxes
from streamrl.resharding.executors import ReshardingStats
from streamrl.resharding.layouts import TensorShard
from streamrl.resharding.storage import ShardStorage
from tests.engines import tiny_qwen
from tests.engines.tiny_qwen import fill, save

if TYPE_CHECKING:
    from streamrl.engines.vllm.peer_rank import PeerRank

UPDATES = 2
SEEDS = range(6)
MAX_LENGTH = 64
ODD_VOCABULARY = 91
"""Vocabulary size; vLLM pads it to a multiple of 64, and the second of two ranks has 27 tokens.
Trainers do not split it."""
MESHES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": -1},
    "sharded": {"zero_stage": 3},
    "whole": {},
    **{f"zero {stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in range(1, 4)},
}
CAST_MESH = "zero 3"
"""Mesh whose shards are also served in another dtype."""
SEQUENCE = np.array([3, 14, 15, 9, 26, 5, 35, 8, 9, 7], np.int32)
LR = 1e-2
Switch = Callable[[int], ReshardingStats | None]


def make_model(kv_heads: int) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=ODD_VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=kv_heads < 4,
        eos_token_id=2,
    )
    model = Qwen2ForCausalLM(config)
    fill(model, seed=1)
    return model


def trainer_config(mesh: str, world: int) -> TrainerConfig:
    settings = MESHES[mesh]
    if settings.get("tensor_parallel") == -1:
        settings = {"tensor_parallel": world}
    return TrainerConfig(**{"backend": "torch", "world_size": world, **settings})


def generator_config(size: int) -> GeneratorConfig:
    return GeneratorConfig(
        max_new_tokens=20,
        tensor_parallel=size,
        dtype="float32",
        kv_cache_mb=KV_CACHE_MB_ON_CPU,
    )


def write_model(kv_heads: int, folder: Path) -> str:
    return save(make_model(kv_heads), folder, ends=False)


def run_rank(
    rank: int, path: str, port: int, world: int, size: int, meshes: Sequence[str]
) -> dict[str, Any]:
    """Return a rank's results by mesh, and the ranks of its group of `size`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank=rank, world_size=world, timeout_s=120.0)
    rank_group = RankGroup(rank, assign_rank_groups(trainer_config(meshes[0], world), size))
    return {
        "rank_group": rank_group.ranks,
        "meshes": asyncio.run(run_meshes(path, rank_group, meshes)),
    }


async def start_rank(spec: EngineSpec) -> "GenerationEngine | PeerRank":
    """Start the engine if this rank leads its group, or else the rank's part of it."""
    from streamrl.engines.vllm.peer_rank import PeerRank  # loads vLLM

    leads = spec.rank_group is None or spec.rank_group.is_leader
    return await (GenerationEngine.start(spec) if leads else PeerRank.start(spec))


async def run_meshes(path: str, rank_group: RankGroup, meshes: Sequence[str]) -> dict[str, Any]:
    world = dist.get_world_size()
    group = rank_group if rank_group.size > 1 else None
    spec = EngineSpec(path, generator_config(rank_group.size), MAX_LENGTH, rank_group=group)
    engine = await start_rank(spec)
    results: dict[str, Any] = {}
    version = 0
    for mesh in meshes:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        module.to(get_local_device())
        config = trainer_config(mesh, world)
        backend = make_backend(module, config)
        storage = await engine.get_storage()
        assert storage is not None
        switch = partial(WeightResharder(60.0).run, backend, storage)
        results[mesh] = {
            "is_off": await is_resharding_off(backend, storage),
            "is_cast": mesh == CAST_MESH and await casts_shards(backend, storage),
            "updates": [],
            "model_bytes": sum(tensor.nbytes for _, tensor in backend.full_state()),
            "served_bytes": sum(view.nbytes for _, _, view in storage),
            "lacking_bytes": count_lacking_bytes(backend, storage),
        }
        for _ in range(UPDATES + 1):
            is_aliased = rank_group.size == 1 and not backend.has_sharded_params
            update_result = await measure_version(
                engine, backend, None if is_aliased else switch, version
            )
            results[mesh]["updates"].append(update_result)
            version += 1
            await asyncio.to_thread(update, backend, config)
        results[mesh]["aliased_bytes"] = count_aliased_bytes(
            get_weight_loader(engine)._model.parameters(), backend
        )
    await switch_version(engine, backend, None if is_aliased else switch, version)
    if isinstance(engine, GenerationEngine):
        results["tokens"] = await sample_tokens(engine)
    if rank_group.size > 1:
        results["kv_bytes"] = await measure_sleep(engine)
        if isinstance(engine, GenerationEngine):
            results["tokens_after_sleep"] = await sample_tokens(engine)
        results["gathered"] = await load_gathered(engine, backend, version + 1)
        await asyncio.to_thread(dist.barrier)
    return results


async def load_gathered(engine: "GenerationEngine | PeerRank", backend: Any, version: int) -> str:
    """Load gathered parameters, then again past a peer's model; return the error of the latter."""
    full = await asyncio.to_thread(lambda: dict(backend.full_state()))
    loader = get_weight_loader(engine)
    if isinstance(engine, GenerationEngine):
        loaded = await engine.load_weights(full, version)
        loaded.verification.raise_on_difference("the leader")
        assert loaded.verification.num_compared and loaded.copied_bytes
        return ""
    assert await asyncio.to_thread(engine.fill_shard, full)
    pieces = [(name, box, view.clone()) for name, box, view in loader._storage]
    loader._storage = make_storage(pieces, loader._parameters)
    try:
        await asyncio.to_thread(engine.fill_shard, {name: t + 1 for name, t in full.items()})
    except LogprobCheckError as error:
        return str(error)
    return "nothing"


async def is_resharding_off(backend: Any, storage: ShardStorage) -> bool:
    """Return whether resharding is off on all ranks if the storage of one cannot be written."""
    served = storage if dist.get_rank() else None
    return await asyncio.to_thread(WeightResharder(60.0).run, backend, served, 0) is None


class HalvedShards(TrainingBackend):
    """Shards of a backend, in bfloat16."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend

    def iter_shards(self) -> Iterator[tuple[str, torch.Tensor, TensorShard]]:
        for name, tensor, shard in self._backend.iter_shards():
            yield name, tensor.bfloat16(), shard


async def casts_shards(backend: TrainingBackend, storage: ShardStorage) -> bool:
    """Return whether a generator serves bfloat16 shards of a trainer in its own dtype."""
    halved = HalvedShards(backend)
    assert await asyncio.to_thread(WeightResharder(60.0).run, halved, storage, 0) is not None
    full_state = await asyncio.to_thread(lambda: dict(backend.full_state()))
    return all(torch.equal(view, full_state[name].bfloat16().float()) for name, _, view in storage)


def count_aliased_bytes(served_tensors: Iterable[torch.Tensor], backend: Any) -> dict[str, int]:
    """Return bytes by name of parameters that model and optimizer both alias."""
    served_pointers = {tensor.untyped_storage().data_ptr() for tensor in served_tensors}
    model_parameters = dict(backend.module.named_parameters())
    aliased_bytes = {}
    for name, shard, _ in backend.iter_shards():
        parameter = model_parameters[name].detach()
        parameter = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if (
            shard.untyped_storage().data_ptr() in served_pointers
            and parameter.data_ptr() == shard.data_ptr()
        ):
            aliased_bytes[name] = shard.nbytes
    return aliased_bytes


def count_lacking_bytes(backend: Any, storage: ShardStorage) -> int:
    """Return the bytes of served elements that this rank does not train."""
    trained = {name: shard.boxes for name, _, shard in backend.iter_shards()}
    return sum(
        count_elements(subtract_boxes([box], trained.get(name, []))) * view.itemsize
        for name, box, view in storage
    )


def get_weight_loader(engine: "GenerationEngine | PeerRank") -> Any:
    """Return the weights that vLLM holds on this rank."""
    return (
        engine._thread._weight_loader
        if isinstance(engine, GenerationEngine)
        else engine._weight_loader
    )


async def measure_sleep(engine: "GenerationEngine | PeerRank") -> tuple[int, int]:
    """Return the bytes of the KV cache on this rank before and after sleep."""
    if isinstance(engine, GenerationEngine):
        await engine.pause("test")
    before = count_kv_bytes(engine)
    await asyncio.to_thread(dist.barrier)
    if isinstance(engine, GenerationEngine):
        await asyncio.sleep(0.3)  # the peers must wait for the leader
    await engine.sleep()
    after = count_kv_bytes(engine)
    await asyncio.to_thread(dist.barrier)
    if isinstance(engine, GenerationEngine):
        await engine.resume("test")
    return before, after


def count_kv_bytes(engine: "GenerationEngine | PeerRank") -> int:
    rank_engine: Any = engine
    if isinstance(engine, GenerationEngine):
        worker = get_weight_loader(engine)._worker
    else:
        worker = rank_engine._worker.wrapper
    return sum(cache.untyped_storage().nbytes() for cache in worker.model_runner.kv_caches)


async def measure_version(
    engine: "GenerationEngine | PeerRank",
    backend: Any,
    switch: Switch | None,
    version: int,
) -> dict[str, Any]:
    """Return the bytes received for a version, and trainer's and generator's logprobs."""
    results = await switch_version(engine, backend, switch, version)
    ids = torch.from_numpy(SEQUENCE).long().to(get_local_device())
    logits = await asyncio.to_thread(lambda: backend.forward(ids[None]).logits[0, :-1].float())
    trained = torch.log_softmax(logits.detach(), -1).gather(1, ids[1:, None])[:, 0].cpu().numpy()
    if isinstance(engine, GenerationEngine):
        (served,) = await engine.compute_logprobs([SEQUENCE])
        results["difference"] = float(np.abs(served[1:] - trained).max())
        results["logprobs"] = served.tolist()
    await asyncio.to_thread(dist.barrier)
    return results


async def switch_version(
    engine: "GenerationEngine | PeerRank", backend: Any, switch: Switch | None, version: int
) -> dict[str, Any]:
    """Reshard a version into the generator's memory, or else load the trainer's parameters."""
    if switch is None:
        assert isinstance(engine, GenerationEngine)
        loaded = await engine.load_weights(dict(backend.full_state()), version)
        addresses = {name: p.data_ptr() for name, p in backend.module.named_parameters()}
        # A fused parameter of the engine starts at the address of its first part.
        bound: Any = get_weight_loader(engine)._bound_parameters
        unaliased = [
            b.names for b in bound if b.live_tensors[0].data_ptr() != addresses[b.names[0]]
        ]
        return {"copied_bytes": loaded.copied_bytes, "unaliased": unaliased, "bound": len(bound)}
    stats = await asyncio.to_thread(switch, version)
    assert stats is not None
    # All ranks have loaded their part before the next decode step.
    await asyncio.to_thread(dist.barrier)
    if isinstance(engine, GenerationEngine):
        await engine.activate_version(version)
    return {"received_bytes": stats.received_bytes, "copied_bytes": stats.copied_bytes}


async def sample_tokens(engine: GenerationEngine) -> list[list[int]]:
    rollouts = await engine.generate(SEQUENCE, seeds=SEEDS)
    return [rollout.token_ids.tolist() for rollout in rollouts]


def update(backend: Any, config: TrainerConfig) -> None:
    """Change every parameter by a step on different tokens per data-parallel rank."""
    ids = torch.from_numpy(SEQUENCE).long().roll(config.get_dp_rank(dist.get_rank()))[None]
    ids = ids.to(get_local_device())
    backend.backward(backend.forward(ids).logits.square().mean())
    backend.update(divisor=float(config.dp_size), lr=LR)


RANKS = (0, 1)
DYING_CONFIG = GeneratorConfig(max_new_tokens=400, tensor_parallel=len(RANKS))
SAMPLING_S = 0.5


def run_dying_rank(rank: int, path: str, port: int, victim: int, ready_file: Path) -> str:
    """Return the survivor's error; the file `ready_file` appears once the ranks sample."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank=rank, world_size=len(RANKS), timeout_s=120.0)
    spec = EngineSpec(
        path, DYING_CONFIG, tiny_qwen.MAX_LENGTH, rank_group=RankGroup(rank, (RANKS,))
    )
    return asyncio.run(work_until_a_death(rank, spec, victim, ready_file))


async def work_until_a_death(rank: int, spec: EngineSpec, victim: int, ready_file: Path) -> str:
    working: asyncio.Task[Any]
    engine = await start_rank(spec)
    if isinstance(engine, GenerationEngine):
        await engine.use_model_dir(0)
        prompt = tiny_qwen.prompt(5, 14, 6, 18)
        working = asyncio.create_task(engine.generate(prompt, seeds=range(8)))
        await asyncio.sleep(SAMPLING_S)
        ready_file.touch()
    else:
        working = asyncio.create_task(engine.wait_until_closed())
    if rank == victim:
        while not ready_file.exists():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await working
    except GenerationError as error:
        return str(error)
    return "nothing"
