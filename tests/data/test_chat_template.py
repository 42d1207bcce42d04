import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from streamrl.data.chat_template import (
    load_chat_template,
    load_tokenizer,
    render_prompts,
)
from streamrl.data.config import DataFile
from streamrl.data.prompt_file import PromptFile, PromptLimits
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_vocab_size
from tests.data_rows import load_rows

CHAT = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "h\u00e9"},
    {"role": "user", "content": " bye\n"},
]


def test_a_prompt_is_rendered_by_the_models_chat_template(tokenizer, write_rows):
    rows = list(load_rows(write_rows({"prompt": CHAT}, {"prompt": "2+3="})))
    rendered = render_prompts(tokenizer, rows)
    for token_ids, messages in zip(rendered, (CHAT, [dict(rows[1].messages[0])]), strict=True):
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert token_ids == expected
    assert tokenizer.decode(rendered[1]) == "<user>2+3=</s><assistant>"


def test_without_a_template_contents_are_joined_after_bos_without_eos(tokenizer, write_rows):
    tokenizer.chat_template = None
    ends = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)],
    )
    tokenizer.backend_tokenizer.post_processor = ends
    assert tokenizer("hi").input_ids[-1] == tokenizer.eos_token_id
    rows = list(load_rows(write_rows({"prompt": CHAT[1:]}, {"prompt": ""})))
    joined, empty = render_prompts(tokenizer, rows)
    assert joined[0] == empty[0] == tokenizer.bos_token_id
    assert tokenizer.decode(joined[1:]) == "h\u00e9\n bye\n"
    assert len(empty) == 1


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[5].content.x }}", "UndefinedError"),
        ("{{ raise_exception('no system role') }}", "TemplateError"),
    ],
)
def test_any_template_exception_names_row_and_template(
    tokenizer, write_rows, tmp_path, source, error
):
    path = tmp_path / "mine.jinja"
    path.write_text(source)
    template = load_chat_template(str(path), tokenizer)
    with pytest.raises(ConfigError, match=rf"line 1: .*mine.jinja refuses the prompt: {error}: "):
        render_prompts(tokenizer, list(load_rows(write_rows({"prompt": "fine"}))), template)


def test_a_template_syntax_error_is_reported_on_load_with_its_line(tokenizer, tmp_path):
    path = tmp_path / "mine.jinja"
    for source in ("fine\n{{ messages[0].content }}{% endfor %}", "\n{{ messages | no_such }}"):
        path.write_text(source)
        with pytest.raises(ConfigError, match=r"^data.template=.*mine.jinja:2: Template\w+Error: "):
            load_chat_template(str(path), tokenizer, setting="data.template")
    tokenizer.chat_template = "{% if %}"
    with pytest.raises(ConfigError, match=r"^template=model:1: TemplateSyntaxError: "):
        load_chat_template("model", tokenizer)


def create_word_tokenizer(vocabulary, pre_tokenizer, decoder):
    """Create a tokenizer with a token per word of the vocabulary; the first is the unknown word."""
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(vocabulary)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=vocabulary[0]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=vocabulary[0])


def save_character_model(path: Path, model_type: str) -> str:
    """Create a model directory of a family whose tokenizer has a token per character."""
    split_characters = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = create_word_tokenizer("?ab ", split_characters, decoders.Fuse())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(path)


def test_a_complete_tokenizer_json_defines_the_tokenization(tmp_path):
    tokenizer = load_tokenizer(save_character_model(tmp_path / "model", "qwen2"))
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "qwen2"}')
    for loaded in (tokenizer, load_tokenizer(str(tmp_path / "saved"))):
        assert loaded("a b").input_ids == [1, 3, 2]
        assert loaded.decode([1, 3, 2]) == "a b"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "phi3", "glm4"])
def test_other_families_load_through_auto_tokenizer(tmp_path, family):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(save_character_model(tmp_path, family))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is type(reference)
    messages = [{"role": "user", "content": "a  b"}]
    for loaded in (tokenizer, reference):
        assert loaded.apply_chat_template(messages, return_dict=False) == [1, 3, 3, 2, 3]
    assert tokenizer.backend_tokenizer.to_str() == reference.backend_tokenizer.to_str()


