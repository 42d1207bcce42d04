"""Slices of a version for the ranks of a split generator: each rank's are packed and sent apart."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SliceLayout = Mapping[str, Sequence[tuple[slice, ...]]]
"""What a rank reads of each published tensor: indices of the tensor, disjoint. Picklable."""
Readers = Mapping[str, Sequence[SliceLayout]]
"""Readers of a version by name, with the layout of each rank; empty if they take whole tensors."""


class RankSlices(dict[str, Any]):
    """Tensors by `make_slice_name`: all slices that the ranks of a generator need of a version."""


def make_slice_name(rank: int, name: str, index: tuple[slice, ...]) -> str:
    """Return the name of a rank's slice of the tensor `name`; it tells which slice it is."""
    return f"{rank}/{name}[{', '.join(f'{part.start}:{part.stop}' for part in index)}]"


def is_slice_of(rank: int, name: str) -> bool:
    """Return whether `make_slice_name` made this name for the rank."""
    return name.startswith(f"{rank}/")


def iter_slices(
    rank: int, layout: SliceLayout, tensors: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the slices of a rank, by name, as views of the tensors."""
    for name, indices in layout.items():
        for index in indices:
            yield make_slice_name(rank, name, index), tensors[name][index]
