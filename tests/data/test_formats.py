"""All formats yield the same rows; splits are named explicitly."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.data import indexed_table
from streamrl.errors import ConfigError
from tests.data_rows import load_rows

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


def read_fields(path, split=""):
    rows = load_rows(str(path), split=split)
    return [(row.index, row.messages, row.ground_truth, dict(row.extra_info)) for row in rows]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return read_fields(path)


def test_shards_are_one_file_in_the_order_of_their_names(tmp_path, expected):
    shard(tmp_path / "rows.parquet" / "part-1.parquet", ROWS[7:])
    shard(tmp_path / "rows.parquet" / "part-0.parquet", ROWS[:7])
    assert read_fields(tmp_path / "rows.parquet") == expected


TEXT = pa.string()


def write_column(path, kind, value):
    column = pa.array([list(value.items()) if pa.types.is_map(kind) else value], kind)
    pq.write_table(pa.table({"prompt": pa.array(["2+3="]), "x": column}), path)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (TEXT, "7"),
        (pa.null(), None),
        (pa.list_(pa.struct({"a": pa.dictionary(pa.int8(), TEXT)})), [{"a": "b"}]),
        (pa.map_(TEXT, pa.int32()), {"a": 1}),
        (pa.string_view(), "7"),
    ],
)
def test_each_row_has_the_columns_and_types_of_its_shard(tmp_path, kind, value):
    write_column(tmp_path / "a.parquet", kind, value)
    shard(tmp_path / "b.parquet", [{"prompt": "2", "x": 2, "level": "hard"}])
    first, second = load_rows(str(tmp_path))
    assert first.extra_info.get("x") == value
    assert second.extra_info == {"x": 2, "level": "hard"}


def test_a_split_is_part_of_a_shards_name(tmp_path, expected):
    shard(tmp_path / "train-00000-of-00002.parquet", ROWS[:7])
    shard(tmp_path / "train-00001-of-00002.parquet", ROWS[7:])
    for name in ("gsm8k_Test", "test-1", "trainer", "dev-clean-00000-of-00001"):
        shard(tmp_path / f"{name}.parquet", ROWS[:1])
    assert read_fields(tmp_path, "train") == expected
    assert len(read_fields(tmp_path, "test")) == 2
    for split, words in (("", "split: missing"), ("tset", "split=tset: no such")):
        with pytest.raises(ConfigError, match=rf"{words}.*the splits are dev-clean, test, train"):
            read_fields(tmp_path, split)


def test_a_split_of_data_without_splits_is_refused(tmp_path):
    shard(tmp_path / "a.parquet", ROWS)
    (tmp_path / "rows.jsonl").write_text("{}")
    for name, words in (
        ("a.parquet", "only a directory has splits"),
        ("rows.jsonl", "only a directory has splits"),
        ("", "the splits are none"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_fields(tmp_path / name, "train")


@pytest.mark.parametrize("text", ['[{"prompt": "1"}]', '\ufeff\n[\n {"prompt": "1"}\n]'])
def test_a_json_array_is_refused_with_its_conversion(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{path}: a JSON array; .*: jq -c '\.\[\]' FILE"):
        read_fields(path)


def test_a_saved_dataset_is_refused_with_its_conversion(tmp_path):
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"save_to_disk with datasets.load_from_disk\(...\)\["):
        read_fields(tmp_path)


ZONE = pa.timestamp("us", tz="Mars/Base")
PAIRS = pa.map_(TEXT, pa.int64())


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (pa.timestamp("us", tz="UTC"), 1, -(2**60)),
        (pa.duration("ms"), 1, 2**63 - 1),
        (pa.list_(pa.struct({"a": pa.timestamp("us")})), [{"a": 1}], [{"a": 2**62}]),
        (PAIRS, [("a", 1)], [("a", 1), ("a", 2)]),
        (ZONE, None, 1),
        (pa.timestamp("us", tz="America"), None, 1),  # a directory, not a time zone
    ],
)
def test_a_value_unrepresentable_in_python_makes_a_bad_row(tmp_path, kind, good, bad):
    rows = {"prompt": pa.array(["1", "2", "3"]), "x": pa.array([good, bad, good], kind)}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(rows), path)
    opened = indexed_table.open_table(str(path))
    for indices in (range(3), [2, 1, 0]):
        records = {index: record for _, index, record in opened.read_rows(indices)}
        assert [records[i]["prompt"] for i in (0, 2)] == ["1", "3"]
        assert isinstance(records[1], ConfigError)
    with pytest.raises(ConfigError, match=f"^{path} row 2: column 'x': ") as caught:
        read_fields(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "size", "is_constant"),
    [(40_000, 2048, True), (40_000, 2048, False), (150, 1 << 20, True)],
)
def test_large_parquet_is_not_loaded_into_memory(tmp_path, rows, size, is_constant):
    """A constant compresses to nothing; distinct values fill one row group."""
    path = tmp_path / "rows.parquet"
    texts = ["x" * size] if is_constant else [f"{i:07d}" * (size // 7) for i in range(rows)]
    column = pa.array(texts, pa.large_string()).take(pa.array(np.arange(rows) % len(texts)))
    pq.write_table(pa.table({"prompt": pa.array(map(str, range(rows))), "x": column}), path)
    del texts, column
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool := pa.system_memory_pool())
    try:
        opened = indexed_table.open_table(str(path))
        ((_, _, record),) = opened.read_rows([rows - 1])
    finally:
        pa.set_memory_pool(before)
    assert (record["prompt"], len(record["x"]) // 7) == (str(rows - 1), size // 7)
    assert pool.max_memory() < 60 << 20
    assert len(pickle.dumps(opened)) < 1000
