"""Check after a load that vLLM's model holds every published parameter.

vLLM fuses, packs, transposes, pads and permutes parameters, so neither names nor shapes can be
compared. Two sums survive all of that: the sum of the values and the sum of their squares. For
example, the sums of vLLM's qkv_proj.weight equal those of q_proj, k_proj and v_proj added up,
whatever the order of rows. The check compares these fingerprints layer by layer.

Some layers change values while loading. To find them, `exclude_changed` compares the model
directory with the model that vLLM has just read from it, and excludes layers that differ.
"""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from streamrl.weights import LoadVerification

CHUNK_ELEMENTS = 2**22
"""Elements that are converted to float64 at a time."""
SUM_TOLERANCE = 1e-9
"""Relative tolerance of float64 sums in different orders."""
Value = TypeVar("Value")
LAYER_PATTERN = re.compile(r"\.(\d+)\.")
WARNING_LOGGERS = ("vllm.model_executor.model_loader", "vllm.model_executor.models")
"""Loggers of vLLM that warn about weights they did not load."""
WARNING_PATTERN = re.compile(r"weight|parameter|tensor|checkpoint|loaded", re.IGNORECASE)
"""Selects the warnings about weights among all warnings of WARNING_LOGGERS."""
HARMLESS_WARNINGS = re.compile(
    r"\w*RotaryEmbedding: Failed to load weights"
    r"|Attempted to load weight \S+ with dtype \S+ into parameter with dtype "
)
"""Warnings of vLLM on GPUs at every load: rotary embeddings have no weights, only tables that are
computed; and a published tensor is cast to the dtype of its parameter."""


@dataclass(frozen=True)
class TensorFingerprint:
    """Number of elements, sum and sum of squares of a tensor, in float64."""

    num_elements: int
    total: float
    sum_squares: float

    @classmethod
    def from_tensor(
        cls, tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None
    ) -> "TensorFingerprint":
        """Compute the fingerprint of a tensor after rounding its values to `dtype`.

        The sums are computed on `device`, by default the tensor's.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=device or tensor.device)
        for chunk in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS):
            values = chunk.to(sums.device).to(dtype).double()
            sums += torch.stack([values.sum(), values.dot(values)])
        return cls(tensor.numel(), *sums.tolist())

    @classmethod
    def from_fingerprints(cls, prints: Iterable["TensorFingerprint"]) -> "TensorFingerprint":
        parts = list(prints)
        return cls(
            sum(part.num_elements for part in parts),
            math.fsum(part.total for part in parts),
            math.fsum(part.sum_squares for part in parts),
        )

    def is_close_to(self, other: "TensorFingerprint") -> bool:
        """Return whether both tensors may have the same values, ignoring zero padding.

        A sum of n values is at most sqrt(n * sum of squares) (Cauchy-Schwarz), which scales the
        tolerance of `total`.
        """
        scale = max(self.sum_squares, other.sum_squares)
        bound = SUM_TOLERANCE * math.sqrt(scale * max(self.num_elements, other.num_elements))
        return (
            abs(self.sum_squares - other.sum_squares) <= SUM_TOLERANCE * scale
            and abs(self.total - other.total) <= bound
        )


#: Fingerprint of a parameter in each dtype of the engine's parameters.
FingerprintsByDtype = Mapping[torch.dtype, TensorFingerprint]


class LoadCheck:
    """Compares fingerprints of an engine's model and of published parameters, layer by layer."""

    def __init__(self, model: torch.nn.Module, merged: Mapping[str, Sequence[str]]) -> None:
        """Compare all parameters of a model. `merged` maps its modules to those that they fuse."""
        self._model = model
        self._merged_modules = merged
        self.dtypes = {parameter.dtype for parameter in model.parameters()}
        self._device = next((parameter.device for parameter in model.parameters()), None)
        self._unchecked_names: set[str] = set()

    def exclude_changed(self, prints: Mapping[str, FingerprintsByDtype]) -> None:
        """Leave out layers that vLLM changes while loading.

        vLLM must just have read the tensors of these fingerprints.
        """
        for published, unmatched in self._find_differences(prints):
            # Exclude the differing layer. If `unmatched` is empty, the published tensors have no
            # counterpart in the model at all; do not exclude those.
            self._unchecked_names |= {*published, *unmatched} if unmatched else set()

    def make_fingerprints(self, tensor: Tensor) -> FingerprintsByDtype:
        """Return the sums of a tensor, computed on the device of the model."""
        return {
            dtype: TensorFingerprint.from_tensor(tensor, dtype, self._device)
            for dtype in self.dtypes
        }

    def compare_loaded(self, published: Mapping[str, FingerprintsByDtype]) -> LoadVerification:
        differing = [name for names, _ in self._find_differences(published) for name in names]
        return LoadVerification(
            len(published.keys() - self._unchecked_names), tuple(sorted(differing))
        )

    def _find_differences(
        self, published: Mapping[str, FingerprintsByDtype]
    ) -> Iterator[tuple[list[str], list[str]]]:
        """Yield (unmatched published names, unmatched model names) of each differing layer."""
        model_prints = {
            name: (parameter.dtype, TensorFingerprint.from_tensor(parameter, parameter.dtype))
            for name, parameter in iter_unpadded(self._model)
            if name not in self._unchecked_names
        }
        checked = {n: prints for n, prints in published.items() if n not in self._unchecked_names}
        model_layers, published_layers = _group_by_layer(model_prints), _group_by_layer(checked)
        for layer, parameters in model_layers.items():
            missing, rest = self._find_unmatched(published_layers.get(layer, {}), parameters)
            if missing or rest:
                yield missing, rest

    def _find_unmatched(
        self,
        published: Mapping[str, FingerprintsByDtype],
        model_prints: Mapping[str, tuple[torch.dtype, TensorFingerprint]],
    ) -> tuple[list[str], list[str]]:
        """Match published and vLLM's parameters of a layer; return the unmatched names of both.

        A model parameter equals a published one, or the fusion that `merged` names; or the
        remaining parameters of a module have the sums of the published ones, such as the weights of
        all experts; or all that remain have.
        """
        matched, rest = set[str](), []
        for name, (dtype, fingerprint) in model_prints.items():
            sources = {
                n for n, prints in published.items() if prints[dtype].is_close_to(fingerprint)
            }
            fused_names = set(list_source_names(name, self._merged_modules))
            if not sources and published.keys() >= fused_names:
                fused = TensorFingerprint.from_fingerprints(
                    published[source][dtype] for source in fused_names
                )
                sources = fused_names if fused.is_close_to(fingerprint) else set()
            matched |= sources
            if not sources:
                rest.append(name)
        missing = [name for name in published if name not in matched]
        modules = dict.fromkeys(f"{name.rpartition('.')[0]}." for name in rest)
        for prefix in (*modules, ""):
            inside, outer = (
                [name for name in names if name.startswith(prefix)] for names in (rest, missing)
            )
            if inside and TensorFingerprint.from_fingerprints(
                published[name][model_prints[inside[0]][0]] for name in outer
            ).is_close_to(
                TensorFingerprint.from_fingerprints(model_prints[name][1] for name in inside)
            ):
                missing = [name for name in missing if name not in outer]
                rest = [name for name in rest if name not in inside]
        return missing, rest


