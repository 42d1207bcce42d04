"""Whether every parameter that was published is what an engine's model holds after a load.

An engine fuses parameters, packs them for its kernels, turns, pads and permutes them: names and
shapes say little of where a value went. Two sums over the values of a parameter, and of all that it
was fused with, stay the same whatever the layout. Layers in which they do not agree with the model
directory as the engine itself has read it (values are changed on the way there) are left out.
"""

import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.weights import LoadVerification

CHUNK_ELEMENTS = 2**22
"""Elements whose float64 copies are held at a time."""
SUM_TOLERANCE = 1e-9
"""Largest relative difference of sums of the same values in another order."""
MAX_UNIONS = 1000
LAYER_PATTERN = re.compile(r"\.(\d+)\.")
WARNING_LOGGERS = ("vllm.model_executor.model_loader", "vllm.model_executor.models")
"""Modules of vLLM that warn of weights they did not load."""
WARNING_PATTERN = re.compile(r"weight|parameter|tensor|checkpoint|loaded", re.IGNORECASE)
"""What such a warning is about; they warn of other things, too."""


@dataclass(frozen=True)
class TensorFingerprint:
    """Sums over a tensor's values and their squares, in float64."""

    num_elements: int
    total: float
    sum_squares: float

    @classmethod
    def from_tensor(cls, tensor: Tensor, dtype: torch.dtype) -> "TensorFingerprint":
        """Sum the values as they are in a type."""
        total = squares = 0.0
        for part in tensor.detach().reshape(-1).split(CHUNK_ELEMENTS):
            values = part.to(dtype).double()
            total += values.sum().item()
            squares += values.dot(values).item()
        return cls(tensor.numel(), total, squares)

    @classmethod
    def from_fingerprints(cls, prints: Iterable["TensorFingerprint"]) -> "TensorFingerprint":
        """Add up those of several tensors."""
        found = list(prints)
        return cls(
            sum(one.num_elements for one in found),
            math.fsum(one.total for one in found),
            math.fsum(one.sum_squares for one in found),
        )

    def is_close_to(self, other: "TensorFingerprint") -> bool:
        """Whether both may be of the same values. Zeros that pad one of them do not count."""
        scale = max(self.sum_squares, other.sum_squares)
        bound = SUM_TOLERANCE * math.sqrt(scale * max(self.num_elements, other.num_elements))
        return (
            abs(self.sum_squares - other.sum_squares) <= SUM_TOLERANCE * scale
            and abs(self.total - other.total) <= bound
        )


#: Of a parameter, in each type that the engine computes in.
FingerprintsByDtype = Mapping[torch.dtype, TensorFingerprint]


