"""One rank of many of a large model, on a fake process group and with fake tensors.

Runs in a process of its own, because torch.distributed must not be initialized in pytest's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.memory import LiveBytes
from streamrl.engines.models.stored_weights import StoredModelTensor, StoredWeights, find_owners
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.training_backend import TorchBackend
from streamrl.resharding.boxes import TensorBox

SIZES: dict[str, dict[str, int]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "70B in two layers": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


class PeakBytes(LiveBytes):
    """Counts the bytes of all live storages, except those on the meta device.

    Also except those of DTensor, which plans an operation by trying it on fake tensors of the whole
    shape.
    """

    @contextmanager
    def ignore_planning(self) -> Iterator[None]:
        plan = ShardingPropagator._propagate_tensor_meta_non_cached

        def plan_uncounted(*args: Any) -> Any:
            with self.pause():
                return plan(*args)

        with mock.patch.object(
            ShardingPropagator, "_propagate_tensor_meta_non_cached", plan_uncounted
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # a new tensor only if it is fake
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, tensor: Tensor) -> None:
        # The storage of a fake tensor is on the meta device.
        if tensor.device.type != "meta":
            super()._count(tensor)


class FakeWeights:
    """Weights whose reads allocate as much as those of a file."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._owners = find_owners(model)

    def iter_tensors(self) -> Iterator[StoredModelTensor]:
        for owners in self._owners.values():
            yield StoredModelTensor(owners, self._read_box)

    def _read_box(self, box: TensorBox) -> Tensor:
        return torch.empty(box.shape)


class CountedBackend(TorchBackend):
    """A rank whose shards are fake tensors, which take no memory but are counted."""

    def __init__(
        self,
        module: PreTrainedModel,
        config: TrainerConfig,
        weights: StoredWeights,
        counter: PeakBytes,
    ) -> None:
        # Building a mesh needs real tensors, so only reading and gathering are fake.
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._counter = counter
        super().__init__(module, config, weights)

    def _read_shards(self, weights: StoredWeights) -> None:
        with self._fake_mode, self._counter:
            super()._read_shards(weights)

    def count_publishing(self) -> int:
        """Return the most bytes allocated while every parameter is gathered and then freed."""
        with self._fake_mode, self._counter as counter, counter.ignore_planning():
            counter.peak = counter.live
            for _, tensor in self.full_state():
                del tensor
        return counter.peak


def measure_rank(model: str, world_size: int, tensor_parallel: int, rank: int) -> dict[str, Any]:
    """Return bytes in float32.

    whole: of the model. share: of this rank's shards. largest: of the largest parameter. loading:
    the most that were allocated at any time from the model on the meta device to loaded shards.
    publishing: the most while all parameters were gathered, one after another. misshapen:
    parameters of which the rank holds another shape than it says.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES[model]), dtype=torch.float32)
    sizes = [parameter.numel() * 4 for parameter in module.parameters()]
    config = TrainerConfig(
        backend="torch", world_size=world_size, tensor_parallel=tensor_parallel, zero_stage=3
    )
    with PeakBytes() as counter, counter.ignore_planning():
        backend = CountedBackend(module, config, cast(StoredWeights, FakeWeights(module)), counter)
    loading = counter.peak
    shards = list(backend.iter_shards())
    return {
        "whole": sum(sizes),
        "share": sum(tensor.nbytes for _, tensor, _ in shards),
        "largest": max(sizes),
        "loading": loading,
        "publishing": backend.count_publishing(),
        "misshapen": [name for name, local, shard in shards if tuple(local.shape) != shard.shape],
    }