def iter_unpadded(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of vLLM's model, those of a vocabulary without the rows that pad it.

    A rank may have no other rows; vLLM's loader then leaves them as they are.
    """
    for name, parameter in model.named_parameters():
        module: Any = model.get_submodule(name.rpartition(".")[0])
        if hasattr(module, "shard_indices"):
            yield name, parameter.data[: module.shard_indices.num_org_elements]
        else:
            yield name, parameter.data


def list_source_names(name: str, merged: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the checkpoint's names of the parameters that a vLLM parameter fuses, in order.

    `merged` maps a module of vLLM to the checkpoint's modules that it fuses. Example:
    layers.0.self_attn.qkv_proj.weight -> the weights of q_proj, k_proj and v_proj of that layer.
    """
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    if module not in merged:
        return (name,)
    return tuple(f"{parent}.{source}.{kind}" for source in merged[module])


def _group_by_layer(named: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    """Return the entries of each layer, by the number in their names; "" is outside of layers."""
    layers = defaultdict[str, dict[str, Value]](dict)
    for name, value in named.items():
        match = LAYER_PATTERN.search(name)
        layers[match[1] if match else ""][name] = value
    return layers


class LoadWarningHandler(logging.Handler):
    """Collects vLLM's warnings about weights; passes its errors on to stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and logging.lastResort is not None:
            logging.lastResort.handle(record)
        elif record.name.startswith(WARNING_LOGGERS):
            message = " ".join(record.getMessage().split())
            if WARNING_PATTERN.search(message) and not HARMLESS_WARNINGS.match(message):
                self._messages.append(message)

    def drain_warnings(self) -> tuple[str, ...]:
        """Return the distinct warnings since the last call."""
        messages, self._messages = self._messages, []
        return tuple(dict.fromkeys(messages))
