"""Weights of a forward-only model's decoder layers in host memory, for models larger than a GPU.

Each layer computes with a copy that exists during its own forward pass; the copies of a model pass
from pinned memory on the stream that computes. Embeddings, norms and the head stay on the GPU.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from streamrl.distributed.devices import get_local_device
from streamrl.engines.models.decoder_layers import iter_layers
from streamrl.errors import ConfigError
from streamrl.weights.pinned_memory import copy_to_pinned

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def keep_layers_on_host(model: "PreTrainedModel") -> None:
    """Pin the weights of the layers of a model on the CPU; move all else to the local device.

    Raises ConfigError for a family whose layers transformers does not name.
    """
    layers = list(iter_layers(model))
    if not layers:
        name = type(model).__name__
        raise ConfigError(f"scorer.offload=true: the layers of {name} are unknown; set it to false")
    kept = {id(tensor) for layer in layers for tensor in _list_tensors(layer)}
    device = get_local_device()
    model._apply(lambda tensor: tensor if id(tensor) in kept else tensor.to(device))
    for layer in layers:
        for tensor in _list_tensors(layer):
            tensor.data = copy_to_pinned(tensor.data)
        offload = _LayerOffload(layer)
        layer.register_forward_pre_hook(offload.onload)
        layer.register_forward_hook(offload.restore, always_call=True)


def _list_tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


class _LayerOffload:
    """Replaces a layer's tensors on the host by copies on the local device for a forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        #: The places of the tensors: dicts of the layer's modules, and names in them.
        self._places: list[tuple[dict[str, Any], str, Tensor]] = [
            (tensors, name, tensor)
            for module in layer.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]

    def onload(self, *_: Any) -> None:
        device = get_local_device()
        for tensors, name, tensor in self._places:
            tensors[name] = tensor.detach().to(device, non_blocking=True)

    def restore(self, *_: Any) -> None:
        for tensors, name, tensor in self._places:
            tensors[name] = tensor
