"""What a full set of a model's parameters is: every name, its shape, and which names are one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Array


@dataclass(frozen=True)
class ParameterSet:
    """Shapes by name, and the groups of names that share one tensor (tied embeddings)."""

    shapes: Mapping[str, tuple[int, ...]]
    tied_groups: tuple[frozenset[str], ...]

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> "ParameterSet":
        """The parameters of a module, which may be on the meta device."""
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
        """The first name of each parameter, in the order of `side_by_side`."""
        again = {
            name
            for names in self.tied_groups
            for name in [n for n in self.shapes if n in names][1:]
        }
        return order_for_fusion(name for name in self.shapes if name not in again)

    def get_first_name(self, name: str) -> str:
        """The first of the names that a parameter goes by."""
        tied = next((names for names in self.tied_groups if name in names), frozenset([name]))
        return next(name for name in self.shapes if name in tied)

    def expand_tied(self, tensors: Mapping[str, torch.Tensor | Array]) -> dict[str, torch.Tensor]:
        """The same tensors under every name of the set: one of several tied names is enough.

        Nothing is copied. Raises WeightsError if names are missing or unknown, or a shape is not
        the model's.
        """
        full = {name: as_tensor(value) for name, value in tensors.items()}
        for names in self.tied_groups:
            given = names & full.keys()
            if given:
                full.update(dict.fromkeys(names - given, full[min(given)]))
        for fault, odd in (
            ("lack", self.shapes.keys() - full.keys()),
            ("have unknown", full.keys() - self.shapes.keys()),
        ):
            if odd:
                first = ", ".join(sorted(odd)[:3])
                raise WeightsError(f"the weights {fault} {len(odd)} parameters, as {first}")
        for name, shape in self.shapes.items():
            if tuple(full[name].shape) != shape:
                raise WeightsError(f"{name} has shape {tuple(full[name].shape)}, wanted {shape}")
        return full


def order_for_fusion(names: Iterable[str]) -> list[str]:
    """The names in the order they are best published in: of sister layers the weights, then the
    biases.

    Engines make one parameter of q, k and v, and of gate and up. Where these lie next to each other
    in a bucket that one is there already, and nothing has to be copied.
    """
    order = list(names)
    first: dict[str, int] = {}
    for index, name in enumerate(order):
        first.setdefault(_parent_name(name), index)
    kinds = {"weight": 0, "bias": 1}

    def place(name: str) -> tuple[int, int]:
        return first[_parent_name(name)], kinds.get(name.rpartition(".")[2], 2)

    return sorted(order, key=place)


def group_for_fusion(names: Iterable[str]) -> list[list[str]]:
    """The names in the order of `side_by_side`, those of sister layers together."""
    found: dict[str, list[str]] = {}
    for name in order_for_fusion(names):
        found.setdefault(_parent_name(name), []).append(name)
    return list(found.values())


def _parent_name(name: str) -> str:
    """What a layer is part of, together with its sisters."""
    return name.rpartition(".")[0].rpartition(".")[0]


def as_tensor(value: torch.Tensor | Array) -> torch.Tensor:
    """The value as a tensor, without a copy."""
    # DLPack takes read-only arrays without a warning.
    return torch.from_dlpack(value) if isinstance(value, np.ndarray) else value
