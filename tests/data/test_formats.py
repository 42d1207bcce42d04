"""The same rows from every format; splits are named, never guessed."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from streamrl.data import load_rows
from streamrl.errors import ConfigError

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{i}+1"}],
        "reward_model": {"ground_truth": str(i + 1)},
        "extra_info": {"index": i, **({"hint": "carry"} if i == 9 else {})},
    }
    for i in range(12)
]


def shard(path, rows):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def facts(path, split=""):
    rows = load_rows(str(path), split=split)
    return [(row.index, row.messages, row.ground_truth, dict(row.extra_info)) for row in rows]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return facts(path)


def test_a_dataset_on_disk_gives_the_rows_of_the_jsonl_file(tmp_path, wanted):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows", num_shards=2)
    assert facts(tmp_path / "rows") == wanted
    row = next(load_rows(str(tmp_path / "rows")))
    assert row.place == f"{tmp_path / 'rows'} row 1"


def test_a_dataset_that_was_reordered_comes_in_its_own_order(tmp_path, wanted):
    Dataset.from_list(ROWS).select([5, 2]).save_to_disk(tmp_path / "rows")
    found = facts(tmp_path / "rows")
    assert [fact[1:] for fact in found] == [wanted[5][1:], wanted[2][1:]]
    assert [fact[0] for fact in found] == [0, 1]


def test_a_directory_of_shards_is_one_file_in_the_order_of_their_names(tmp_path, wanted):
    shard(tmp_path / "rows.parquet" / "part-1.parquet", ROWS[7:])
    shard(tmp_path / "rows.parquet" / "part-0.parquet", ROWS[:7])
    assert facts(tmp_path / "rows.parquet") == wanted


def test_shards_with_other_columns_are_one_file_unless_the_same_column_is_of_another_type(tmp_path):
    shard(tmp_path / "rows" / "a.parquet", [{"prompt": "1", "answer": 1}])
    shard(tmp_path / "rows" / "b.parquet", [{"prompt": "2", "answer": 2, "level": "hard"}])
    rows = list(load_rows(str(tmp_path / "rows"), label_key="answer"))
    assert [dict(row.extra_info) for row in rows] == [{"answer": 1}, {"answer": 2, "level": "hard"}]
    shard(tmp_path / "rows" / "c.parquet", [{"prompt": "3", "answer": "three"}])
    with pytest.raises(ConfigError, match=f"^{tmp_path / 'rows'}: its files have other columns: "):
        list(load_rows(str(tmp_path / "rows")))


def test_a_split_is_taken_by_name(tmp_path, wanted):
    splits = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])}
    DatasetDict(splits).save_to_disk(tmp_path / "both")
    shard(tmp_path / "shards" / "train-00000-of-00002.parquet", ROWS[:7])
    shard(tmp_path / "shards" / "train-00001-of-00002.parquet", ROWS[7:])
    shard(tmp_path / "shards" / "test-00000-of-00001.parquet", ROWS[:2])
    for name in ("both", "shards"):
        assert facts(tmp_path / name, "train") == wanted
        assert facts(tmp_path / name, "test") == wanted[:2]
        for split, words in (("", "split: missing"), ("tset", "split=tset: there is no such")):
            with pytest.raises(ConfigError, match=rf"{words}.*the splits are test, train"):
                facts(tmp_path / name, split)


def test_a_split_of_what_has_none_is_refused(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    shard(tmp_path / "shards" / "a.parquet", ROWS)
    shard(tmp_path / "shards" / "file.parquet", ROWS)
    for name, words in (
        ("one", "it has no splits"),
        ("shards/file.parquet", "it has no splits"),
        ("shards", "the splits are none"),
    ):
        with pytest.raises(ConfigError, match=words):
            facts(tmp_path / name, "train")


def test_a_directory_that_holds_no_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a Hugging Face dataset on disk nor"):
        facts(tmp_path)
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: cannot be read") as caught:
        facts(tmp_path)
    assert "\n" not in str(caught.value)
