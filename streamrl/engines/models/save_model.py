"""Write a trained model as a Hugging Face directory."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from streamrl.data.chat_template import load_tokenizer
from streamrl.files.hf_config import GENERATION_CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_hf_model(
    directory: Path,
    module: "PreTrainedModel",
    parameters: Mapping[str, Tensor],
    *,
    tokenizer_from: str,
) -> None:
    """Write a Hugging Face directory of a trained model.

    `parameters` are the trained values by name; buffers and config come from `module`, tokenizer
    and generation_config.json from the directory `tokenizer_from`. The latter file is copied
    because transformers refuses to save a generation config with contradictions, such as a
    temperature with greedy decoding.
    """
    # state_dict() omits non-persistent buffers, such as those of rotary embeddings.
    module_state, buffers = module.state_dict(), dict(module.named_buffers())
    state = {
        **parameters,
        **{name: module_state[name].cpu() for name in module_state.keys() & buffers.keys()},
    }
    with _reset_generation_config(module):
        module.save_pretrained(directory, state_dict=state)
    defaults = Path(tokenizer_from) / GENERATION_CONFIG
    if module.can_generate() and defaults.is_file():
        shutil.copyfile(defaults, directory / GENERATION_CONFIG)
    load_tokenizer(tokenizer_from).save_pretrained(directory)


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
