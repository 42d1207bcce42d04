"""Pretraining texts: loading, and batches determined by seed and batch number."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.data.pretrain_texts import TextStream, load_texts
from streamrl.errors import ConfigError

TEXTS = ["a", "b", "c", "d", "e"]


def test_texts_load_from_jsonl_and_parquet(tmp_path):
    lines = [json.dumps({"text": text, "source": "web"}) for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.Table.from_pylist([{"text": text} for text in TEXTS]), tmp_path / "t.parquet")
    assert load_texts(str(tmp_path / "texts.jsonl")) == TEXTS
    assert load_texts(str(tmp_path / "t.parquet")) == TEXTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"words": "b"}', "texts.jsonl line 2: column 'text' must be non-empty"),
        ('{"text": ""}', "line 1: column 'text' must be non-empty text"),
        ("1", "line 1: column 'text' must be non-empty text"),
        ("{", "line 1: not JSON"),
    ],
)
def test_a_bad_text_file_is_a_one_line_error_with_its_row(tmp_path, content, message):
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_texts(str(path))
    assert "\n" not in str(error.value)


def test_every_epoch_has_every_text_once_in_a_new_order():
    stream = TextStream(TEXTS, seed=1)
    flat = [text for number in range(10) for text in stream.get_batch(number, 2)]
    epochs = [flat[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(epoch) == TEXTS for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_batch_depends_only_on_seed_and_number():
    assert TextStream(TEXTS, seed=1).get_batch(7, 3) == TextStream(TEXTS, seed=1).get_batch(7, 3)
    batches = {tuple(TextStream(TEXTS, seed=seed).get_batch(0, 5)) for seed in range(10)}
    assert len(batches) > 1
