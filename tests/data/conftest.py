"""A tokenizer with one token per byte and a chat template, as a model directory on disk."""

import json

import pytest

from tests.bpe_tokenizer import make_byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB_SIZE = 300


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory, monkeypatch):
    """Folder of unpacked data files."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    from tokenizers import processors

    path = tmp_path_factory.mktemp("model")
    special = ["<s>", "</s>", "<user>", "<assistant>"]
    tokenizer = make_byte_tokenizer(special, bos_token="<s>", eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def tokenizer(model_dir):
    from streamrl.data.chat_template import load_tokenizer

    return load_tokenizer(str(model_dir))


@pytest.fixture
def write_rows(tmp_path):
    """Write rows as a .jsonl file and return its path."""

    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
