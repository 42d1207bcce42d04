"""Rows of data files: the schemas of libraries, bad rows, formats, shards and splits."""

import json
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.data.indexed_table import open_table
from streamrl.errors import ConfigError
from tests.data_rows import load_rows

CHAT = [{"role": "user", "content": "What is 2 plus 3?"}]
VERL_ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0, "tools": {"calc": {"digits": [1, 2]}}},
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [*CHAT, {"role": "assistant", "content": "5"}, {"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": "6"},
        "extra_info": {"split": "train", "index": 1, "hint": "carry"},
    },
]


def rows_of(path, **options):
    return list(load_rows(str(path), **options))


def refusal(path, **options):
    with pytest.raises(ConfigError) as caught:
        rows_of(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_a_verl_row_is_read_completely(write_rows):
    row = rows_of(write_rows(*VERL_ROWS))[0]
    assert row.messages == tuple(CHAT)
    assert (row.data_source, row.ground_truth, row.index) == ("openai/gsm8k", "5", 0)
    assert row.extra_info == {
        "ability": "math",
        "split": "train",
        "index": 0,
        "tools": {"calc": {"digits": [1, 2]}},
    }


def test_a_text_prompt_is_one_user_message_and_not_chat(write_rows):
    row = rows_of(write_rows({"prompt": "2+3=", "ground_truth": "5", "solution": "five"}))[0]
    assert row.messages == ({"role": "user", "content": "2+3="},)
    assert row.ground_truth == "5"
    assert row.extra_info == {"solution": "five"}


def test_extra_info_keys_override_columns(write_rows):
    row = rows_of(write_rows({"prompt": CHAT, "index": 7, "extra_info": {"index": 1}}))[0]
    assert row.extra_info == {"index": 1}


def test_label_key_selects_the_ground_truth_and_keeps_the_column(write_rows):
    trl = {"prompt": CHAT, "solution": "5"}
    row = rows_of(write_rows(trl), label_key="solution")[0]
    assert (row.ground_truth, row.extra_info) == ("5", {"solution": "5"})
    slime = {"input": "2+3=", "label": {"value": 5}, "metadata": {"level": 1}}
    row = rows_of(write_rows(slime), prompt_key="input", label_key="label")[0]
    assert row.ground_truth == {"value": 5}
    assert row.extra_info["metadata"] == {"level": 1}


def test_a_missing_label_column_lists_the_columns(write_rows):
    path = write_rows({"prompt": "a", "answer": "5"}, {"prompt": "b"})
    message = refusal(path, label_key="answer")
    assert message.endswith("line 2: no column 'answer' (label_key); the columns are: prompt")


def test_nulls_are_removed_from_objects_but_not_from_lists(write_rows):
    path = write_rows({"prompt": CHAT, "extra_info": {"a": None, "b": [None, {"c": None}]}})
    assert rows_of(path)[0].extra_info == {"b": [None, {}]}


def test_blank_lines_and_a_bom_are_skipped_but_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    rows = rows_of(path)
    assert [row.index for row in rows] == [0, 2]
    assert rows[1].location == f"{path} line 3"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON: Expecting"),
        ("[" * 100_000, "line 2: not JSON:"),
        ('{"prompt": "a", "prompt": "b"}', "line 2: not JSON: key 'prompt': must occur only once"),
        ('[{"prompt": "a"}]', "line 2: must be a JSON object, got list"),
        ('{"question": "x", "answer": 1}', "no column 'prompt' (prompt_key); the columns are"),
        ('{"prompt": null}', "prompt must be text or a list of chat messages, got null or missing"),
        ('{"prompt": []}', "got an empty list"),
        ('{"prompt": ["hello"]}', "message 1 of prompt must be an object, got str"),
        ('{"prompt": [{"role": "user"}]}', "content of message 1 of prompt must be text"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}',
            "content of message 1 of prompt has a part of type image; only text is supported",
        ),
        ('{"prompt": "\\ud800"}', "content of message 1 of prompt is not valid Unicode"),
        ('{"prompt": "a", "data_source": 3}', "data_source must be text, got int"),
        ('{"prompt": "a", "extra_info": 3}', "extra_info must be an object, got int"),
        ('{"prompt": "a", "extra_info": "x"}', "extra_info is text, which must be JSON: Expecting"),
        ('{"prompt": "a", "tools": "[1]"}', "tools must be a list of objects, got list"),
        (
            json.dumps({"prompt": "a", "extra_info": '{"a": ' + "[" * 200 + "]" * 200 + "}"}),
            "extra_info is text, which must be JSON: nested more than",
        ),
        ('{"prompt": "a", "ground_truth": 1, "reward_model": {"ground_truth": 2}}', "keep one"),
    ],
)
def test_a_bad_row_names_line_and_rule(tmp_path, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    message = refusal(path)
    assert message.startswith(f"{path} line 2: ")
    assert words in message


def test_a_line_that_is_not_utf8_is_named_by_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "line 2: not JSON: 'utf-8'" in refusal(path)


def test_a_malformed_or_truncated_parquet_file_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_text("nonsense")
    assert "cannot be read" in refusal(path)
    pq.write_table(pa.table({"prompt": ["a"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "cannot be read" in refusal(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_missing_file_and_a_directory_are_refused(tmp_path, name):
    assert "cannot be read: no such file" in refusal(tmp_path / name)
    (tmp_path / name).mkdir()
    assert "directory" in refusal(tmp_path / name)


def test_an_unknown_extension_lists_the_supported_ones(tmp_path):
    for name in ("rows.csv", "rows.jsonl.gz"):
        assert "must be one of .jsonl, .ndjson, .json, .parquet" in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["R.JSONL", "r.ndjson", "r.Json"])
def test_jsonl_may_have_any_of_its_extensions(tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "2+3="}\n')
    assert [row.messages[0]["content"] for row in rows_of(tmp_path / name)] == ["2+3="]


def test_an_empty_file_is_refused(tmp_path):
    for text in ("", "\n \n"):
        (tmp_path / "rows.jsonl").write_text(text)
        assert refusal(tmp_path / "rows.jsonl").endswith("contains no rows")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    assert refusal(tmp_path / "rows.parquet").endswith("contains no rows")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_object_columns_may_be_json_text_in_every_format(tmp_path, write_rows, name):
    objects = {
        "reward_model": {"style": "rule", "ground_truth": "5", "none": None},
        "extra_info": {"split": "train", "tests": [1, {"a": None}]},
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    (expected,) = rows_of(write_rows({"prompt": "2+3=", **objects}, name="wanted.jsonl"))
    row = {"prompt": "2+3=", **{key: json.dumps(value) for key, value in objects.items()}}
    path = tmp_path / name
    write_rows(row) if name == "rows.jsonl" else shard(path, [row])
    (parsed,) = rows_of(path)
    assert {**vars(parsed), "location": ""} == {**vars(expected), "location": ""}
    assert parsed.ground_truth == "5"


def test_prompt_and_label_columns_stay_text_under_any_name(write_rows):
    path = write_rows({"tools": "[]", "extra_info": "{}", "reward_model": "5"})
    (row,) = rows_of(path, prompt_key="tools", label_key="reward_model")
    assert (row.messages[0]["content"], row.ground_truth) == ("[]", "5")


def test_a_blank_text_is_a_missing_object(write_rows):
    texts = dict.fromkeys(("tools", "extra_info", "reward_model", "chat_template_kwargs"), " ")
    (row,) = rows_of(write_rows({"prompt": "a", **texts}))
    assert ([*row.tools], row.extra_info, row.template_arguments) == ([], {}, {})


def test_a_text_prompt_may_be_chat_messages_in_json(write_rows):
    chat = json.dumps([*CHAT, {"role": "assistant", "content": None, "tool_calls": []}])
    texts = ["[1, 2]", "[]", "[not json", '[{"a": 1}]', '{"role": "user", "content": "a"}', "5"]
    rows = ({"question": text, "other": chat} for text in (chat, *texts))
    first, *text_rows = rows_of(write_rows(*rows), prompt_key="question")
    assert first.is_chat
    assert [message["role"] for message in first.messages] == ["user", "assistant"]
    assert first.extra_info == {"other": chat}
    assert [row.messages[0]["content"] for row in text_rows] == texts
    assert not any(row.is_chat for row in text_rows)


def test_malformed_chat_messages_in_text_are_refused(write_rows):
    for chat, words in (
        (json.dumps(CHAT)[:-1], "looks like chat messages, which must be JSON: Expecting"),
        ('[{"role": "user"}]', "content of message 1 of prompt must be text"),
        ('[{"role": "user", "content": "a"}, {"content": "b"}]', "message 2 of prompt"),
    ):
        assert words in refusal(write_rows({"prompt": chat}))


@pytest.mark.parametrize("extension", [".jsonl", ".parquet"])
def test_an_endless_row_is_refused_quickly(tmp_path, extension):
    path = tmp_path / f"rows{extension}"
    os.mkfifo(path)
    refusal(path)
    path.unlink()
    path.write_bytes(os.urandom(5000))
    refusal(path)
    with pytest.raises(ConfigError):
        table = open_table(str(path))
        # The noise is one row, refused on reading.
        (bad, *_) = table.read_rows([0])
        raise bad[2]


# All formats yield the same rows; splits are named explicitly.

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
    opened = open_table(str(path))
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
        opened = open_table(str(path))
        ((_, _, record),) = opened.read_rows([rows - 1])
    finally:
        pa.set_memory_pool(before)
    assert (record["prompt"], len(record["x"]) // 7) == (str(rows - 1), size // 7)
    assert pool.max_memory() < 60 << 20
    assert len(pickle.dumps(opened)) < 1000


USER, SAID, NEXT = CHAT[0], {"role": "assistant", "content": "5"}, {"role": "user", "content": "?"}
WRONG = {"role": "assistant", "content": "6"}


@pytest.mark.parametrize(
    ("record", "prompt", "completion"),
    [
        ({"prompt": "2+3=", "completion": "5"}, "2+3=", [SAID]),
        ({"prompt": CHAT, "completion": [SAID, NEXT, WRONG]}, USER, [SAID, NEXT, WRONG]),
        ({"messages": [USER, SAID]}, USER, [SAID]),
        ({"messages": [USER, SAID, NEXT, WRONG, NEXT]}, USER, [SAID, NEXT, WRONG]),
        ({"prompt": [USER, SAID]}, USER, [SAID]),
        ({"prompt": json.dumps(CHAT), "completion": "5", "turns": "single"}, USER, [SAID]),
    ],
    ids=["texts", "messages", "conversation", "turns", "prompt_key", "json"],
)
def test_a_target_row_has_a_prompt_and_what_follows_it(write_rows, record, prompt, completion):
    (row,) = rows_of(write_rows(record), gives="targets")
    assert row.messages[0]["content"] == (prompt if isinstance(prompt, str) else prompt["content"])
    assert len(row.messages) == 1
    assert row.completions == (tuple(completion),)


def test_the_last_turn_alone_may_be_the_target(write_rows):
    path = write_rows({"messages": [USER, SAID, NEXT, WRONG]})
    (row,) = rows_of(path, gives="targets", targets="last")
    assert (row.messages, row.completions) == ((USER, SAID, NEXT), ((WRONG,),))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": CHAT, "chosen": "5", "rejected": "6"},
        {"prompt": CHAT, "chosen": [SAID], "rejected": [WRONG]},
        {"chosen": [USER, SAID], "rejected": [USER, WRONG]},
    ],
    ids=["texts", "messages", "common beginning"],
)
def test_a_pair_has_a_prompt_and_two_completions(write_rows, record):
    (row,) = rows_of(write_rows(record), gives="pairs")
    assert (row.messages, row.completions) == ((USER,), ((SAID,), (WRONG,)))


@pytest.mark.parametrize(
    ("gives", "record", "reason"),
    [
        ("targets", {"prompt": "2+3="}, "prompt needs a message of the assistant"),
        ("targets", {"messages": [SAID]}, "messages needs a message of the assistant after"),
        ("targets", {"prompt": "2+3=", "completion": 5}, "completion must be text or a list"),
        ("targets", {"prompt": "2+3=", "completion": CHAT}, "completion must begin and end with"),
        ("targets", {"prompt": CHAT, "completion": [USER, SAID]}, "completion must begin and end"),
        ("targets", {"prompt": [USER, SAID], "completion": "6"}, "must be part of it"),
        ("pairs", {"prompt": "2+3=", "chosen": "5"}, "rejected must be text or a list"),
        ("pairs", {"chosen": [USER, SAID], "rejected": [USER, SAID]}, "chosen and rejected are"),
    ],
)
def test_a_row_without_usable_completions_is_refused(write_rows, gives, record, reason):
    assert reason in refusal(write_rows(record), gives=gives)
