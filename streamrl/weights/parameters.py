"""Parameters of a model by name, names that share a tensor, and LoRA adapters merged into them.

A LoRA trainer publishes its adapters and other trained tensors (a value head). Every follower
already has the base model's directory. A linear layer with weight W0 [out, in] contributes A [rank,
in] and B [out, rank], under peft's names; a single scale applies to all layers. The effective
weight is W0 + scale B A (arXiv:2106.09685, section 4.1). Followers always compute this sum from the
original W0, so rounding errors do not accumulate over versions.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from streamrl.errors import WeightsError
from streamrl.files.hf_config import is_trusted, list_weight_files
from streamrl.messages import Array


@dataclass(frozen=True)
class ParameterSet:
    """Parameter shapes by name, and the groups of names that share one tensor (tied embeddings)."""

    shapes: Mapping[str, tuple[int, ...]]
    tied_groups: tuple[frozenset[str], ...]

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> "ParameterSet":
        """Describe the parameters of a module, which may be on the meta device."""
        named = list(module.named_parameters(remove_duplicate=False))
        groups: dict[int, set[str]] = {}
        for name, parameter in named:
            groups.setdefault(id(parameter), set()).add(name)
        return cls(
            shapes={name: tuple(parameter.shape) for name, parameter in named},
            tied_groups=tuple(frozenset(names) for names in groups.values() if len(names) > 1),
        )

    @property
    def unique_names(self) -> list[str]:
        """A name for each parameter, ordered so that engines can fuse layers without a copy.

        Of several tied names, the first.
        """
        aliases = {
            name
            for names in self.tied_groups
            for name in [n for n in self.shapes if n in names][1:]
        }
        return order_for_fusion(name for name in self.shapes if name not in aliases)

    def get_first_name(self, name: str) -> str:
        """Return the first name, in the order of the model, that shares a tensor with `name`."""
        tied = next((names for names in self.tied_groups if name in names), frozenset([name]))
        return next(name for name in self.shapes if name in tied)

    def expand_tied(self, tensors: Mapping[str, torch.Tensor | Array]) -> dict[str, torch.Tensor]:
        """Return a tensor for every parameter name, given at least one name of each tied group.

        Tied names share the tensor; nothing is copied. Raises WeightsError if names are missing or
        unknown, or a shape does not match the model.
        """
        full = {name: as_tensor(value) for name, value in tensors.items()}
        for names in self.tied_groups:
            present = names & full.keys()
            if present:
                full.update(dict.fromkeys(names - present, full[min(present)]))
        for fault, bad_names in (
            ("lack", self.shapes.keys() - full.keys()),
            ("have unknown", full.keys() - self.shapes.keys()),
        ):
            if bad_names:
                examples = ", ".join(sorted(bad_names)[:3])
                raise WeightsError(
                    f"the weights {fault} {len(bad_names)} parameters, such as {examples}"
                )
        for name, shape in self.shapes.items():
            if tuple(full[name].shape) != shape:
                raise WeightsError(f"{name} has shape {tuple(full[name].shape)}, expected {shape}")
        return full


def order_for_fusion(names: Iterable[str]) -> list[str]:
    """Order parameter names for publishing: for sibling layers first all weights, then all biases.

    Engines fuse q, k and v into a single parameter, and gate and up likewise. If the weights of q,
    k and v lie next to each other in a bucket, the fused parameter is a view of the bucket and
    needs no copy.
    """
    order = list(names)
    first_index_by_parent: dict[str, int] = {}
    for index, name in enumerate(order):
        first_index_by_parent.setdefault(_get_parent_name(name), index)
    kind_rank = {"weight": 0, "bias": 1}

    def sort_key(name: str) -> tuple[int, int]:
        return first_index_by_parent[_get_parent_name(name)], kind_rank.get(
            name.rpartition(".")[2], 2
        )

    return sorted(order, key=sort_key)


def group_for_fusion(names: Iterable[str]) -> list[list[str]]:
    """Group parameter names by the module that contains their layers; weights before biases.

    Engines fuse parameters only within such a group.
    """
    groups: dict[str, list[str]] = {}
    for name in order_for_fusion(names):
        groups.setdefault(_get_parent_name(name), []).append(name)
    return list(groups.values())


def _get_parent_name(name: str) -> str:
    """Return the module that contains a parameter's layer: `attn` for `attn.q_proj.weight`."""
    return name.rpartition(".")[0].rpartition(".")[0]


def as_tensor(value: torch.Tensor | Array) -> torch.Tensor:
    """Return a numpy array or tensor as a tensor, without a copy."""
    # Unlike torch.from_numpy, DLPack accepts read-only arrays without a warning.
    return torch.from_dlpack(value) if isinstance(value, np.ndarray) else value


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
        published: Mapping[str, Tensor],
    ) -> None:
        self._stored = stored
        #: Tensors from which all parameters were built.
        self.published = published
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
    tensors = {name: as_tensor(value) for name, value in published.items()}
    return MergedWeights(full, adapters, device, tensors)


def _drop_unknown(stored: Mapping[str, Tensor], parameters: ParameterSet) -> dict[str, Tensor]:
    """Drop stored tensors that the model lacks, such as the language model head under a critic."""
    return {name: tensor for name, tensor in stored.items() if name in parameters.shapes}


@functools.lru_cache(1)
def _load_parameters(model_path: str) -> Mapping[str, Tensor]:
    """Load the parameters of a model whose checkpoint uses other names or shapes.

    Cached in memory: transformers builds them anew, for example by fusing all experts' weights.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
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
    tensors: dict[str, Tensor] = {}
    for file in list_weight_files(Path(model_path)):
        tensors |= load_file(file)
    return tensors
