"""Names, shapes and tied names of a model's full set of parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from streamrl.errors import WeightsError
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
        """First name of each parameter, in the order of `order_for_fusion`."""
        aliases = {
            name
            for names in self.tied_groups
            for name in [n for n in self.shapes if n in names][1:]
        }
        return order_for_fusion(name for name in self.shapes if name not in aliases)

    def get_first_name(self, name: str) -> str:
        """Return the first of the names tied to `name`."""
        tied = next((names for names in self.tied_groups if name in names), frozenset([name]))
        return next(name for name in self.shapes if name in tied)

    def expand_tied(self, tensors: Mapping[str, torch.Tensor | Array]) -> dict[str, torch.Tensor]:
        """Return the tensors under every name of the set, given any one of each tied group.

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
    """Order names for publishing: for sibling layers first all weights, then all biases.

    Engines fuse q, k and v into a single parameter, and gate and up likewise. If the parts lie next
    to each other in a bucket, the fused parameter is a view of the bucket and needs no copy.
    """
    order = list(names)
    first_index_by_parent: dict[str, int] = {}
    for index, name in enumerate(order):
        first_index_by_parent.setdefault(_parent_name(name), index)
    kind_rank = {"weight": 0, "bias": 1}

    def sort_key(name: str) -> tuple[int, int]:
        return first_index_by_parent[_parent_name(name)], kind_rank.get(name.rpartition(".")[2], 2)

    return sorted(order, key=sort_key)


def group_for_fusion(names: Iterable[str]) -> list[list[str]]:
    """Return the names in the order of `order_for_fusion`, grouped by parent module."""
    groups: dict[str, list[str]] = {}
    for name in order_for_fusion(names):
        groups.setdefault(_parent_name(name), []).append(name)
    return list(groups.values())


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]


def as_tensor(value: torch.Tensor | Array) -> torch.Tensor:
    """Return the value as a tensor, without a copy."""
    # Unlike torch.from_numpy, DLPack accepts read-only arrays without a warning.
    return torch.from_dlpack(value) if isinstance(value, np.ndarray) else value
