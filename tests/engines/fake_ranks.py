"""One of eight ranks of a large model, on a fake process group and with fake tensors.

usage: python -m tests.engines.fake_ranks 7B|70B TENSOR_PARALLEL

Prints bytes in float32: of the model, of this rank's share, of the largest parameter, and the most
that were allocated at any time from the model on the meta device to loaded shards.
"""

import sys
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, LlamaConfig

from streamrl.engines.models.stored_weights import StoredModelTensor, StoredWeights, find_owners
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.fsdp_tp_backend import FsdpTpBackend
from streamrl.resharding.boxes import TensorBox

WORLD = 8
SIZES: dict[str, dict[str, int]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all live storages, except those on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            return NotImplemented
        return tree_map(self._count, func(*args, **(kwargs or {})))

    def _count(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "meta":
            storage = value.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key, None)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return value


class FakeWeights:
    """Weights whose reads allocate as much as those of a file."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._owners = find_owners(model)

    def iter_tensors(self) -> Iterator[StoredModelTensor]:
        for owners in self._owners.values():
            yield StoredModelTensor(owners, self._read_box)

    def _read_box(self, box: TensorBox) -> Tensor:
        return torch.empty(box.shape)


class CountedBackend(FsdpTpBackend):
    """A rank whose shards are fake tensors, which take no memory but are counted."""

    counter = PeakBytes()

    def _read_shards(self, weights: StoredWeights) -> None:
        # Building a mesh needs real tensors, so only reading is fake.
        with FakeTensorMode(allow_non_fake_inputs=True), self.counter:
            super()._read_shards(weights)


def main(model: str, tensor_parallel: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES[model]), dtype=torch.float32)
    sizes = [parameter.numel() * 4 for parameter in module.parameters()]
    config = TrainerConfig(
        backend="torch", world_size=WORLD, tensor_parallel=tensor_parallel, zero_stage=3
    )
    with CountedBackend.counter:
        backend = CountedBackend(module, config, cast(StoredWeights, FakeWeights(module)))
    share = sum(tensor.nbytes for _, tensor, _ in backend.iter_shards())
    print(sum(sizes), share, max(sizes), CountedBackend.counter.peak)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
