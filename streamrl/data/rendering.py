"""Chat messages to token ids, as the model was trained to read them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.data.files import MODEL, PLAIN
from streamrl.data.rows import Row
from streamrl.errors import ConfigError
from streamrl.model_config import read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Files of which a tokenizer has at least one."""
WHOLE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""What tokenizer_config.json calls a tokenizer that is whole in its tokenizer.json."""


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model directory. Raises ConfigError naming the path if there is none.

    One that is whole in its tokenizer.json is read from there; any other is what AutoTokenizer
    makes of the directory, torch and all. Of some families (Qwen2's is one) AutoTokenizer builds
    the former anew from its vocabulary alone, and loses how it cuts a text.
    """
    _check_model_directory(model_path)
    # Without a file to read, transformers makes up a tokenizer that knows no token.
    if not any(path for name in VOCABULARIES for path in Path(model_path).glob(name)):
        raise ConfigError(f"{model_path}: holds no tokenizer (tokenizer.json or the like)")
    try:
        if _is_whole(Path(model_path)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    # The tokenizers library raises bare Exception for a damaged tokenizer.json.
    except Exception as error:
        raise ConfigError(f"{model_path}: its tokenizer cannot be loaded: {_why(error)}") from error


def _is_whole(path: Path) -> bool:
    """Whether tokenizer.json says all there is to know of a tokenizer."""
    settings = path / "tokenizer_config.json"
    if not settings.is_file() or not (path / "tokenizer.json").is_file():
        return False
    found = json.loads(settings.read_text())
    # Code of the model's own, or Mistral's library, goes before the file.
    is_plain = "auto_map" not in found and not (path / "tekken.json").exists()
    return is_plain and found.get("tokenizer_class") in WHOLE


def load_vocab_size(model_path: str) -> int:
    """How many token ids the model of a directory knows, from its config.json."""
    _check_model_directory(model_path)
    try:
        return int(read_model_config(model_path).get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{model_path}: config.json cannot be used: {_why(error)}") from error


@dataclass(frozen=True)
class Template:
    """How chat messages become text: a jinja `source`, or None for contents joined by newlines.

    `name` is what errors call it.
    """

    source: str | None
    name: str


def load_template(
    name: str, tokenizer: "PreTrainedTokenizerBase", *, setting: str = "template"
) -> Template:
    """The template that `setting` names: model, plain, or a path.

    Raises ConfigError if it cannot be read, or is no template.

    model is the model's own chat template; for a tokenizer without one it is plain.
    """
    if name == PLAIN:
        return Template(None, name)
    if name == MODEL:
        has_own = tokenizer.chat_template is not None
        try:
            source = tokenizer.get_chat_template() if has_own else None
        except ValueError as error:  # of several templates none is the default
            raise ConfigError(f"{setting}={MODEL}: {_why(error)}") from error
        template = Template(source, "the model's chat template")
    else:
        try:
            template = Template(Path(name).read_text(), name)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{setting}={name}: must be {MODEL}, {PLAIN} or a jinja file: {_why(error)}"
            ) from error
    _check_syntax(template, f"{setting}={name}")
    return template


def _check_syntax(template: Template, said: str) -> None:
    """Raise ConfigError, with the line, for what is no template whatever the messages are."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    if template.source is None:
        return
    try:
        # Of no conversation, it is only compiled: with the tags and the sandbox that it runs in.
        render_jinja_template([], chat_template=template.source)
    except Exception as error:
        line = f":{error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"{said}{line}: {_why(error)}") from error


def render(
    tokenizer: "PreTrainedTokenizerBase", rows: Sequence[Row], template: Template | None = None
) -> list[list[int]]:
    """Token ids of each row's prompt, ending where the policy is to write.

    By the template, or the model's own; where that is plain, the contents joined by newlines, with
    the special tokens the tokenizer puts at the start and end of a text. Raises ConfigError naming
    the row that the template refuses.
    """
    template = template or load_template(MODEL, tokenizer)
    texts = [_text(tokenizer, row, template) for row in rows]
    # A template writes its special tokens itself. One call for all: it is far faster than a loop.
    encoded: Mapping[str, Any] = tokenizer(
        texts, add_special_tokens=template.source is None, return_attention_mask=False
    )
    return list(encoded["input_ids"])


def _text(tokenizer: "PreTrainedTokenizerBase", row: Row, template: Template) -> str:
    if template.source is None:
        return "\n".join(message["content"] for message in row.messages)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in row.messages],
            chat_template=template.source,
            add_generation_prompt=True,
            tokenize=False,
        )
    # A template is a program: its expressions may raise whatever Python does.
    except Exception as error:
        raise ConfigError(
            f"{row.place}: {template.name} refuses the prompt: {_why(error)}"
        ) from error
    return str(text)


def _check_model_directory(model_path: str) -> None:
    path = Path(model_path)
    if not path.is_dir():
        fact = "is not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"{model_path}: {fact}; the model must be a directory on this machine")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{model_path}: not a model directory: it has no config.json")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
