"""Conversion of chat messages to token ids with the model's chat template."""

import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError, meta

from streamrl.data.config import MODEL_TEMPLATE, PLAIN_TEMPLATE
from streamrl.data.guarded_text import CODE, TemplateEncoder, find_difference, get_template_encoder
from streamrl.data.rows import DataRow
from streamrl.errors import ConfigError, format_error
from streamrl.files.bounded_read import read_small_text
from streamrl.files.hf_config import (
    MAX_DESCRIPTION_BYTES,
    check_regular_files,
    is_trusted,
    make_untrusted_error,
    read_eos_token_ids,
)
from streamrl.files.typed_settings import describe_read_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""File patterns of which every tokenizer has at least one."""
FAST_TOKENIZER_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes in tokenizer_config.json whose tokenizer is fully described by tokenizer.json."""
RESERVED_ARGUMENTS = (
    *("messages", "tools", "documents", "conversation", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Chat template arguments that rendering sets itself or must not receive."""


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model directory. Raises ConfigError with the path on failure.

    If tokenizer.json is complete or byte-level, load it directly. AutoTokenizer may rebuild the
    tokenizer from its vocabulary with a class of the model's family and lose details: Qwen2's
    class loses the pre-tokenizer, Llama's loses all spaces of a byte-level tokenizer. Other
    directories go through AutoTokenizer, which imports torch.
    """
    import transformers

    check_regular_files(Path(model_path))
    # Without a vocabulary file transformers silently creates an empty tokenizer.
    if not any(path for name in VOCABULARY_FILES for path in Path(model_path).glob(name)):
        raise ConfigError(f"{model_path}: contains no tokenizer (tokenizer.json or similar)")
    try:
        if _has_complete_tokenizer_json(Path(model_path)):
            return transformers.PreTrainedTokenizerFast.from_pretrained(
                model_path, local_files_only=True
            )
        return transformers.AutoTokenizer.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=is_trusted(model_path)
        )
    # The tokenizers library raises bare Exception for a damaged tokenizer.json.
    except Exception as error:
        reason = f"{model_path}: cannot load the tokenizer: {format_error(error)}"
        raise make_untrusted_error(model_path, error) or ConfigError(reason) from error


def _has_complete_tokenizer_json(path: Path) -> bool:
    file, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    if not file.is_file():
        return False
    config = _read_json(settings) if settings.is_file() else {}
    # mistral-common (tekken.json) takes precedence over tokenizer.json. So does the directory's own
    # code (auto_map) if trusted, or if no other class is named.
    has_class = "tokenizer_class" in config and not is_trusted(str(path))
    if ("auto_map" in config and not has_class) or (path / "tekken.json").exists():
        return False
    return config.get("tokenizer_class") in FAST_TOKENIZER_CLASSES or _is_byte_level(
        _read_json(file)
    )


def _read_json(path: Path) -> Any:
    return json.loads(read_small_text(path, most_bytes=MAX_DESCRIPTION_BYTES))


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    """Return whether a parsed tokenizer.json maps bytes to characters before splitting (GPT-2)."""
    steps = content.get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in (steps, *steps.get("decoders", ())))


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja template that turns chat messages into a prompt's text.

    source: text of the template; None joins the contents of the messages with newlines. name: used
    in errors. arguments: passed besides messages and tools. tools_source: template for rows with
    tools, if the model has a separate template for these rows. other_source: a further template of
    the model, and tokens that end a turn, whose control tokens count as well.
    """

    source: str | None
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools_source: str | None = None
    other_source: str = ""

    def select_source(self, *, has_tools: bool) -> str | None:
        return self.tools_source if self.tools_source and has_tools else self.source

    def get_encoder(self, tokenizer: "PreTrainedTokenizerBase") -> TemplateEncoder:
        sources = (self.source or "", self.tools_source or "")
        plain = "".join(_render_plain_turns(tokenizer, source) for source in sources)
        return get_template_encoder(tokenizer, "".join(sources) + self.other_source, plain)

    @property
    def can_render_tools(self) -> bool:
        source = self.select_source(has_tools=True)
        return source is not None and "tools" in _list_template_variables(source)


@dataclass(frozen=True)
class Conversation:
    """Chat messages, and everything else that a chat template needs to render them.

    location: place of the messages, for errors. tools: JSON schemas of functions.
    template_arguments: arguments of the template besides its own.
    """

    location: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def load_chat_template(
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    setting: str = "template",
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Load the chat template `name`: "model", "plain", or the path of a jinja file.

    "model" is the model's own chat template, or plain if the model has none. setting: config key of
    the template, for errors. arguments: passed to the template besides messages and tools. Raises
    ConfigError for an unreadable file, a syntax error, or an argument that the template does not
    use.
    """
    end_ids = read_eos_token_ids(Path(tokenizer.name_or_path))
    ends = "".join(filter(None, tokenizer.convert_ids_to_tokens(end_ids)))
    if name == PLAIN_TEMPLATE:
        return ChatTemplate(None, name, other_source=ends)
    arguments = arguments or {}
    if name == MODEL_TEMPLATE and tokenizer.chat_template is None:
        label = "plain, for a model without a template,"
        return ChatTemplate(None, label, arguments, other_source=ends)
    label, tools_source = name, None
    try:
        if name == MODEL_TEMPLATE:
            label, source = "the model's chat template", tokenizer.get_chat_template()
            tools_source = tokenizer.get_chat_template(tools=[])
        else:
            source = read_small_text(Path(name))
    except (OSError, ValueError) as error:  # such as several named templates without a default
        raise ConfigError(
            f"{setting}={name}: must be {MODEL_TEMPLATE}, {PLAIN_TEMPLATE} or a"
            f" jinja file: {describe_read_error(error)}"
        ) from error
    sources = {source} if tools_source is None else {source, tools_source}
    for text in sources:
        try:
            _list_template_variables(text)
        # Deep nesting overflows the stack of the parser.
        except (TemplateSyntaxError, RecursionError) as error:
            line = f":{error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            problem = f"{setting}={name}{line}: {format_error(error)}"
            raise ConfigError(problem) from error
    # Any row may have tools or not, so accept arguments of either template; rendering checks each
    # row against the template it uses.
    _check_template_arguments("data.chat_template_kwargs", arguments, sources, f"{setting}={name}")
    return ChatTemplate(source, label, arguments, tools_source, ends)


