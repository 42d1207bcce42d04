"""Stop strings and stop token ids of `generator.stop` and `generator.stop_token_ids`."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamrl.data.chat_template import load_tokenizer
from streamrl.engines.generator_config import GeneratorConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_PER_CHARACTER = 4
"""Maximum in UTF-8; with byte-level tokenizers a byte may be a token."""


class StopConditions:
    """Stop strings and stop token ids of an engine.

    vLLM's own stop strings need its detokenizer, which decodes every token of every request. This
    class decodes only the last tokens, as many as a stop string can span.
    """

    def __init__(self, model_path: str, config: GeneratorConfig) -> None:
        self.token_ids = list(config.stop_token_ids)
        self._texts = list(config.stop)
        self._tokenizer = load_tokenizer(model_path) if self._texts else None

    def make_detokenizer(self, sampled: Sequence[int]) -> Any:
        """Return a detokenizer that ends a vLLM request at a stop string; None if no string is set.

        `sampled` are tokens of a partial rollout from an earlier request, in which a stop string
        may start.
        """
        if self._tokenizer is None:
            return None
        return _make_detokenizer_class()(self._tokenizer, self._texts, sampled)


@functools.cache
def _make_detokenizer_class() -> Any:
    """Define and return the detokenizer class; lazily, since its base class imports vLLM."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    class StopTextDetokenizer(IncrementalDetokenizer):
        """Decodes the last tokens of a request, as many as a stop string can span."""

        def __init__(
            self, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], sampled: Sequence[int]
        ) -> None:
            super().__init__()
            self._tokenizer = tokenizer
            self._texts = texts
            self._window = 1 + max(len(text) for text in texts) * BYTES_PER_CHARACTER
            self._sampled = list(sampled[-self._window :])

        def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
            """Append new tokens; return the stop string in the decoded tail, or None."""
            super().update(new_token_ids, stop_terminated)
            tail = [*self._sampled, *self.token_ids[-self._window :]][-self._window :]
            text = decode_verbatim(self._tokenizer, tail)
            return next((stop for stop in self._texts if stop in text), None)

    return StopTextDetokenizer


def decode_verbatim(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)
