"""A tokenizer with one token per byte and a chat template, as a model directory on disk."""

import json

import pytest

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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(["<s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<assistant>"],
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