@pytest.mark.parametrize("tokenizer", [None, "{}", "{"])
def test_a_damaged_model_directory_is_refused_in_one_line(tokenizer, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: .*$"):
        load_tokenizer(str(tmp_path))


def test_a_nested_text_config_gives_the_vocabulary_size(tmp_path):
    config = {"model_type": "qwen2_vl", "text_config": {"vocab_size": 77}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vocab_size(str(tmp_path)) == 77


#: Families of published models with a byte-level tokenizer.json.
CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GemmaTokenizer", None]
TEXT = "What is  7+5-3?\n\n\tЖю, 什么 ÷ 🙂 end "


@pytest.mark.parametrize(
    "class_settings", [{}, {"auto_map": {"AutoTokenizer": ["code.Mine", None]}}]
)
@pytest.mark.parametrize("name", CLASSES)
def test_a_byte_level_tokenizer_json_overrides_the_named_class(
    model_dir, tmp_path, name, class_settings
):
    path = tmp_path / "model"
    shutil.copytree(model_dir, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": name, **class_settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(path))
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == TEXT
    # A checkpoint saves the same tokenizer.
    tokenizer.save_pretrained(tmp_path / "saved")
    shutil.copyfile(path / "config.json", tmp_path / "saved" / "config.json")
    assert load_tokenizer(str(tmp_path / "saved"))(TEXT).input_ids == tokenizer(TEXT).input_ids


@pytest.mark.parametrize(("vocabulary", "lost"), [("abc ", "a d"), ("abc", "a b")])
def test_a_row_that_does_not_round_trip_is_named(write_rows, vocabulary, lost):
    split_characters = pre_tokenizers.Split("", "isolated")
    tokenizer = create_word_tokenizer(["?", *vocabulary], split_characters, decoders.Fuse())
    rows = list(load_rows(write_rows({"prompt": "abc"}, {"prompt": lost})))
    with pytest.raises(ConfigError, match=f"line 2: the model's tokenizer changes .*'{lost}'"):
        render_prompts(tokenizer, rows)


def test_a_normalizing_tokenizer_does_not_round_trip(tokenizer, write_rows):
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    render_prompts(tokenizer, list(load_rows(write_rows({"prompt": "re\u0301sume\u0301"}))))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    with pytest.raises(ConfigError, match="changes the text: '5² = ' decodes to '52 = '"):
        render_prompts(tokenizer, list(load_rows(write_rows({"prompt": "5² = "}))))


def test_a_leading_space_after_a_special_token_round_trips(write_rows):
    tokenizer = create_word_tokenizer(
        ["<unk>", "[INST]", "▁hi", "▁you", "▁"],
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        decoders.Metaspace(prepend_scheme="first"),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]"]})
    tokenizer.chat_template = "{% for m in messages %}[INST] {{ m.content }}[INST]{% endfor %}"
    chat = [{"role": "user", "content": "hi you"}]
    (prompt,) = render_prompts(tokenizer, list(load_rows(write_rows({"prompt": chat}))))
    assert prompt == [1, 2, 3, 1]


def test_a_last_assistant_message_is_continued(tokenizer, write_rows):
    messages = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "It is"}]
    (prompt,) = render_prompts(tokenizer, list(load_rows(write_rows({"prompt": messages}))))
    assert tokenizer.decode(prompt) == "<user>2+3</s><assistant>It is"


WITH_ARGUMENTS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{{ messages[0].content }}{% if enable_thinking is false %}</think>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_a_template_receives_arguments_and_tools(tokenizer, write_rows):
    tokenizer.chat_template = WITH_ARGUMENTS
    path = write_rows(
        {"prompt": "a"},
        {"prompt": "b", "chat_template_kwargs": {"enable_thinking": True}},
        {"prompt": "c", "tools": TOOLS},
    )
    rows = list(load_rows(path))
    template = load_chat_template("model", tokenizer, arguments={"enable_thinking": False})
    texts = tokenizer.batch_decode(render_prompts(tokenizer, rows, template))
    assert texts == ["a</think>", "b", "[add]c</think>"]
    assert rows[2].extra_info["tools"] == TOOLS


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("enable_thinkin", "uses no such argument; it uses enable_thinking: name one of these"),
        ("tools", "reserved; set from the row"),
    ],
)
def test_an_unused_template_argument_is_refused(tokenizer, name, words):
    tokenizer.chat_template = WITH_ARGUMENTS
    with pytest.raises(ConfigError, match=rf"^data.chat_template_kwargs.{name}: .*{words}"):
        load_chat_template("model", tokenizer, arguments={name: False})


