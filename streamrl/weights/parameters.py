"""Parameters of a model: names, shapes, and names that share a tensor."""

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
