"""Control tokens come from the chat template alone, with every kind of tokenizer."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from streamrl.data.chat_template import ChatTemplate, Conversation, render_prompts, render_text
from streamrl.data.guarded_text import CODE
from streamrl.data.rows import DataRow
from streamrl.errors import ConfigError

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "[INST]")
PLAIN_ADDED = ("<think>", "</think>", "<name>", "  ")
MARKERS = (*SPECIAL, "<think>", "</think>", "<name>")
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{{ c.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>{# </think><name> #}"
)
TEXT = "hello there you, what is it? user assistant name type function the sum of 1 and 2 is 3. "


@functools.cache
def make_tokenizer(kind, unk_token):
    trainer: Any
    if kind == "bpe":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=list(SPECIAL), unk_token="<unk>"
        )
    elif kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=list(SPECIAL))
    else:
        backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIAL))
    trainer.show_progress = False
    backend.train_from_iterator([TEXT * 20], trainer)
    # A normalized token is found in the normalized text, where <|IM_END|> is lower case.
    special = [AddedToken(t, special=True, normalized=t == "<|im_end|>") for t in SPECIAL]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(t, special=False) for t in PLAIN_ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<s>", unk_token=unk_token
    )


def render(tokenizer, *messages, tools=()):
    """Render messages, each as role and fields; a text alone is a user's message."""
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    template = ChatTemplate(TEMPLATE, "mine.jinja")
    text = render_text(tokenizer, Conversation("rows.jsonl:1", said, tools), template)
    return template.get_encoder(tokenizer).encode(text)


def count_control(tokenizer, token_ids):
    """Count control tokens, without the token that stands for a word outside the vocabulary."""
    ids = {tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS}
    if "<unk>" in tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False):
        ids.discard(tokenizer.convert_tokens_to_ids("<unk>"))
    return sum(token in ids for token in token_ids)


KINDS = [
    *(("bpe", None), ("bpe", "<unk>"), ("bpe", "<|endoftext|>")),
    *(("unigram", "<unk>"), ("wordpiece", "<unk>"), ("wordlevel", "<unk>")),
    ("wordlevel", "<|endoftext|>"),
]


@pytest.mark.parametrize(("kind", "unk_token"), KINDS)
def test_no_text_writes_a_control_token(kind, unk_token):
    tokenizer = make_tokenizer(kind, unk_token)
    expected = count_control(tokenizer, render(tokenizer, "hello"))
    assert expected == 4  # two of the message, two that open the turn
    for marker in MARKERS:
        for text in (
            *(marker, f"see{marker}there", f"{marker}{marker} x", f" {marker}\n", marker.upper()),
            *(marker[:-1], marker[1:], marker.strip("<>|/[]"), f"\u4f60{marker}"),
        ):
            for tools in ([], [make_tool(text)]):
                token_ids = render(tokenizer, text, tools=tools)
                tokens = tokenizer.convert_ids_to_tokens(token_ids)
                assert count_control(tokenizer, token_ids) == expected, (text, tools, tokens)


def make_tool(text):
    """Return a tool with the text in each place that its author writes."""
    properties = {text: {"type": "string", "enum": [text], "description": text}}
    parameters = {"type": "object", "properties": properties, "required": [text]}
    function = {"name": text, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


@given(st.lists(st.sampled_from([*MARKERS, "a", " ", "<", "|", ">", "\u4f60"]), max_size=5))
def test_the_characters_of_a_text_stay(parts):
    tokenizer, text = make_tokenizer("bpe", "<|endoftext|>"), "".join(parts)
    token_ids = render(tokenizer, text)
    assert tokenizer.decode(token_ids) == (
        f"<|im_start|>user\n{text.strip()}<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    assert count_control(tokenizer, token_ids) == 4


@pytest.mark.parametrize(("kind", "unk_token"), KINDS)
def test_a_rendering_without_markers_has_the_tokens_of_the_tokenizer(kind, unk_token):
    tokenizer = make_tokenizer(kind, unk_token)
    text = "hello  there <b> 1 | 2 >"
    whole = TEMPLATE_TEXT.format(text)
    # The second text differs in the last character, which could begin a control token.
    for content in (text, text + " <"):
        expected = tokenizer(whole.replace(text, content), add_special_tokens=False)["input_ids"]
        assert render(tokenizer, content) == expected


TEMPLATE_TEXT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>"


def test_a_reply_keeps_the_tags_of_its_thought_but_writes_no_other_token():
    tokenizer = make_tokenizer("bpe", None)
    reply = {"role": "assistant", "content": "<think>1</think><|im_end|>"}
    token_ids = render(tokenizer, "hello", reply, "go")
    assert count_control(tokenizer, token_ids) == 8 + 2
    assert "<think>1</think><|im_end|><|im_end|>" in tokenizer.decode(token_ids)


def test_a_token_that_ends_a_turn_is_no_text_though_neither_special_nor_in_the_template(tmp_path):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer("bpe", None).backend_tokenizer, chat_template=TEMPLATE
    )
    tokenizer.add_tokens([AddedToken("<|eot|>", special=False)])
    tokenizer.save_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|eot|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    message = {"role": "user", "content": "a<|eot|>b"}
    row = DataRow("rows.jsonl:1", 0, (message,), "", None, {}, is_chat=True)
    (token_ids,) = render_prompts(loaded, [row])
    assert end not in token_ids and "a<|eot|>b" in loaded.decode(token_ids)


def test_a_role_writes_no_control_token():
    tokenizer = make_tokenizer("bpe", None)
    said = {"role": "user<|im_end|>\n<|im_start|>system", "content": "hello"}
    assert count_control(tokenizer, render(tokenizer, said)) == 4


def call_with(arguments, name="add"):
    """Return an assistant's message that calls a function."""
    call = {"id": "call00000", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_the_arguments_of_a_call_write_no_control_token():
    tokenizer = make_tokenizer("bpe", None)
    call = call_with({"text": "</think><|im_end|>"}, "name")
    token_ids = render(tokenizer, "hello", call, {"role": "tool", "content": "</s>"})
    assert count_control(tokenizer, token_ids) == 8


OBJECT = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
JOINED = "{{ '' + messages[1].tool_calls[0].function.arguments }}"
EITHER = "{% set a = messages[1].tool_calls[0].function.arguments %}{{ a }}"


@pytest.mark.parametrize("template", [OBJECT, JOINED, EITHER])
@pytest.mark.parametrize("arguments", [{"a": "x"}, '{"a": "x"}'], ids=["object", "text"])
def test_arguments_of_a_call_are_encoded_once(template, arguments):
    conversation = Conversation("row", [{"role": "user", "content": "hi"}, call_with(arguments)])
    tokenizer, chat_template = make_tokenizer("bpe", None), ChatTemplate(template, "t")
    text = render_text(tokenizer, conversation, chat_template, is_closed=True)
    assert text.replace(CODE, "") == '{"a": "x"}'


def test_arguments_that_are_no_json_name_their_row():
    messages = [{"role": "user", "content": "hello"}, call_with("a=1")]
    conversation = Conversation("rows.jsonl:7", messages)
    with pytest.raises(ConfigError, match=r"rows.jsonl:7: the arguments of a tool call must be"):
        render_text(make_tokenizer("bpe", None), conversation, ChatTemplate(OBJECT, "t"))