FOR_TOOLS = "{{ tools[0].function.name }}: {{ messages[0].content }}{{ style }}"


def test_rows_with_tools_use_the_tool_template(tokenizer, write_rows):
    tokenizer.chat_template = {"default": WITH_ARGUMENTS, "tool_use": FOR_TOOLS, "rag": "{% if %}"}
    path = write_rows(
        {"prompt": "a", "tools": TOOLS},
        {"prompt": "b", "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": "c", "tools": []},
        {"prompt": "d", "tools": TOOLS, "chat_template_kwargs": {"style": "!"}},
    )
    texts = tokenizer.batch_decode(render_prompts(tokenizer, list(load_rows(path))))
    assert texts == ["add: a", "b</think>", "c", "add: d!"]
    tokenizer.chat_template = {"default": WITH_ARGUMENTS, "tool_use": "{% if %}"}
    with pytest.raises(ConfigError, match=r"^template=model:1: TemplateSyntaxError: "):
        load_chat_template("model", tokenizer)


def test_setting_arguments_must_be_used_by_each_rows_template(tokenizer, write_rows):
    tokenizer.chat_template = {"default": WITH_ARGUMENTS, "tool_use": FOR_TOOLS}
    template = load_chat_template("model", tokenizer, arguments={"style": "!"})
    with_tools, without = load_rows(write_rows({"prompt": "a", "tools": TOOLS}, {"prompt": "b"}))
    assert tokenizer.batch_decode(render_prompts(tokenizer, [with_tools], template)) == ["add: a!"]
    with pytest.raises(ConfigError, match=r"line 2: data.chat_template_kwargs.style: the model's"):
        render_prompts(tokenizer, [without], template)


@pytest.mark.parametrize("template", ["model", "plain"])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"tools": TOOLS}, r"tools: .* does not use them; remove them, or choose"),
        (
            {"chat_template_kwargs": {"enable_thinkin": False}},
            r"chat_template_kwargs.enable_thinkin: .* uses no such argument; it uses .*remove it",
        ),
        (
            {"chat_template_kwargs": {"tools": TOOLS}},
            r"chat_template_kwargs.tools: reserved; set from the",
        ),
    ],
)
def test_unused_arguments_of_a_row_make_a_bad_row(tokenizer, write_rows, template, columns, words):
    tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}"
    path = write_rows({"prompt": "a"}, {"prompt": "b", **columns}, {"prompt": "c"})
    file = DataFile(path, prompt_key="prompt", template=template)
    first, bad, last = PromptFile(file, lambda: tokenizer, PromptLimits(99, 300))
    assert (first.problem, last.problem) == (None, None)
    assert re.match(rf"{path} line 2: {words}", str(bad.problem))
    assert "\n" not in str(bad.problem)


def test_text_parts_of_a_content_are_joined(tokenizer, write_rows):
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3"}]
    path = write_rows({"prompt": [{"role": "user", "content": parts}]}, {"prompt": "2+3"})
    first, second = render_prompts(tokenizer, list(load_rows(path)))
    assert first == second


def test_a_prompt_ending_with_eos_is_refused(tokenizer, write_rows):
    tokenizer.chat_template = "{{ messages[0]['content'] + eos_token }}"
    with pytest.raises(
        ConfigError, match=r"line 1: the prompt ends with </s>, .* must leave the prompt open"
    ):
        render_prompts(tokenizer, list(load_rows(write_rows({"prompt": "hi"}))))
