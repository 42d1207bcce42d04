"""Ranks of two replicas, each of two tensor-parallel ranks, with layers in shared host memory."""

import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from streamrl.distributed.process_group import join_process_group
from streamrl.engines.models import layer_offload
from streamrl.engines.models.forward import compute_token_logprobs, iter_layers
from streamrl.engines.models.layer_offload import iter_writable_parameters, keep_layers_on_host
from streamrl.engines.models.tensor_parallel import parallelize_layers
from streamrl.weights.config import RUN_TOKEN_ENV
from streamrl.weights.shared_copies import COPY_PREFIX, SHARED_MEMORY_DIR
from tests.engines.split_model_ranks import load
from tests.engines.tiny_families import make_rows
from tests.simulated_gpu import SimulatedStream

REPLICAS, SPLIT = 2, 2


def score_from_host(rank: int, port: int, family: str, token: str) -> dict[str, Any]:
    """Score with split layers, before and after they move to host memory, then with other weights.

    The rank computes on the CPU, but takes itself to have a GPU.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **{RUN_TOKEN_ENV: token})
    module = load(family, (), "policy").requires_grad_(False)
    join_process_group(rank=rank, world_size=REPLICAS * SPLIT, timeout_s=60.0)
    mesh = init_device_mesh("cpu", (REPLICAS, SPLIT), mesh_dim_names=("data", "tensor"))
    parallelize_layers(module, mesh["tensor"], "trainer")

    def score() -> torch.Tensor:
        ids, mask = make_rows((17, 30), seed=0)
        with torch.inference_mode():
            return compute_token_logprobs(module, ids, mask, temperature=0.7).logprobs

    def scale_parameters(factor: float) -> None:
        with torch.no_grad():
            for _, parameter in iter_writable_parameters(module):
                parameter.mul_(factor)

    def measure_copies() -> int:
        dist.barrier()
        files = SHARED_MEMORY_DIR.glob(f"{COPY_PREFIX}{token}-*")
        num_bytes = sum(file.stat().st_blocks * 512 for file in files)
        dist.barrier()
        return num_bytes

    plain = [score()]
    scale_parameters(2.0)
    plain.append(score())
    scale_parameters(0.5)
    main_stream = SimulatedStream(is_default=True)
    with mock.patch.multiple(
        layer_offload,
        has_local_gpu=lambda: True,
        make_gpu_stream=SimulatedStream,
        get_current_gpu_stream=lambda: main_stream,
        use_gpu_stream=lambda stream: nullcontext(),
    ):
        keep_layers_on_host(module)
        sizes = [measure_copies()]
        found = [score()]
        scale_parameters(2.0)
        found.append(score())
        sizes.append(measure_copies())
    shards = [parameter for layer in iter_layers(module) for parameter in layer.parameters()]
    return {
        "equal": [torch.equal(*pair) for pair in zip(plain, found, strict=True)],
        "changed": not torch.equal(*found),
        "copied": sizes,
        "own_bytes": sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in shards),
        "num_tensors": len(shards),
    }
