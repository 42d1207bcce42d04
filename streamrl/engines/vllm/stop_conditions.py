"""What ends a completion besides the model's end of sequence: texts and token ids of a setting."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamrl.data import load_tokenizer
from streamrl.engines.generator_config import GeneratorConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_PER_CHARACTER = 4
"""Most bytes of a character, each of which may be a token of its own."""


class StopConditions:
    """Stop texts and token ids of an engine; texts are looked for in what its tokens say."""

    def __init__(self, model_path: str, config: GeneratorConfig) -> None:
        """Load the tokenizer of a model directory, if there are texts to look for."""
        self.token_ids = list(config.stop_token_ids)
        self._texts = list(config.stop)
        self._tokenizer = load_tokenizer(model_path) if self._texts else None

    def make_detokenizer(self, sampled: Sequence[int]) -> Any:
        """Return what vLLM asks, of each new token of a request, whether a stop text ends it.

        `sampled` are those of the completion that were sampled before, in another request: a text
        may begin in these. Returns None if there are no texts.
        """
        if self._tokenizer is None:
            return None
        return _make_detokenizer_class()(self._tokenizer, self._texts, sampled)


@functools.cache
def _make_detokenizer_class() -> Any:
    """Return the class, which cannot be made before vLLM is imported."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    class StopTextDetokenizer(IncrementalDetokenizer):
        """Keeps a request's tokens, and decodes as many of them as a stop text can have."""

        def __init__(
            self,
            tokenizer: "PreTrainedTokenizerBase",
            texts: Sequence[str],
            sampled: Sequence[int],
        ) -> None:
            super().__init__()
            self._tokenizer = tokenizer
            self._texts = texts
            self._window = 1 + max(len(text) for text in texts) * BYTES_PER_CHARACTER
            self._sampled = list(sampled[-self._window :])

        def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
            super().update(new_token_ids, stop_terminated)
            tail = [*self._sampled, *self.token_ids[-self._window :]][-self._window :]
            text = decode_verbatim(self._tokenizer, tail)
            return next((stop for stop in self._texts if stop in text), None)

    return StopTextDetokenizer


def decode_verbatim(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """Return the text of tokens with special tokens and spaces as they are."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)
