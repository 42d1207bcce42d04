"""Chat messages to token ids, as the model was trained to read them."""

import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.data.files import MODEL_TEMPLATE, PLAIN_TEMPLATE
from streamrl.data.reading.rows import DataRow
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_small_text
from streamrl.files.hf_config import (
    MAX_DESCRIPTION_BYTES,
    check_regular_files,
    is_trusted,
    make_untrusted_error,
    read_model_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Files of which a tokenizer has at least one."""
FAST_TOKENIZER_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""What tokenizer_config.json calls a tokenizer that is whole in its tokenizer.json."""
RESERVED_ARGUMENTS = (
    "messages",
    "tools",
    "documents",
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)
"""Arguments of a chat template that rendering sets itself, or must not get."""


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model directory. Raises ConfigError naming the path if there is none.

    One that is whole in its tokenizer.json, or is byte-level there, is read from that file; any
    other is what AutoTokenizer makes of the directory, torch and all. AutoTokenizer may build a
    tokenizer anew from its vocabulary, by the class that tokenizer_config.json or the model's
    family names: Qwen2's loses how a text is cut so, and Llama's all spaces of a byte-level one.
    """
    _check_model_directory(model_path)
    # Without a file to read, transformers makes up a tokenizer that knows no token.
    if not any(path for name in VOCABULARY_FILES for path in Path(model_path).glob(name)):
        raise ConfigError(f"{model_path}: holds no tokenizer (tokenizer.json or the like)")
    try:
        if _has_complete_tokenizer_json(Path(model_path)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=is_trusted(model_path)
        )
    # The tokenizers library raises bare Exception for a damaged tokenizer.json.
    except Exception as error:
        reason = f"{model_path}: its tokenizer cannot be loaded: {_format_error(error)}"
        raise make_untrusted_error(model_path, error) or ConfigError(reason) from error


def _has_complete_tokenizer_json(path: Path) -> bool:
    """Whether tokenizer.json says all there is to know of a tokenizer."""
    file, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    if not file.is_file():
        return False
    found = _read_json(settings) if settings.is_file() else {}
    # Mistral's library goes before the file, and so does code of the model's own, where it is run
    # or nothing else is named.
    has_class = "tokenizer_class" in found and not is_trusted(str(path))
    if ("auto_map" in found and not has_class) or (path / "tekken.json").exists():
        return False
    return found.get("tokenizer_class") in FAST_TOKENIZER_CLASSES or _is_byte_level(
        _read_json(file)
    )


def _read_json(path: Path) -> Any:
    return json.loads(read_small_text(path, most_bytes=MAX_DESCRIPTION_BYTES))


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json maps bytes to characters before it cuts a text, as GPT-2's does."""
    steps = content.get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in (steps, *steps.get("decoders", ())))


def load_vocab_size(model_path: str) -> int:
    """How many token ids the model of a directory knows, from its config.json."""
    _check_model_directory(model_path)
    try:
        return int(read_model_config(model_path).get_text_config().vocab_size)
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{model_path}: config.json cannot be used: {_format_error(error)}"
        ) from error


@dataclass(frozen=True)
class ChatTemplate:
    """How chat messages become text: a jinja `source`, or None for contents joined by newlines.

    `name` is what errors call it; `arguments` are passed to it besides messages and tools. Rows
    with tools are rendered by `tools_source`, where a model has a template of its own for them.
    """

    source: str | None
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools_source: str | None = None

    def select_source(self, row: DataRow) -> str | None:
        """Tell by what a row is rendered."""
        return self.tools_source if self.tools_source and row.tools else self.source


