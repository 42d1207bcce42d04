"""Low-rank adapters on their way: what travels in place of whole weights, and the merge at its end.

A trainer of adapters publishes these and what else it trains (a value head); the rest everybody has
in the model directory the run started from. Of a linear layer with weight W0 [out, in] come two
tensors, A [rank, in] and B [out, rank], under the names peft gives them, and for all layers one
scale. The trainer computes with W0 + scale B A (arXiv:2106.09685, section 4.1); whoever follows it
puts that sum in the place of W0. It is made of W0 every time, so no rounding adds up.
"""

import functools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from streamrl.errors import WeightsError
from streamrl.files.hf_config import is_trusted, list_weight_files
from streamrl.messages import Array
from streamrl.weights.parameters import ParameterSet, as_tensor

LORA_A_SUFFIX = ".lora_A.default.weight"
LORA_B_SUFFIX = ".lora_B.default.weight"
LORA_SCALE = "lora_scale"


@dataclass(frozen=True)
class LoraAdapter:
    """What is added to the weight of a layer: `scale` B A, of A [rank, in] and B [out, rank]."""

    lora_a: Tensor
    lora_b: Tensor
    scale: float

    def fits_weight(self, weight: Tensor) -> bool:
        """Whether it has the shape to be added to this."""
        (rank, num_in), (num_out, inner) = self.lora_a.shape, self.lora_b.shape
        return rank == inner and tuple(weight.shape) == (num_out, num_in)

    def compute_merged(self, weight: Tensor) -> Tensor:
        """W0 + scale B A in float32, whatever these come in; `weight` stays as it is."""
        a, b = (part.to(weight.device, torch.float32) for part in (self.lora_a, self.lora_b))
        return torch.addmm(weight.float(), b, a, alpha=self.scale)


class MergedWeights(Mapping[str, Tensor]):
    """A full set of parameters, of which the adapted ones are computed whenever they are asked for.

    These are float32, on `device`; the others are as they were stored. One that goes through it and
    keeps nothing never has a second model in memory.
    """

    def __init__(
        self,
        stored: Mapping[str, Tensor],
        adapters: Mapping[str, LoraAdapter],
        device: torch.device,
    ) -> None:
        self._stored = stored
        self._adapters = adapters
        self._device = device

    @property
    def merged_names(self) -> Set[str]:
        """Names of those that are computed, and lie nowhere before they are asked for."""
        return self._adapters.keys()

    def __getitem__(self, name: str) -> Tensor:
        weight = self._stored[name]
        adapter = self._adapters.get(name)
        return weight if adapter is None else adapter.compute_merged(weight.to(self._device))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def build_full_weights(
    published: Mapping[str, Tensor | Array],
    parameters: ParameterSet,
    *,
    model_path: str,
    device: torch.device,
) -> Mapping[str, Tensor]:
    """All parameters of a model, of what its trainer has published.

    That is all of them, or adapters, to be merged on `device` into what `model_path` holds. Raises
    WeightsError if parameters are missing or unknown, or a shape is not the model's.
    """
    if LORA_SCALE not in published:
        return parameters.expand_tied(published)
    adapters, whole = split_adapters(published)
    try:
        full = parameters.expand_tied(
            {**_drop_unknown(load_stored_weights(model_path), parameters), **whole}
        )
    except WeightsError as error:
        try:
            loaded = _load_parameters(model_path)
        except (OSError, ValueError):
            raise error from None
        full = parameters.expand_tied({**_drop_unknown(loaded, parameters), **whole})
    for name, adapter in adapters.items():
        if name not in full or not adapter.fits_weight(full[name]):
            shapes = f"A {tuple(adapter.lora_a.shape)} and B {tuple(adapter.lora_b.shape)}"
            raise WeightsError(f"{shapes} fit no weight of the model, came for {name}")
    return MergedWeights(full, adapters, device)


def _drop_unknown(stored: Mapping[str, Tensor], parameters: ParameterSet) -> dict[str, Tensor]:
    """Leave out what a model has not, as a critic the head of the language model it began as."""
    return {name: tensor for name, tensor in stored.items() if name in parameters.shapes}


@functools.lru_cache(1)
def _load_parameters(model_path: str) -> Mapping[str, Tensor]:
    """Load the parameters of a model whose files keep them by other names, or in other shapes.

    They stay in memory: transformers makes them anew, as all experts' weights in one.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype="auto", trust_remote_code=is_trusted(model_path)
    )
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named}


def split_adapters(
    published: Mapping[str, Tensor | Array],
) -> tuple[dict[str, LoraAdapter], dict[str, Tensor]]:
    """The adapters, by the name of the weight each changes, and what was trained whole."""
    whole = {name: as_tensor(value) for name, value in published.items()}
    scale = whole.pop(LORA_SCALE).item()
    layers = [name.removesuffix(LORA_A_SUFFIX) for name in whole if name.endswith(LORA_A_SUFFIX)]
    adapters = {
        f"{layer}.weight": LoraAdapter(
            whole.pop(layer + LORA_A_SUFFIX), whole.pop(layer + LORA_B_SUFFIX), scale
        )
        for layer in layers
        if layer + LORA_B_SUFFIX in whole
    }
    return adapters, whole


def load_stored_weights(model_path: str) -> dict[str, Tensor]:
    """The tensors in a Hugging Face directory, mapped into memory: none is read before it is used.

    What is read lies in the system's file cache, which gives it up where memory is short.
    """
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in list_weight_files(Path(model_path)):
        tensors |= load_file(file)
    return tensors
