"""Forward passes of models whose layers rest in host memory and pass through the GPU.

While layer k computes, a stream of its own copies layer k + 1 to the GPU. Then layer k is dropped,
and layer k + 2 takes its memory, so that the GPU holds two layers at most:

    copies    k         | k + 1     | k + 2     |
    compute     k - 1   | k         | k + 1     |

Events order the two streams; the host waits for neither. The last layer is followed by the first of
the next pass. Processes of a node that hold equal layers, such as replicas, share one pinned copy
(`SharedCopy`). Of layers that tensor parallelism splits, a rank's shards rest.

FSDP2 gathers layers from the ranks' shards, so it copies the shards to the GPU itself: see
`get_fsdp_offload_policy`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from streamrl.distributed.devices import (
    get_current_gpu_stream,
    get_local_device,
    has_local_gpu,
    make_gpu_stream,
    use_gpu_stream,
)
from streamrl.engines.models.forward import iter_layers
from streamrl.errors import ConfigError
from streamrl.weights.shared_copies import SharedCopy, remove_unused_copies

LAYER_OFFLOAD = "layer_offload"
"""Attribute of a model with layers in host memory: its `LayerOffload`."""
ALIGNMENT_BYTES = 256
"""Start of a tensor in a layer's memory, as in torch's allocator."""


def get_fsdp_offload_policy(*, keeps_on_host: bool) -> OffloadPolicy:
    """Return the policy of `fully_shard` for a model whose shards rest in pinned host memory.

    torch copies a layer's shards on a stream of its own before it gathers the layer, while the
    layer before computes. On a CPU nothing changes.
    """
    return CPUOffloadPolicy() if keeps_on_host and has_local_gpu() else OffloadPolicy()


def keep_layers_on_host(model: PreTrainedModel) -> None:
    """Leave the layers of a model in host memory, for forward passes only; the rest uses the GPU.

    Call it once the model is sharded and loaded, on whatever device; of sharded layers, this rank's
    shards move. Layers that FSDP2 shards stay as `get_fsdp_offload_policy` has them. Without a GPU
    nothing changes. Raises ConfigError for a family whose layers transformers does not name, and if
    /dev/shm is too small.
    """
    layers = set(iter_layers(model))
    if not has_local_gpu() or any(isinstance(layer, FSDPModule) for layer in layers):
        return
    if not layers:
        name = type(model).__name__
        raise ConfigError(f"scorer.offload=true: the layers of {name} are unknown; set it to false")
    remove_unused_copies()
    kept = {id(tensor) for layer in layers for tensor in [*layer.parameters(), *layer.buffers()]}
    device = get_local_device()
    model._apply(lambda tensor: tensor if id(tensor) in kept else tensor.to(device))
    named = {name: module for name, module in model.named_modules() if module in layers}
    setattr(model, LAYER_OFFLOAD, LayerOffload(named))


def iter_writable_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model by name, tied ones under each, to be written in turn.

    Write each before the next is taken, and take all: those of a layer in host memory are a copy of
    their own for the time, and shared behind the last of them. No forward pass may run.
    """
    offload: LayerOffload | None = vars(model).get(LAYER_OFFLOAD)
    layers = offload.stop_prefetch() if offload else []
    for layer in layers:
        layer.copy_tensors()
        yield from layer.module.named_parameters(layer.name, remove_duplicate=False)
        layer.share_tensors()
    resting = {id(tensor) for layer in layers for tensor in layer.tensors.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in resting:
            yield name, parameter


class LoadedLayer(NamedTuple):
    """A layer on the GPU: its number, tensors, and the event behind their copy."""

    number: int
    tensors: Mapping[int, Tensor]
    loaded: Any


NOT_LOADED = LoadedLayer(-1, {}, None)


class LayerOffload:
    """Layers of a model in host memory, of which two at most are on the GPU."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = [RestingLayer(layer, name) for name, layer in layers.items()]
        self._stream = make_gpu_stream()
        #: Event behind the last computation with a layer that is no longer on the GPU.
        self._released = get_current_gpu_stream().record_event()
        self._next = NOT_LOADED
        for index, layer in enumerate(layers.values()):
            layer.register_forward_pre_hook(partial(self._begin_layer, index))
            layer.register_forward_hook(partial(self._end_layer, index), always_call=True)

    def _begin_layer(self, index: int, *_: Any) -> None:
        if self._next.number != index:
            self._next = self._load_layer(index)
        get_current_gpu_stream().wait_event(self._next.loaded)
        self._layers[index].use_tensors(self._next.tensors)
        self._next = self._load_layer((index + 1) % len(self._layers))

    def _load_layer(self, index: int) -> LoadedLayer:
        """Queue the copy of a layer to the GPU."""
        # The allocator gives the side stream the memory that the last layer has left.
        self._stream.wait_event(self._released)
        layer = self._layers[index]
        with use_gpu_stream(self._stream):
            block = layer.block.to(get_local_device(), non_blocking=True)
        return LoadedLayer(index, layer.view_block(block), self._stream.record_event())

    def _end_layer(self, index: int, *_: Any) -> None:
        self._layers[index].use_tensors(self._layers[index].tensors)
        self._released = get_current_gpu_stream().record_event()

    def stop_prefetch(self) -> Sequence["RestingLayer"]:
        """Wait for a copy that reads the layers' tensors, forget it, and return the layers."""
        self._stream.synchronize()
        self._next = NOT_LOADED
        return self._layers


class RestingLayer:
    """A layer whose tensors lie one behind the other in a block of host memory.

    tensors: its parameters and buffers, or this rank's shards of them, by an arbitrary key.
    block: uint8, their memory.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        owners = [owner for part in module.modules() for owner in (part._parameters, part._buffers)]
        #: Dicts of the layer's modules, names in them, and keys of the tensors there.
        self._places: list[tuple[dict[str, Any], str, int]] = [
            (owner, name, id(tensor))
            for owner in owners
            for name, tensor in owner.items()
            if tensor is not None
        ]
        self.tensors = {key: owner[name] for owner, name, key in self._places}
        self.share_tensors()

    def use_tensors(self, tensors: Mapping[int, Tensor]) -> None:
        """Make the layer's modules compute with these tensors."""
        for owner, name, key in self._places:
            owner[name] = tensors[key]

    def share_tensors(self) -> None:
        """Move the tensors into a copy that equal layers of other processes share."""
        self.copy_tensors()
        self._shared = SharedCopy(self.block.numpy(), f"scorer.offload=true: {self.name}")
        self._set_block(torch.from_numpy(self._shared.memory))

    @torch.no_grad()
    def copy_tensors(self) -> None:
        """Copy the tensors into memory of this process alone."""
        old = self.tensors
        self._set_block(torch.zeros(sum(map(_measure_slot, old.values())), dtype=torch.uint8))
        for key, tensor in self.tensors.items():
            get_local(tensor).copy_(get_local(old[key]))

    def _set_block(self, block: Tensor) -> None:
        self.block, self.tensors = block, self.view_block(block)
        self.use_tensors(self.tensors)

    def view_block(self, block: Tensor) -> dict[int, Tensor]:
        """Return tensors like the layer's, as views of a block on any device."""
        views, start = dict[int, Tensor](), 0
        for key, tensor in self.tensors.items():
            local = get_local(tensor)
            view = block[start : start + local.nbytes].view(local.dtype).view(local.shape)
            start += _measure_slot(tensor)
            if isinstance(tensor, DTensor):
                # `from_local` would copy a shard in host memory to the GPU.
                view = cast("Any", DTensor)(view, tensor._spec, requires_grad=False)
            is_parameter = isinstance(tensor, nn.Parameter)
            views[key] = nn.Parameter(view, requires_grad=False) if is_parameter else view
        return views


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor is returned whole.

    It is the tensor object itself, whose `data` can be set; `to_local` makes a view.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _measure_slot(tensor: Tensor) -> int:
    """Return the bytes from a tensor's start in a block to the next tensor's."""
    return -(-get_local(tensor).nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
