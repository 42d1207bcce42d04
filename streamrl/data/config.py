"""The settings of a run's data."""

from dataclasses import dataclass, field, replace
from typing import Any

from streamrl.data.files import DataFile, check_eval_files, check_stream_weights, parse_data_files
from streamrl.errors import ConfigError

_LONG_PROMPT_ACTIONS = ("error", "skip", "truncate")


@dataclass
class DataConfig:
    """Where prompts come from, and what becomes of those that are too long.

    train: training prompts: a file, a mapping of what DataFile has (path, weight, split,
        prompt_key, label_key, template, filter, name), or a list of those.
    eval: evaluation prompts, written likewise, without weights; empty: none.
    pretrain: file of texts (column `text`) for algorithm.ptx_coef; empty: none.
    prompt_key: column that holds the prompt, chat messages or text, where a file names no other.
    shuffle: a new order in every epoch (true) or the file's order (false), for training.
    max_prompt_tokens: tokens of a rendered prompt; null: all that the completion leaves.
    on_long_prompt: for a longer one: error, skip (leave the row out) or truncate (keep its end).
    chat_template_kwargs: what chat templates get besides the messages, as enable_thinking: false;
        a column of that name in a row goes before it.
    max_bad_share: most of a file's rows that may turn out to be unusable once a run has begun: each
        is left out and counted; beyond it the run ends.
    """

    train: Any = ""
    eval: Any = ""
    pretrain: str = ""
    prompt_key: str = "prompt"
    shuffle: bool = True
    max_prompt_tokens: int | None = None
    on_long_prompt: str = "error"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_bad_share: float = 0.1

    def __post_init__(self) -> None:
        if self.on_long_prompt not in _LONG_PROMPT_ACTIONS:
            raise ConfigError(
                f"data.on_long_prompt={self.on_long_prompt}: must be one of "
                + ", ".join(_LONG_PROMPT_ACTIONS)
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens={self.max_prompt_tokens}: must be 1 or more")
        if not 0 <= self.max_bad_share <= 1:
            raise ConfigError(f"data.max_bad_share={self.max_bad_share}: must be from 0 to 1")
        if not self.prompt_key:
            raise ConfigError("data.prompt_key=: must name a column")
        check_stream_weights(self.train_files, key="data.train")
        check_eval_files(self.eval_files, key="data.eval")

    @property
    def train_files(self) -> tuple[DataFile, ...]:
        """The files of training prompts."""
        return self.parse_files(self.train, key="data.train")

    @property
    def eval_files(self) -> tuple[DataFile, ...]:
        """The files of evaluation prompts."""
        return self.parse_files(self.eval, key="data.eval")

    def parse_files(self, value: Any, *, key: str) -> tuple[DataFile, ...]:
        """Return the files that a value of setting `key` names, read as `data` says."""
        files = parse_data_files(value, key=key, prompt_key=self.prompt_key)
        return tuple(replace(file, template_arguments=self.chat_template_kwargs) for file in files)

    def compute_prompt_limit(self, *, model_tokens: int, max_new_tokens: int) -> int:
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
