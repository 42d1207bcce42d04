"""Write a trained model as a Hugging Face directory."""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from streamrl.data.chat_template import load_tokenizer
from streamrl.files.atomic_write import write_atomic
from streamrl.files.hf_config import GENERATION_CONFIG, WEIGHTS_FILE, WEIGHTS_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MAX_FILE_BYTES = 256 << 20
"""Size at which the next weight file starts; bounds the memory that writing takes."""


def write_hf_model(
    directory: Path,
    module: "PreTrainedModel",
    parameters: Iterable[tuple[str, Tensor]],
    *,
    tokenizer_from: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a Hugging Face directory of a trained model.

    `parameters` are names and trained values on the CPU, tied ones once; they are written as they
    come, at most a file at a time in memory. Buffers and config come from `module`, tokenizer and
    generation_config.json from the directory `tokenizer_from`. The latter file is copied because
    transformers refuses to save a generation config with contradictions, such as a temperature with
    greedy decoding. `dtype` is that of the values, by default the module's.
    """
    with _reset_generation_config(module):
        module.save_pretrained(directory, state_dict={})
    if dtype not in (None, module.dtype):
        module.config.dtype = dtype
        module.config.save_pretrained(directory)
    # state_dict() omits non-persistent buffers, such as those of rotary embeddings.
    module_state, buffers = module.state_dict(), dict(module.named_buffers())
    saved_buffers = ((name, module_state[name].cpu()) for name in module_state.keys() & buffers)
    _write_weights(directory, _restore_layout(module, chain(parameters, saved_buffers)))
    defaults = Path(tokenizer_from) / GENERATION_CONFIG
    if module.can_generate() and defaults.is_file():
        shutil.copyfile(defaults, directory / GENERATION_CONFIG)
    load_tokenizer(tokenizer_from).save_pretrained(directory)


def _restore_layout(
    module: "PreTrainedModel", tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with the names and shapes of the files that the module was loaded from.

    Tensors that make up a stored one, such as the parts of a fused matrix, wait for each other.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
        revert_weight_conversion,
    )

    loaded_by: list[Any] = vars(module).get("_weight_conversions") or []
    reverse = [conversion.reverse_transform() for conversion in reversed(loaded_by)]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]

    def find_stored_name(name: str) -> str:
        stored_name: str = rename_source_key(name, renamings, converters, reverse=True)[0]
        return stored_name

    # Adapters move a layer's weight into base_layer.
    names = (name.replace(".base_layer.", ".") for name in module.state_dict())
    num_parts = Counter(map(find_stored_name, names))
    waiting = defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in tensors:
        stored_name = find_stored_name(name)
        waiting[stored_name][name] = tensor
        if not loaded_by:
            yield from waiting.pop(stored_name).items()
        elif len(waiting[stored_name]) >= num_parts[stored_name]:
            yield from revert_weight_conversion(module, waiting.pop(stored_name)).items()
    for parts in waiting.values():
        yield from revert_weight_conversion(module, parts).items()


def _write_weights(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors into model.safetensors, or into several files and their index."""
    files: list[Path] = []
    weight_map: dict[str, int] = {}
    pending, pending_bytes, total_bytes = dict[str, Tensor](), 0, 0

    def write_file() -> None:
        files.append(directory / f"model-{len(files) + 1:05d}.partial")
        save_file(pending, files[-1], metadata={"format": "pt"})
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > MAX_FILE_BYTES:
            write_file()
            pending_bytes = 0
        weight_map[name] = len(files)
        pending[name] = tensor.contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    write_file()
    single, index = directory / WEIGHTS_FILE, directory / WEIGHTS_INDEX
    for stale in (single, index):
        stale.unlink(missing_ok=True)
    if len(files) == 1:
        files[0].rename(single)
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, file_name in zip(files, names, strict=True):
        file.rename(directory / file_name)
    content = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: names[number] for name, number in weight_map.items()},
    }
    write_atomic(index, json.dumps(content, indent=2, sort_keys=True) + "\n")


@contextmanager
def _reset_generation_config(module: "PreTrainedModel") -> Iterator[None]:
    if not module.can_generate():
        yield
        return
    original = module.generation_config
    module.generation_config = type(original)()
    try:
        yield
    finally:
        module.generation_config = original
