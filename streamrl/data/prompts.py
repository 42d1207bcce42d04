"""From a data file to prompts ready for the stream: read, rendered, measured, once at start."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from streamrl.data.rendering import render
from streamrl.data.rows import Row, load_rows
from streamrl.errors import ConfigError
from streamrl.messages import Prompt, make_uid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 512
_ON_LONG_PROMPT = ("error", "skip", "truncate")


@dataclass
class DataConfig:
    """Where prompts come from, and what becomes of those that are too long.

    train: file of training prompts, .parquet or .jsonl.
    eval: file of evaluation prompts; empty: none.
    pretrain: file of texts (column `text`) for algorithm.ptx_coef; empty: none.
    prompt_key: column that holds the prompt, chat messages or text.
    shuffle: a new order in every epoch (true) or the file's order (false), for training.
    max_prompt_tokens: tokens of a rendered prompt; null: all that the completion leaves.
    on_long_prompt: for a longer one: error, skip (leave the row out) or truncate (keep its end).
    """

    train: str = ""
    eval: str = ""
    pretrain: str = ""
    prompt_key: str = "prompt"
    shuffle: bool = True
    max_prompt_tokens: int | None = None
    on_long_prompt: str = "error"

    def __post_init__(self) -> None:
        if self.on_long_prompt not in _ON_LONG_PROMPT:
            raise ConfigError(
                f"data.on_long_prompt={self.on_long_prompt}: must be one of "
                + ", ".join(_ON_LONG_PROMPT)
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens={self.max_prompt_tokens}: must be 1 or more")
        if not self.prompt_key:
            raise ConfigError("data.prompt_key=: must name a column")

    def prompt_limit(self, *, model_tokens: int, max_new_tokens: int) -> int:
        """Tokens a prompt may have in a model of `model_tokens` that writes `max_new_tokens`.

        Raises ConfigError if nothing is left for a prompt, or less than max_prompt_tokens.
        """
        left = model_tokens - max_new_tokens
        sums = f"the model takes {model_tokens} tokens, the completion {max_new_tokens} of them"
        if left < 1:
            raise ConfigError(f"generator.max_new_tokens={max_new_tokens}: no room is left: {sums}")
        if self.max_prompt_tokens is None:
            return left
        if self.max_prompt_tokens > left:
            raise ConfigError(
                f"data.max_prompt_tokens={self.max_prompt_tokens}: must be at most {left}: {sums}"
            )
        return self.max_prompt_tokens


@dataclass(frozen=True)
class LoadedPrompts:
    """The prompts of a file and what happened to the long ones.

    The uid of each is `make_uid(0, index)` with the row's index in the file, from 0: row 12 of a
    parquet file or line 12 of a JSONL file has index 11, whatever was skipped before it.
    """

    prompts: list[Prompt]
    num_skipped: int
    num_truncated: int


def load_prompts(
    path: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    config: DataConfig,
    max_prompt_tokens: int,
    vocab_size: int,
) -> LoadedPrompts:
    """The prompts of a data file in file order, rendered and none above `max_prompt_tokens`.

    Raises ConfigError in one line naming file, row and rule: what `load_rows` and `render` refuse,
    a prompt that is empty, too long (on_long_prompt error) or has a token id the model does not
    know (`vocab_size` and above), and a file of which every row was skipped.
    """
    prompts: list[Prompt] = []
    num_skipped = num_truncated = 0
    for row, token_ids in _rendered(path, tokenizer, config.prompt_key):
        _check_tokens(row, token_ids, vocab_size)
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(_prompt(row, token_ids))
        elif config.on_long_prompt == "truncate":
            num_truncated += 1
            prompts.append(_prompt(row, token_ids[-max_prompt_tokens:]))
        elif config.on_long_prompt == "skip":
            num_skipped += 1
        else:
            raise ConfigError(
                f"{row.place}: the prompt has {len(token_ids)} tokens, the limit is "
                f"{max_prompt_tokens} (data.on_long_prompt=skip or truncate lets it pass)"
            )
    if not prompts:
        raise ConfigError(
            f"{path}: all {num_skipped} prompts are longer than {max_prompt_tokens} tokens"
        )
    return LoadedPrompts(prompts, num_skipped, num_truncated)


def _rendered(
    path: str, tokenizer: "PreTrainedTokenizerBase", prompt_key: str
) -> Iterator[tuple[Row, list[int]]]:
    rows = load_rows(path, prompt_key)
    while batch := list(islice(rows, _BATCH)):
        yield from zip(batch, render(tokenizer, batch), strict=True)


def _check_tokens(row: Row, token_ids: list[int], vocab_size: int) -> None:
    if not token_ids:
        raise ConfigError(f"{row.place}: the prompt has no tokens")
    if max(token_ids) >= vocab_size:
        raise ConfigError(
            f"{row.place}: the prompt has token id {max(token_ids)}, the model knows ids below "
            f"{vocab_size}: tokenizer and model do not belong together"
        )


def _prompt(row: Row, token_ids: list[int]) -> Prompt:
    return Prompt(
        uid=make_uid(0, row.index),
        token_ids=np.array(token_ids, np.int32),
        messages=row.messages,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
    )
