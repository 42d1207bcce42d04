"""Config section `data`: prompt files and limits of prompts."""

from dataclasses import dataclass, field, replace
from typing import Any

from streamrl.data.files import (
    MODEL_TEMPLATE,
    DataFile,
    check_eval_files,
    check_separate_tasks,
    check_stream_weights,
    parse_data_files,
)
from streamrl.errors import ConfigError

_LONG_PROMPT_ACTIONS = ("error", "skip", "truncate")


@dataclass
class DataConfig:
    """Prompt files, and the treatment of prompts that are too long.

    train: training prompts: a file, a mapping of DataFile's keys (path, weight, split, prompt_key,
        label_key, template, filter, name; of kind reasoning_gym: dataset, size, seed, options,
        system, environment), or a list of files and mappings.
    eval: evaluation prompts in the same form, without weights; may be empty.
    pretrain: file of texts (column `text`) for algorithm.ptx_coef; may be empty.
    prompt_key: column with the prompt, chat messages or text, unless a file sets its own.
    shuffle: train in a new order every epoch (true), or in file order (false).
    max_prompt_tokens: limit of a rendered prompt; null: all tokens that the completion leaves.
    on_long_prompt: action on a longer prompt: error, skip the row, or truncate (keep the end).
    chat_template_kwargs: extra arguments of chat templates, e.g. enable_thinking: false; a column
        of the same name in a row wins.
    max_bad_share: largest tolerated share of unusable rows per file during a run. The stream skips
        and counts unusable rows; a larger share ends the run.
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
        check_separate_tasks(self.train_files, self.eval_files)

    @property
    def train_files(self) -> tuple[DataFile, ...]:
        return self.parse_files(self.train, key="data.train")

    @property
    def eval_files(self) -> tuple[DataFile, ...]:
        return self.parse_files(self.eval, key="data.eval")

    @property
    def shared_template(self) -> str:
        """Template of all files, the model's without files. Raises ConfigError if they differ."""
        files = (*self.train_files, *self.eval_files)
        for file in files:
            if file.template != files[0].template:
                raise ConfigError(
                    f"{file.key}.template={file.template}: differs from {files[0].key}.template="
                    f"{files[0].template}; with an environment all files need the same template"
                )
        return files[0].template if files else MODEL_TEMPLATE

    def parse_files(self, value: Any, *, key: str) -> tuple[DataFile, ...]:
        files = parse_data_files(value, key=key, prompt_key=self.prompt_key)
        return tuple(replace(file, template_arguments=self.chat_template_kwargs) for file in files)

    def compute_prompt_limit(
        self, *, model_tokens: int, max_new_tokens: int, key: str = "generator.max_new_tokens"
    ) -> int:
        """Return the maximum tokens of a prompt.

        model_tokens: context length of the model. max_new_tokens: longest completion, or episode
        without its prompt. key: setting that limits it, for errors. Raises ConfigError if the
        completion leaves no tokens for a prompt, or fewer than max_prompt_tokens.
        """
        available = model_tokens - max_new_tokens
        arithmetic = (
            f"the model's context is {model_tokens} tokens, completions take up to {max_new_tokens}"
        )
        if available < 1:
            raise ConfigError(
                f"{key}={max_new_tokens}: no tokens are left for a prompt: {arithmetic}"
            )
        if self.max_prompt_tokens is None:
            return available
        if self.max_prompt_tokens > available:
            raise ConfigError(
                f"data.max_prompt_tokens={self.max_prompt_tokens}: must be at most"
                f" {available}: {arithmetic}"
            )
        return self.max_prompt_tokens