def load_chat_template(
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    setting: str = "template",
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The template that `setting` names: model, plain, or a path.

    Raises ConfigError if it cannot be read, is no template, or does not read an argument.

    model is the model's own chat template; for a tokenizer without one it is plain.
    """
    if name == PLAIN_TEMPLATE:
        return ChatTemplate(None, name)
    if name == MODEL_TEMPLATE:
        has_own = tokenizer.chat_template is not None
        try:
            source = tokenizer.get_chat_template() if has_own else None
            for_tools = tokenizer.get_chat_template(tools=[]) if has_own else None
        except ValueError as error:  # of several templates none is the default
            raise ConfigError(f"{setting}={MODEL_TEMPLATE}: {_format_error(error)}") from error
        said = "the model's chat template" if has_own else "plain, for a model without a template,"
        template = ChatTemplate(source, said, arguments or {}, for_tools)
    else:
        try:
            template = ChatTemplate(read_small_text(Path(name)), name, arguments or {})
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{setting}={name}: must be {MODEL_TEMPLATE}, {PLAIN_TEMPLATE} or a"
                f" jinja file: {_format_error(error)}"
            ) from error
    sources = {source for source in (template.source, template.tools_source) if source is not None}
    for source in sources:
        _check_template_syntax(source, f"{setting}={name}")
    if sources:
        # Which rows have tools is not known here: for each, `render` checks the one that it uses.
        _check_template_arguments(
            "data.chat_template_kwargs", template.arguments, sources, f"{setting}={name}"
        )
    return template


def _check_template_syntax(source: str, said: str) -> None:
    """Raise ConfigError, with the line, for what is no template whatever the messages are."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        # Of no conversation, it is only compiled: with the tags and the sandbox that it runs in.
        render_jinja_template([], chat_template=source)
    except Exception as error:
        line = f":{error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"{said}{line}: {_format_error(error)}") from error


def _check_template_arguments(
    place: str, arguments: Iterable[str], sources: Iterable[str], said: str
) -> None:
    """Raise ConfigError for an argument that no template of these reads, as a misspelt one.

    `place` is where the arguments come from, `said` what the templates are called.
    """
    for name in arguments:
        read = _list_template_variables(*sources)
        if name in RESERVED_ARGUMENTS:
            raise ConfigError(f"{place}.{name}: is set by the rows themselves")
        if name not in read:
            known = ", ".join(sorted(read.difference(RESERVED_ARGUMENTS)))
            rule = f"{known}: name one of these, or" if known else "none:"
            raise ConfigError(
                f"{place}.{name}: {said} reads no such argument; it reads {rule} remove it"
            )


def _check_row_arguments(row: DataRow, template: ChatTemplate) -> None:
    """Raise ConfigError for what a row, or the setting, gives to a template that never reads it."""
    source = template.select_source(row)
    sources = [] if source is None else [source]
    place = f"{row.place}: chat_template_kwargs"
    _check_template_arguments(place, row.template_arguments, sources, template.name)
    if sources:
        rest = template.arguments.keys() - row.template_arguments
        place = f"{row.place}: data.chat_template_kwargs"
        _check_template_arguments(place, rest, sources, template.name)
    if row.tools and "tools" not in _list_template_variables(*sources):
        raise ConfigError(
            f"{row.place}: tools: {template.name} does not read them; remove them from the row, or"
            " name a template that does, as in data.train={path: ..., template: mine.jinja}"
        )


@functools.lru_cache(maxsize=16)
def _list_template_variables(*sources: str) -> frozenset[str]:
    """Name what templates read."""
    from jinja2 import meta
    from transformers.utils import chat_template_utils

    found: set[str] = set()
    for source in sources:
        environment = chat_template_utils._compile_jinja_template(source).environment
        found |= meta.find_undeclared_variables(environment.parse(source))
    return frozenset(found)


def render_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[DataRow],
    template: ChatTemplate | None = None,
) -> list[list[int]]:
    """Token ids of each row's prompt, ending where the policy is to write.

    By the template, or the model's own; where that is plain, the contents joined by newlines, with
    the special tokens that the tokenizer puts at the start of a text. A last message of the
    assistant is left open, to be continued. Raises ConfigError naming the row that the template
    refuses, or of whose text the tokenizer loses a part.
    """
    template = template or load_chat_template(MODEL_TEMPLATE, tokenizer)
    texts = [_render_text(tokenizer, row, template) for row in rows]
    _check_round_trip(tokenizer, rows, texts)
    # A template writes its special tokens itself. One call for all: it is far faster than a loop.
    encoded = _encode_texts(tokenizer, texts)
    opening = _get_opening_tokens(tokenizer) if template.source is None else []
    for row, token_ids in zip(rows, encoded, strict=True):
        if token_ids and token_ids[-1] == tokenizer.eos_token_id:
            raise ConfigError(
                f"{row.place}: the prompt ends with {tokenizer.eos_token}, behind which the policy"
                f" has nothing to say: {template.name} must leave it open, as with"
                " add_generation_prompt"
            )
    return [opening + token_ids for token_ids in encoded]


