"""A trained model on its way to the disk."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from streamrl.data import load_tokenizer
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
    """Write a Hugging Face directory: these parameters, the module's buffers, and a tokenizer.

    The defaults of generation are those of `tokenizer_from` to the letter: transformers writes none
    that it finds inconsistent, as a temperature beside greedy decoding.
    """
    # Its state has no buffers that are computed anew, as those of rotary embeddings are.
    own, buffers = module.state_dict(), dict(module.named_buffers())
    state = {**parameters, **{name: own[name].cpu() for name in own.keys() & buffers.keys()}}
    with _reset_generation_config(module):
        module.save_pretrained(directory, state_dict=state)
    defaults = Path(tokenizer_from) / GENERATION_CONFIG
    if module.can_generate() and defaults.is_file():
        shutil.copyfile(defaults, directory / GENERATION_CONFIG)
    load_tokenizer(tokenizer_from).save_pretrained(directory)


@contextmanager
def _reset_generation_config(module: "PreTrainedModel") -> Iterator[None]:
    """Have a model that generates, as a critic does not, no defaults of generation of its own."""
    if not module.can_generate():
        yield
        return
    given = module.generation_config
    module.generation_config = type(given)()
    try:
        yield
    finally:
        module.generation_config = given
