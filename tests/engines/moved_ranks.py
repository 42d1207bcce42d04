"""Two tensor-parallel ranks, with own memory and aliasing a generator's storage laid out as vLLM's.

Runs in child processes, because torch.distributed must not be initialized in pytest's process.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from streamrl.distributed.process_group import join_process_group
from streamrl.engines.checkpoint.sharded_state import load_state, save_state
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.fsdp_tp_backend import FsdpTpBackend
from streamrl.engines.training.model_trainer import WeightResharder
from streamrl.engines.training.optimizer_offload import OptimizerOffload
from streamrl.resharding.boxes import TensorBox
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import ParameterSet
from tests.engines.mesh_ranks import make_model

WORLD = 2
UPDATES = 4
LR = 1e-2
SPLIT = {"tensor_parallel": WORLD}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    # Model, trainer, and tensor-parallel size of the generator.
    "served in the same parts": ("qwen2", SPLIT, WORLD),
    "served whole": ("qwen2 tied", SPLIT, 1),
    "sharded by FSDP2": ("qwen2", {"zero_stage": 3}, 1),
}
FUSED = {
    **{f"{name}_proj": "qkv_proj" for name in "qkv"},
    **{f"{name}_proj": "gate_up_proj" for name in ("gate", "up")},
}


def run_rank(rank: int, folder: Path, port: int) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank=rank, world_size=WORLD, timeout_s=60.0)
    results = {}
    for case, (model, settings, parts) in CASES.items():
        config = TrainerConfig(backend="torch", world_size=WORLD, **settings)
        parameters = ParameterSet.from_module(make_model(model))
        shard_index = rank if parts > 1 else 0
        served = allocate_generator(parameters, parts, shard_index)
        files = folder / case
        files.mkdir(exist_ok=True)
        separate = train(model, config, files, None)
        results[case] = {"separate": separate, "aliased": train(model, config, files, served)}
    return results


def allocate_generator(parameters: ParameterSet, parts: int, shard_index: int) -> ShardStorage:
    """Allocate a shard of a generator: q, k and v fused, gate and up fused."""
    boxes = {
        name: make_shard_box(name, parameters.shapes[name], parts, shard_index)
        for name in parameters.unique_names
    }
    fused: dict[str, list[str]] = {}
    for name in boxes:
        path, _, kind = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        fused.setdefault(f"{parent}.{FUSED.get(module, module)}.{kind}", []).append(name)
    views = {}
    for names in fused.values():
        rows = [boxes[name].shape[0] for name in names]
        # An embedding has padding rows after the vocabulary.
        padding = 3 * ("embed" in names[0])
        buffer = torch.full((sum(rows) + padding, *boxes[names[0]].shape[1:]), torch.nan)
        for name, view in zip(names, buffer[: sum(rows)].split(rows), strict=True):
            views[name] = [(boxes[name], view)]
    return ShardStorage(views)


def make_shard_box(name: str, shape: tuple[int, ...], parts: int, shard_index: int) -> TensorBox:
    path, _, kind = name.rpartition(".")
    by_rows = path.endswith((*FUSED, "embed_tokens", "lm_head"))
    by_columns = path.endswith(("o_proj", "down_proj")) and kind == "weight"
    if not (by_rows or by_columns):
        return TensorBox.from_shape(shape)
    dim = 0 if by_rows else 1
    size = shape[dim] // parts
    return TensorBox.from_shape(shape).narrow(dim, shard_index * size, (shard_index + 1) * size)


def train(
    model: str, config: TrainerConfig, folder: Path, served: ShardStorage | None
) -> dict[str, Any]:
    """Run updates with a version after each, then repeat the last update from a checkpoint.

    The optimizer has state when the parameters move, and is offloaded between updates.
    """
    backend = FsdpTpBackend(make_model(model), config)
    offload = OptimizerOffload(
        backend.iter_optimizer_state,
        excluding=lambda: (shard for _, shard, _ in backend.iter_shards()),
    )
    switch = WeightResharder(60.0)
    generator = torch.Generator().manual_seed(1)
    results: dict[str, Any] = {"norms": [], "transfers": [], "served": []}
    for update in range(UPDATES):
        if update == UPDATES - 1:
            # Wait for all ranks' files: loading reads all of them.
            num_steps = save_state(
                folder, dist.get_rank(), backend.iter_fragments(), backend.optimizer
            )
        ids = torch.randint(0, 64, (4, 12), generator=generator)
        results["norms"].append(step(backend, ids))
        offload.offload_state()
        if served is not None:
            stats = switch.run(backend, served, update)
            assert stats is not None
            results["transfers"].append((stats.copied_bytes, stats.received_bytes))
            results["served"].append(is_served(backend, served))
        offload.restore_state()
    results["parameters"] = copy_full_state(backend)
    if served is not None:
        results["aliased_bytes"] = count_aliased_bytes((view for _, _, view in served), backend)
        results["count_storage_bytes"] = count_storage_bytes(backend, served)
    fragments, optimizer = backend.iter_fragments(), backend.optimizer
    load_state(folder, num_steps, fragments, optimizer, backend.iter_shards())
    step(backend, ids)
    results["again"] = copy_full_state(backend)
    return results


def step(backend: FsdpTpBackend, ids: torch.Tensor) -> float:
    loss = backend.forward(ids, use_cache=False).logits.log_softmax(-1).square().sum()
    backend.backward(loss)
    return backend.step(divisor=4.0, lr=LR)


def copy_full_state(backend: FsdpTpBackend) -> Mapping[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.full_state()}


def is_served(backend: FsdpTpBackend, served: ShardStorage) -> bool:
    """Return whether the generator's storage holds the trainer's values."""
    trained = copy_full_state(backend)
    return all(view.equal(trained[name][box.slices]) for name, box, view in served)


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


def count_storage_bytes(backend: FsdpTpBackend, served: ShardStorage) -> int:
    """Return the bytes of all distinct storages of trained and served parameters."""
    tensors = [view for _, _, view in served] + [shard for _, shard, _ in backend.iter_shards()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())