def _check_template_arguments(
    location: str, arguments: Iterable[str], sources: Iterable[str], label: str
) -> None:
    """Raise ConfigError for an argument that is reserved or that no template uses."""
    for name in arguments:
        used = _list_template_variables(*sources)
        if name in RESERVED_ARGUMENTS:
            raise ConfigError(f"{location}.{name}: reserved; set from the row itself")
        if name not in used:
            names = ", ".join(sorted(used.difference(RESERVED_ARGUMENTS)))
            rule = f"it uses {names}: name one of these, or" if names else "it uses none:"
            raise ConfigError(f"{location}.{name}: {label} uses no such argument; {rule} remove it")


def _check_conversation_arguments(conversation: Conversation, template: ChatTemplate) -> None:
    place = conversation.location
    source = template.select_source(has_tools=bool(conversation.tools))
    sources = [] if source is None else [source]
    own = conversation.template_arguments
    _check_template_arguments(f"{place}: chat_template_kwargs", own, sources, template.name)
    if sources:
        inherited = template.arguments.keys() - own
        location = f"{place}: data.chat_template_kwargs"
        _check_template_arguments(location, inherited, sources, template.name)
    if conversation.tools and not template.can_render_tools:
        raise ConfigError(
            f"{place}: tools: {template.name} does not use them; remove them, or choose another"
            " template, as in data.train={path: ..., template: mine.jinja}"
        )


@functools.lru_cache(maxsize=16)
def _list_template_variables(*sources: str) -> frozenset[str]:
    """Return the arguments that jinja templates use: variables that they read and do not set.

    Raises TemplateSyntaxError.
    """
    from transformers.utils import chat_template_utils

    variables: set[str] = set()
    for source in sources:
        environment = chat_template_utils._compile_jinja_template(source).environment
        variables |= meta.find_undeclared_variables(environment.parse(source))
    return frozenset(variables)


