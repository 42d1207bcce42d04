"""Ranks that load a model without ever holding it whole, and report the parameters they loaded.

Runs in child processes, because torch.distributed must not be initialized in pytest's process.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from streamrl.distributed.process_group import join_process_group
from streamrl.engines.models.forward import (
    ModelLoadOptions,
    load_model,
    load_two_headed_model,
    load_value_model,
)
from streamrl.engines.models.lora import add_lora_adapters
from streamrl.engines.models.stored_weights import StoredWeights
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.training_backend import make_backend

WORLD = 3
"""Divides few sizes, so that shards are padded and some ranks have none."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "torch", "zero_stage": 3},
    "zero3": {"backend": "deepspeed", "zero_stage": 3},
}
LOADERS: dict[str, Callable[..., Any]] = {
    "policy": load_model,
    "critic": load_value_model,
    "two heads": load_two_headed_model,
}
Loaded = dict[str, torch.Tensor]


def load_rank(
    rank: int,
    ports: Sequence[int],
    paths: Sequence[str],
    layout: str,
    kind: str,
    lora_rank: int,
    world: int = WORLD,
) -> list[tuple[Loaded, Loaded]]:
    """Load each directory sharded, and the usual way; return parameters and buffers of both."""
    config = TrainerConfig(world_size=world, lora_rank=lora_rank, **LAYOUTS[layout])
    options = ModelLoadOptions(max_length=512)
    results = []
    for path, port in zip(paths, ports, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        join_process_group(rank=rank, world_size=world, timeout_s=60.0)
        loaded = []
        for on_meta in (True, False):
            torch.manual_seed(0)
            module = LOADERS[kind](
                path, dtype=torch.float32, options=replace(options, on_meta=on_meta)
            )
            weights = StoredWeights(module, path) if on_meta else None
            if lora_rank:
                add_lora_adapters(module, config)
            for parameter in module.parameters():
                parameter.requires_grad_(True)  # full_state has the trained ones
            if on_meta:
                backend = make_backend(module, config, weights)
                parameters: Loaded = dict(backend.full_state())
            else:
                parameters = dict(module.named_parameters())
            tensors = parameters | dict(module.named_buffers())
            loaded.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
        results.append((loaded[0], loaded[1]))
        backend.close()
    return results