class LoadCheck:
    """Compares what an engine's model holds with what was published, layer by layer."""

    def __init__(
        self,
        model: torch.nn.Module,
        stored: Mapping[str, Tensor],
        merged: Mapping[str, Sequence[str]],
    ) -> None:
        """Find what can be compared by the directory's tensors, which the engine has just read.

        `merged` says which modules of the checkpoint a module of the engine takes together.
        """
        self._model = model
        self._merged_modules = merged
        self._dtypes = {parameter.dtype for parameter in model.parameters()}
        self._unchecked_names: set[str] = set()
        prints = {name: self.make_fingerprints(tensor) for name, tensor in stored.items()}
        for published, held in self._find_differences(prints):
            # What the model has no place for at all will not arrive later either.
            self._unchecked_names |= {*published, *held} if held else set()

    def make_fingerprints(self, tensor: Tensor) -> FingerprintsByDtype:
        """Return the fingerprints of a published tensor."""
        return {dtype: TensorFingerprint.from_tensor(tensor, dtype) for dtype in self._dtypes}

    def compare_loaded(self, published: Mapping[str, FingerprintsByDtype]) -> LoadVerification:
        """Compare the model with what was put into it, by the names in the model's files."""
        differing = [name for names, _ in self._find_differences(published) for name in names]
        return LoadVerification(
            len(published.keys() - self._unchecked_names), tuple(sorted(differing))
        )

    def _find_differences(
        self, published: Mapping[str, FingerprintsByDtype]
    ) -> Iterator[tuple[list[str], list[str]]]:
        """Yield, for each layer in which they differ, the parameters published and those held."""
        held: dict[str, dict[str, tuple[torch.dtype, TensorFingerprint]]] = {}
        for name, parameter in self._model.named_parameters():
            if name not in self._unchecked_names:
                found = (parameter.dtype, TensorFingerprint.from_tensor(parameter, parameter.dtype))
                held.setdefault(_parse_layer(name), {})[name] = found
        there: dict[str, dict[str, FingerprintsByDtype]] = {}
        for name, prints in published.items():
            if name not in self._unchecked_names:
                there.setdefault(_parse_layer(name), {})[name] = prints
        for layer, parameters in held.items():
            missing, rest = self._find_unmatched(there.get(layer, {}), parameters)
            if missing or rest:
                yield missing, rest

    def _find_unmatched(
        self,
        published: Mapping[str, FingerprintsByDtype],
        held: Mapping[str, tuple[torch.dtype, TensorFingerprint]],
    ) -> tuple[list[str], list[str]]:
        """Leave out what is held as it was published, what is fused, and what agrees as a whole."""
        arrived, rest = set[str](), []
        for name, (dtype, found) in held.items():
            same = {n for n, prints in published.items() if prints[dtype].is_close_to(found)}
            parts = self._list_source_names(name)
            if not same and published.keys() >= parts:
                whole = TensorFingerprint.from_fingerprints(
                    published[part][dtype] for part in parts
                )
                same = parts if whole.is_close_to(found) else set()
            arrived |= same
            if not same:
                rest.append(name)
        missing = [name for name in published if name not in arrived]
        wanted = TensorFingerprint.from_fingerprints(
            published[name][held[rest[0]][0]] for name in missing if rest
        )
        if rest and wanted.is_close_to(
            TensorFingerprint.from_fingerprints(held[name][1] for name in rest)
        ):
            return [], []
        for names, name in _iter_fused_candidates(missing, tuple(rest)):
            dtype, found = held[name]
            whole = TensorFingerprint.from_fingerprints(published[one][dtype] for one in names)
            if name in rest and names <= set(missing) and whole.is_close_to(found):
                missing = [one for one in missing if one not in names]
                rest.remove(name)
        return missing, rest

    def _list_source_names(self, name: str) -> set[str]:
        """Return the checkpoint's names of a parameter of the engine's model."""
        path, _, kind = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        return {
            f"{parent}.{source}.{kind}" for source in self._merged_modules.get(module, [module])
        }


def _iter_fused_candidates(
    missing: Sequence[str], rest: Sequence[str]
) -> Iterator[tuple[set[str], str]]:
    """Yield what a parameter of the engine may be made of: all of some kinds of parameters.

    Those of all experts are of a kind. Of many kinds only the smaller unions are tried.
    """
    families: dict[str, set[str]] = {}
    for name in missing:
        families.setdefault(re.sub(r"\d+", "#", name), set()).add(name)
    for size in range(1, len(families) + 1):
        if math.comb(len(families), size) > MAX_UNIONS:
            return
        for kinds in itertools.combinations(families.values(), size):
            for name in rest:
                yield set[str]().union(*kinds), name


def _parse_layer(name: str) -> str:
    """Return the number of the layer that a parameter is of; empty for those of none."""
    found = LAYER_PATTERN.search(name)
    return found[1] if found else ""


class LoadWarningHandler(logging.Handler):
    """Keeps what vLLM warns of while it loads weights; its errors go where errors go."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take up a record of a vLLM logger."""
        if record.levelno >= logging.ERROR and logging.lastResort is not None:
            logging.lastResort.handle(record)
        elif record.name.startswith(WARNING_LOGGERS) and WARNING_PATTERN.search(
            record.getMessage()
        ):
            self._messages.append(" ".join(record.getMessage().split()))

    def drain_warnings(self) -> tuple[str, ...]:
        """Return the warnings since the last call, each once with how often it came."""
        found, self._messages = self._messages, []
        counts = {message: found.count(message) for message in dict.fromkeys(found)}
        return tuple(
            message if count == 1 else f"{message} ({count} times)"
            for message, count in counts.items()
        )