def render_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[DataRow],
    template: ChatTemplate | None = None,
) -> list[list[int]]:
    """Render the prompts of data rows to token ids, ending where the policy starts to write.

    A row writes no control token: where it spells one, its prompt has the characters. Without a
    template source, message contents are joined by newlines and preceded by the tokenizer's BOS
    tokens. A last assistant message is left open for the policy to continue. Raises ConfigError for
    a row that the template refuses or the tokenizer does not round-trip.
    """
    template = template or load_chat_template(MODEL_TEMPLATE, tokenizer)
    conversations = [
        Conversation(row.location, row.messages, row.tools, row.template_arguments) for row in rows
    ]
    texts = [render_text(tokenizer, conversation, template) for conversation in conversations]
    _check_round_trip(tokenizer, rows, texts)
    # One batched call is far faster than a loop.
    encoder = template.get_encoder(tokenizer)
    encoded = _encode_texts(tokenizer, [text.replace(CODE, "") for text in texts])
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if not encoder.is_plain(text, encoded[number]):
            try:
                encoded[number] = encoder.encode(text)
            except ConfigError as error:
                raise ConfigError(f"{row.location}: {error}") from error
    opening = get_frame_tokens(tokenizer)[0] if template.source is None else []
    for row, token_ids in zip(rows, encoded, strict=True):
        if token_ids and token_ids[-1] == tokenizer.eos_token_id:
            raise ConfigError(
                f"{row.location}: the prompt ends with {tokenizer.eos_token}, so the policy has"
                f" nothing to continue: {template.name} must leave the prompt open, as with"
                " add_generation_prompt"
            )
    return [opening + token_ids for token_ids in encoded]


def _encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    encoded: Mapping[str, Any] = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False
    )
    return list(encoded["input_ids"])


def decode_ids(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int]) -> str:
    """Decode token ids to text with special tokens, without changing whitespace."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)


def get_frame_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds before a text (BOS) and after it (EOS)."""
    (content,) = _encode_texts(tokenizer, ["a"])
    with_special: list[int] = list(tokenizer("a")["input_ids"])
    starts = range(len(with_special) - len(content) + 1)
    start = next(i for i in starts if with_special[i : i + len(content)] == content)
    return with_special[:start], with_special[start + len(content) :]


def _check_round_trip(
    tokenizer: "PreTrainedTokenizerBase", rows: Sequence[DataRow], texts: Sequence[str]
) -> None:
    """Raise ConfigError for the first row whose text changes when encoded and decoded.

    Compares the text between special tokens, up to Unicode normalization and a leading space;
    special tokens may absorb whitespace around them.
    """
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    special = sorted(filter(None, added.union(tokenizer.all_special_tokens)), key=len, reverse=True)
    between = re.compile("|".join(map(re.escape, special)) or "(?!)")
    pieces = [
        (row, piece)
        for row, text in zip(rows, texts, strict=True)
        for piece in between.split(text.replace(CODE, ""))
        if not piece.isspace() and piece
    ]
    if not pieces:
        return
    encoded = _encode_texts(tokenizer, [piece for _, piece in pieces])
    decoded = tokenizer.batch_decode(encoded, clean_up_tokenization_spaces=False)
    for (row, piece), text in zip(pieces, decoded, strict=True):
        expected, actual = (unicodedata.normalize("NFC", t) for t in (piece, str(text)))
        if actual.removeprefix(" ") != expected.removeprefix(" "):
            start = max(0, find_difference(expected, actual) - 12)
            before, after = (t[start : start + 24] for t in (expected, actual))
            raise ConfigError(
                f"{row.location}: the model's tokenizer changes the text: {before!r} decodes to"
                f" {after!r}. Either tokenizer.json does not match tokenizer_config.json, or the"
                " vocabulary lacks these characters"
            )


