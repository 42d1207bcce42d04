"""LoRA adapters in transit: the trainer publishes adapters, followers merge them into base weights.

A LoRA trainer publishes its adapters and other trained tensors (a value head). Every follower
already has the base model's directory. A linear layer with weight W0 [out, in] contributes A [rank,
in] and B [out, rank], under peft's names; a single scale applies to all layers. The effective
weight is W0 + scale B A (arXiv:2106.09685, section 4.1). Followers always compute this sum from the
original W0, so rounding errors do not accumulate over versions.
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
    """LoRA update of a layer's weight: scale * B A, with A [rank, in] and B [out, rank]."""

    lora_a: Tensor
    lora_b: Tensor
    scale: float

    def fits_weight(self, weight: Tensor) -> bool:
        """Return True if B A has the shape of `weight`."""
        (rank, num_in), (num_out, inner) = self.lora_a.shape, self.lora_b.shape
        return rank == inner and tuple(weight.shape) == (num_out, num_in)

    def compute_merged(self, weight: Tensor) -> Tensor:
        """Return weight + scale * B A in float32, whatever the inputs' dtypes.

        Does not modify `weight`.
        """
        a, b = (matrix.to(weight.device, torch.float32) for matrix in (self.lora_a, self.lora_b))
        return torch.addmm(weight.float(), b, a, alpha=self.scale)


class MergedWeights(Mapping[str, Tensor]):
    """All parameters by name; adds LoRA adapters to their base weights on access.

    Merged parameters are float32 on `device`; all others keep their stored dtype and device.
    Iterating without keeping the values never holds a second model in memory.
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
        """Names of the parameters computed on access, which exist nowhere in memory before that."""
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
    """Return all parameters of a model by name, from published tensors: all of them, or adapters.

    Adapters are merged on `device` into the base weights in `model_path`. Raises WeightsError if
    parameters are missing or unknown, or a shape does not match the model.
    """
    if LORA_SCALE not in published:
        return parameters.expand_tied(published)
    adapters, trained = split_adapters(published)
    try:
        full = parameters.expand_tied(
            {**_drop_unknown(load_stored_weights(model_path), parameters), **trained}
        )
    except WeightsError as error:
        # The checkpoint's names or shapes may differ from the model's: let transformers convert it.
        try:
            loaded = _load_parameters(model_path)
        except (OSError, ValueError):
            raise error from None
        full = parameters.expand_tied({**_drop_unknown(loaded, parameters), **trained})
    for name, adapter in adapters.items():
        if name not in full or not adapter.fits_weight(full[name]):
            shapes = f"A {tuple(adapter.lora_a.shape)} and B {tuple(adapter.lora_b.shape)}"
            raise WeightsError(f"adapter of {name}: {shapes} fit no weight of the model")
    return MergedWeights(full, adapters, device)


def _drop_unknown(stored: Mapping[str, Tensor], parameters: ParameterSet) -> dict[str, Tensor]:
    """Drop stored tensors that the model lacks, such as the language model head under a critic."""
    return {name: tensor for name, tensor in stored.items() if name in parameters.shapes}


@functools.lru_cache(1)
def _load_parameters(model_path: str) -> Mapping[str, Tensor]:
    """Load the parameters of a model whose checkpoint uses other names or shapes.

    Cached in memory: transformers builds them anew, for example by fusing all experts' weights.
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
    """Split published tensors into LoRA adapters and fully trained tensors, both by name.

    An adapter's name is that of the weight it updates.
    """
    trained = {name: as_tensor(value) for name, value in published.items()}
    scale = trained.pop(LORA_SCALE).item()
    layers = [name.removesuffix(LORA_A_SUFFIX) for name in trained if name.endswith(LORA_A_SUFFIX)]
    adapters = {
        f"{layer}.weight": LoraAdapter(
            trained.pop(layer + LORA_A_SUFFIX), trained.pop(layer + LORA_B_SUFFIX), scale
        )
        for layer in layers
        if layer + LORA_B_SUFFIX in trained
    }
    return adapters, trained


def load_stored_weights(model_path: str) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face model directory by name, memory-mapped.

    Reading is lazy. Pages that were read stay in the page cache, which the kernel evicts under
    memory pressure.
    """
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in list_weight_files(Path(model_path)):
        tensors |= load_file(file)
    return tensors
