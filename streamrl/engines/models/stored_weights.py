"""Weights of a Hugging Face directory, read one tensor or one box of a tensor at a time.

A model on the meta device (`ModelLoadOptions.on_meta`) has its structure but no weights. A
training backend shards the model there, then each rank reads its boxes: no rank ever holds the
whole model.
"""

import functools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from streamrl.files.hf_config import list_weight_files
from streamrl.resharding.boxes import TensorBox

COMPARED_ROWS = 4096
"""Rows that are in memory at a time while two stored embeddings are compared."""


@dataclass(frozen=True)
class StoredModelTensor:
    """A parameter or persistent buffer of a model, and how to read it.

    owners: modules that hold it under an attribute, several if it is tied. read_box: reads the
    elements of a box, in the dtype of the file.
    """

    owners: tuple[tuple[nn.Module, str], ...]
    read_box: Callable[[TensorBox], Tensor]

    @property
    def value(self) -> Tensor:
        """The tensor in the model, on the meta device until `replace_value`."""
        module, name = self.owners[0]
        value: Tensor = getattr(module, name)
        return value

    def replace_value(self, value: Tensor) -> Tensor:
        """Replace the tensor in all its modules; return the new one, as registered."""
        old = self.value
        if isinstance(old, nn.Parameter):
            value = nn.Parameter(value, requires_grad=old.requires_grad)
        for module, name in self.owners:
            setattr(module, name, value)
        return value

    def read(self) -> Tensor:
        """Read the whole tensor."""
        return self.read_box(TensorBox.from_shape(tuple(self.value.shape)))


class StoredWeights:
    """The weights of a model on the meta device, in its directory's safetensors files.

    Create it before the model is changed: it finds the tensors by the names of transformers' class.
    """

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self._model = model
        self._slices = _open_slices(path)
        _tie_equal_weights(model, self._slices)
        self._owners = find_owners(model)
        self._tensors = model.state_dict(keep_vars=True)
        self._transforms = _plan_transforms(model, self._tensors, self._slices)
        #: Converted tensors of one target at most.
        self._converted: dict[str, dict[str, Tensor]] = {}

    def iter_tensors(self) -> Iterator[StoredModelTensor]:
        """Yield every stored tensor, in the same order on all ranks; tied ones once.

        A tensor that transformers computes from several others, or from a part of one (such as the
        experts of a layer in a single tensor), is converted whole by its first `read_box` and kept
        until another one is converted, so read the boxes in this order.
        """
        yielded: set[int] = set()
        for target, (transform, sources) in self._transforms.items():
            if isinstance(transform, WeightRenaming):
                reads = {target: functools.partial(_read_slice, self._slices[sources[0][1]])}
            else:
                shapes = self._convert(target, transform, sources, _make_meta)
                reads = {
                    name: functools.partial(self._read_converted, target, name) for name in shapes
                }
            for name, read_box in reads.items():
                key = id(self._tensors[name])
                if key not in yielded:
                    yielded.add(key)
                    yield StoredModelTensor(self._owners[key], read_box)

    def _read_converted(self, target: str, name: str, box: TensorBox) -> Tensor:
        if target not in self._converted:
            self._converted.clear()  # before the next tensors are in memory
            self._converted[target] = self._convert(target, *self._transforms[target], _read_slice)
        return self._converted[target][name][box.slices]

    def _convert(
        self, target: str, transform: Any, sources: list[tuple[str, str]], read: Callable[..., Any]
    ) -> dict[str, Tensor]:
        transform = deepcopy(transform)
        for pattern, key in sources:
            transform.add_tensor(target, key, pattern, functools.partial(read, self._slices[key]))
        converted = transform.convert(target, model=self._model, config=self._model.config)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
            if name in self._tensors
        }


def _open_slices(path: str) -> dict[str, Any]:
    """Return safetensors' slices of a directory by tensor name; nothing is read or mapped yet."""
    slices: dict[str, Any] = {}
    for file in list_weight_files(Path(path)):
        # A mapped file would count as the process's memory, page by page.
        opened = safe_open(file, framework="pt", backend="pread")
        slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    return slices


def _plan_transforms(
    model: PreTrainedModel, tensors: dict[str, Any], slices: dict[str, Any]
) -> dict[str, tuple[Any, list[tuple[str, str]]]]:
    """Return transformers' transform of every tensor of the model and its (pattern, stored name).

    Names are matched as in transformers' `convert_and_load_state_dict_in_model`.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix, plan = model.base_model_prefix, dict[str, tuple[Any, list[tuple[str, str]]]]()
    for key in sorted(slices, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if target not in tensors and key in tensors:
            target, pattern = rename_source_key(key, [], [], prefix, tensors)
        if target not in tensors:
            continue
        new = WeightRenaming(key, target) if pattern is None else converter_of[pattern]
        plan.setdefault(target, (new, []))[1].append((pattern or key, key))
    return plan


def find_owners(model: nn.Module) -> dict[int, tuple[tuple[nn.Module, str], ...]]:
    """Return the modules, and their attributes, that hold each parameter and buffer, by its id."""
    owners: dict[int, tuple[tuple[nn.Module, str], ...]] = {}
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None:
                owners[id(value)] = (*owners.get(id(value), ()), (module, name))
    return owners


def _tie_equal_weights(model: PreTrainedModel, slices: dict[str, Any]) -> None:
    """Tie weights that the config ties and the files store twice, if the two are equal.

    transformers compares them while loading, but cannot on the meta device.
    """
    plan = _plan_transforms(model, model.state_dict(keep_vars=True), slices)
    for target, source in list(model.all_tied_weights_keys.items()):
        if model.get_parameter(target) is model.get_parameter(source):
            continue
        first, second = (slices[plan[name][1][0][1]] for name in (target, source))
        if _are_equal(first, second):
            module, _, name = target.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(source))
        else:
            del model.all_tied_weights_keys[target]


def _are_equal(first: Any, second: Any) -> bool:
    if first.get_shape() != second.get_shape():
        return False
    num_rows = first.get_shape()[0]
    for start in range(0, num_rows, COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, num_rows)
        if not torch.equal(first[start:stop], second[start:stop]):
            return False
    return True


def _read_slice(stored: Any, box: TensorBox | None = None) -> Tensor:
    """Return the elements of a box of a stored tensor, by default all."""
    value: Tensor = stored[box.slices if box and box.shape else ...]
    return value


def _make_meta(stored: Any) -> Tensor:
    return torch.empty(stored.get_shape(), device="meta")