def render_text(
    tokenizer: "PreTrainedTokenizerBase",
    conversation: Conversation,
    template: ChatTemplate,
    *,
    is_closed: bool = False,
) -> str:
    """Render a conversation to text that ends where the policy starts to write.

    A last assistant message is left open for the policy to continue. is_closed: end after the last
    message instead. The text has codes (`TextGuard`) where words other than the template's spell
    a control token. Raises ConfigError for a conversation that the template refuses.
    """
    _check_conversation_arguments(conversation, template)
    source = template.select_source(has_tools=bool(conversation.tools))
    encoder = template.get_encoder(tokenizer)
    messages = [dict(message) for message in conversation.messages]
    if source is not None and any(message.get("tool_calls") for message in messages):
        is_text = _takes_text_arguments(tokenizer, source)
        messages = [_write_arguments(m, conversation.location, is_text=is_text) for m in messages]
    messages = [encoder.guard_message(message) for message in messages]
    if source is None:
        return "\n".join(message["content"] for message in messages)
    is_open = not is_closed and messages[-1]["role"] == "assistant"
    try:
        return _apply_template(
            tokenizer,
            source,
            messages,
            tools=encoder.guard(list(conversation.tools)) or None,
            add_generation_prompt=not is_closed and not is_open,
            continue_final_message=is_open,
            **{**template.arguments, **encoder.guard(dict(conversation.template_arguments))},
        )
    except ConfigError as error:
        problem = f"{conversation.location}: {template.name} refuses the prompt: {error}"
        raise ConfigError(problem) from error.__cause__


def render_closed_text(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, template: ChatTemplate
) -> str:
    """Render a whole conversation as a reward model reads it, between the tokens of its frame.

    Without a template source the last message follows the others without a newline.
    """
    if template.source is not None:
        return render_text(tokenizer, conversation, template, is_closed=True)
    encoder = template.get_encoder(tokenizer)
    contents = [encoder.guard(message["content"]) for message in conversation.messages]
    return "\n".join(contents[:-1]) + contents[-1]


def get_text_frame(
    tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate
) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a text that a reward model reads; a template has them."""
    return get_frame_tokens(tokenizer) if template.source is None else ([], [])


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    source: str,
    messages: list[dict[str, Any]],
    **arguments: Any,
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=source, tokenize=False, **arguments
            )
        )
    # Template expressions may raise any Python exception.
    except Exception as error:
        raise ConfigError(format_error(error)) from error


@functools.lru_cache(maxsize=16)
def _render_plain_turns(tokenizer: "PreTrainedTokenizerBase", source: str) -> str:
    """Render turns without thoughts or calls; "" if the template refuses them."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    try:
        return _apply_template(tokenizer, source, turns, add_generation_prompt=True)
    except ConfigError:
        return ""


def _write_arguments(message: Mapping[str, Any], location: str, *, is_text: bool) -> dict[str, Any]:
    """Return a message whose calls have their arguments in the form that the template takes.

    Most templates write an object as JSON, and would quote a text, which OpenAI's API has;
    DeepSeek's join texts.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not isinstance(arguments, dict):
                raise ValueError(f"got {type(arguments).__name__}")
        except ValueError as error:
            raise ConfigError(
                f"{location}: the arguments of a tool call must be an object, or JSON text of one,"
                f" as OpenAI's API has them: {error}"
            ) from error
        text = json.dumps(arguments, ensure_ascii=False) if is_text else arguments
        written = {**function, "arguments": text}
        calls.append({**call, "function": written} if "function" in call else written)
    return {**message, "tool_calls": calls} if calls else dict(message)


@functools.lru_cache(maxsize=16)
def _takes_text_arguments(tokenizer: "PreTrainedTokenizerBase", source: str) -> bool:
    """Return whether a template writes arguments of calls as they are, which must be text then."""
    function = {"name": "look_up", "arguments": {"word": "x"}}
    call = {"id": "call00000", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = _apply_template(tokenizer, source, [{"role": "user", "content": ""}, turn])
    except ConfigError as error:
        return isinstance(error.__cause__, TypeError)
    return "{'word'" in text
