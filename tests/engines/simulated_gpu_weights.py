"""Areas of the simulated GPU that load versions into a generator, and what copies there need."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from streamrl.distributed.devices import get_local_device, pin_host_memory
from streamrl.engines.generation import generation_engine
from streamrl.engines.models.forward import load_model
from streamrl.engines.vllm import weight_loader
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.vllm.local_pieces import find_local_pieces
from streamrl.engines.vllm.rank_groups import RankGroup
from streamrl.messages import Columns
from streamrl.weights import LoadVerification
from streamrl.weights.parameters import LORA_A_SUFFIX, LORA_B_SUFFIX, LORA_SCALE, ParameterSet
from streamrl.weights.rank_slices import iter_slices
from streamrl.weights.shared_files import share_tensors
from tests.simulated_gpu import GPU_0, GpuModule, SimulatedGpu

Groups = Mapping[str, Columns]
ADAPTED = "model.layers.0.mlp.down_proj"


class FakeWorker:
    """Worker of vLLM with a model that has the layout of the checkpoint, on the GPU.

    placed: devices of the tensors that its loader got, those of adapted layers.
    """

    streamrl_loader: weight_loader.WorkerLoader

    def __init__(self, path: str) -> None:
        # As vLLM does, whatever the loader of trainers' models does.
        self.model: Any = load_model(path, dtype=torch.float32).to(torch.device(GPU_0))
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(quantization=None),
            parallel_config=SimpleNamespace(rank=0, world_size=1),
        )
        self.placed = set[str]()
        self.lock = threading.Lock()

    def get_model(self) -> Any:
        return self.model

    @torch.no_grad()
    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in weights_iterator:
            if name.startswith(ADAPTED):
                self.placed.add(tensor.device.type)
            parameters[name].copy_(tensor)

    def set_parameters(self, tensors: Mapping[str, Tensor]) -> tuple[int, LoadVerification]:
        self.reload_weights(weights_iterator=tensors.items())
        return 0, LoadVerification()


def make_adapter(path: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the published tensors of an adapter on the GPU, and the weight merged by hand."""
    weight = dict(load_model(path, dtype=torch.float32).named_parameters())[f"{ADAPTED}.weight"]
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(2, weight.shape[1], generator=generator)
    b = torch.randn(weight.shape[0], 2, generator=generator)
    published = {
        ADAPTED + LORA_A_SUFFIX: a.to(GPU_0),
        ADAPTED + LORA_B_SUFFIX: b.to(GPU_0),
        LORA_SCALE: torch.tensor(0.5),
    }
    return published, weight.detach().cpu() + 0.5 * b @ a


def load_by_worker(path: str, groups: Groups) -> dict[str, Any]:
    """Load an adapter by the loader in a worker's process, then full weights."""
    worker, (published, expected) = FakeWorker(path), make_adapter(path)
    parameters = ParameterSet.from_module(worker.model)
    weight_loader.start_worker_loader(worker, parameters, path, True)
    with share_tensors(published) as files:
        before = SimulatedGpu.host_bytes
        load = weight_loader.load_from_files(worker, files, is_sliced=False)
        host_bytes = SimulatedGpu.host_bytes - before
    held = worker.model.get_parameter(f"{ADAPTED}.weight")
    return {
        "difference": float((held.detach().cpu() - expected).abs().max()),
        "placed": sorted(worker.placed),
        "compared": load.verification.num_compared,
        "differing": list(load.verification.differing_names),
        "host_bytes": host_bytes,
        "bound": worker.streamrl_loader.rank_loader._storage is not None,
        "bytes": sum(parameter.nbytes for parameter in worker.model.parameters()),
    }


def load_slices(path: str, groups: Groups) -> dict[str, Any]:
    """Load a version, then the slices of the next, by the loader in a worker's process."""
    worker = FakeWorker(path)
    parameters = ParameterSet.from_module(worker.model)
    first = {n: torch.rand(parameters.shapes[n]) for n in parameters.unique_names}
    weight_loader.start_worker_loader(worker, parameters, path, False)
    with share_tensors(first) as files:
        layout = weight_loader.load_from_files(worker, files, is_sliced=False).layout
    second = {name: tensor + 1 for name, tensor in first.items()}
    with share_tensors(dict(iter_slices(0, layout, second))) as files:
        load = weight_loader.load_from_files(worker, files, is_sliced=True)
    held = worker.model.get_parameter(f"{ADAPTED}.weight")
    return {
        "difference": float((held.detach().cpu() - second[f"{ADAPTED}.weight"]).abs().max()),
        "compared": load.verification.num_compared,
        "differing": list(load.verification.differing_names),
        "bytes": load.num_bytes - sum(tensor.nbytes for tensor in second.values()),
    }


def load_by_peer(path: str, groups: Groups) -> dict[str, Any]:
    """Load an adapter into a rank of a generator in the trainer's process."""
    os.environ.update(make_vllm_env("cpu"))
    from streamrl.engines.vllm.peer_rank import PeerRank  # loads vLLM

    worker, (published, expected) = FakeWorker(path), make_adapter(path)
    peer: Any = PeerRank.__new__(PeerRank)
    peer._worker = peer._weight_loader = worker
    peer._parameters = ParameterSet.from_module(worker.model)
    peer._spec = SimpleNamespace(model_path=path, rank_group=RankGroup(0, ((0, 1),)))
    peer.fill_shard(published)
    held = worker.model.get_parameter(f"{ADAPTED}.weight")
    difference = float((held.detach().cpu() - expected).abs().max())
    return {"difference": difference, "placed": sorted(worker.placed)}


def build_for_engine(path: str, groups: Groups) -> dict[str, Any]:
    """Build all parameters for an engine from those of an adapter."""
    published, expected = make_adapter(path)
    parameters = ParameterSet.from_module(load_model(path, dtype=torch.float32))
    full = asyncio.run(generation_engine._build_weights(published, parameters, path))
    merged = full[f"{ADAPTED}.weight"]
    return {
        "difference": float((merged.cpu() - expected).abs().max()),
        "placed": [merged.device.type],
    }


class Scaled(torch.nn.Module):
    """A model with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))
        self.layer = torch.nn.Linear(4, 4, bias=False)


def find_pieces(path: str, groups: Groups) -> dict[str, int]:
    """Find the parameters of a model on the GPU among those of the CPU, by their values."""
    model = Scaled()
    parameters = ParameterSet.from_module(model)
    stored = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    served = model.to(get_local_device())
    found = len(find_local_pieces(served, parameters, stored))
    stored["scale"] += 1
    return {"found": found, "of other values": len(find_local_pieces(served, parameters, stored))}


def fail_to_pin(path: str, groups: Groups) -> dict[str, Any]:
    """Fail to pin memory; the next operation on the GPU is none the worse for it."""
    with mock.patch.object(GpuModule, "can_pin", False):
        is_pinned = pin_host_memory(0, 1)
    return {"pinned": is_pinned, "sum": float(torch.ones(3, device=GPU_0).sum())}


AREAS: Mapping[str, Callable[[str, Groups], Any]] = {
    "worker": load_by_worker,
    "slices": load_slices,
    "peer": load_by_peer,
    "engine": build_for_engine,
    "pieces": find_pieces,
    "pinning": fail_to_pin,
}