def _encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Encode texts without special tokens around them."""
    encoded: Mapping[str, Any] = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False
    )
    return list(encoded["input_ids"])


def _get_opening_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the special tokens that the tokenizer puts before a text.

    Those that it puts behind one, as an end of sequence, would end what the policy is to continue.
    """
    (content,) = _encode_texts(tokenizer, ["a"])
    around: list[int] = list(tokenizer("a")["input_ids"])
    starts = range(len(around) - len(content) + 1)
    start = next(i for i in starts if around[i : i + len(content)] == content)
    return around[:start]


def _check_round_trip(
    tokenizer: "PreTrainedTokenizerBase", rows: Sequence[DataRow], texts: Sequence[str]
) -> None:
    """Raise ConfigError naming the first row whose text does not come back from its tokens.

    What stands between special tokens may come back in another Unicode normalization, and with or
    without a space before it; blanks alone are left out, as such a token may swallow those around.
    """
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    special = sorted(filter(None, added.union(tokenizer.all_special_tokens)), key=len, reverse=True)
    between = re.compile("|".join(map(re.escape, special)) or "(?!)")
    pieces = [
        (row, piece)
        for row, text in zip(rows, texts, strict=True)
        for piece in between.split(text)
        if not piece.isspace() and piece
    ]
    if not pieces:
        return
    encoded = _encode_texts(tokenizer, [piece for _, piece in pieces])
    decoded = tokenizer.batch_decode(encoded, clean_up_tokenization_spaces=False)
    for (row, piece), text in zip(pieces, decoded, strict=True):
        wanted, found = (unicodedata.normalize("NFC", each) for each in (piece, str(text)))
        if found.removeprefix(" ") != wanted.removeprefix(" "):
            before, after = _cut_to_difference(wanted, found)
            raise ConfigError(
                f"{row.place}: the model's tokenizer does not keep the text: {before!r} comes back"
                f" as {after!r}; its tokenizer.json does not fit its tokenizer_config.json, or it"
                " knows no such characters"
            )


def _cut_to_difference(wanted: str, found: str, *, width: int = 12) -> tuple[str, str]:
    """Cut both texts to what lies around the first character in which they differ."""
    pairs = zip(wanted, found, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(found)))
    start = max(0, place - width)
    return wanted[start : place + width], found[start : place + width]


def _render_text(tokenizer: "PreTrainedTokenizerBase", row: DataRow, template: ChatTemplate) -> str:
    _check_row_arguments(row, template)
    source = template.select_source(row)
    if source is None:
        return "\n".join(message["content"] for message in row.messages)
    is_open = row.messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in row.messages],
            tools=list(row.tools) or None,
            chat_template=source,
            add_generation_prompt=not is_open,
            continue_final_message=is_open,
            tokenize=False,
            **{**template.arguments, **row.template_arguments},
        )
    # A template is a program: its expressions may raise whatever Python does.
    except Exception as error:
        raise ConfigError(
            f"{row.place}: {template.name} refuses the prompt: {_format_error(error)}"
        ) from error
    return str(text)


def _check_model_directory(model_path: str) -> None:
    path = Path(model_path)
    if not path.is_dir():
        fact = "is not a directory" if path.exists() else "does not exist"
        raise ConfigError(f"{model_path}: {fact}; the model must be a directory on this machine")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{model_path}: not a model directory: it has no config.json")
    check_regular_files(path)


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
