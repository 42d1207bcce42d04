import json
import os

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


def test_parquet_and_jsonl_yield_equal_rows(tmp_path, write_rows):
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(VERL_ROWS), parquet)
    from_parquet, from_jsonl = rows_of(parquet), rows_of(write_rows(*VERL_ROWS))
    for parquet_row, jsonl_row in zip(from_parquet, from_jsonl, strict=True):
        assert {**vars(parquet_row), "location": ""} == {**vars(jsonl_row), "location": ""}
    assert "hint" not in from_parquet[0].extra_info
    assert json.loads(json.dumps(from_parquet[1].extra_info)) == from_parquet[1].extra_info


def test_a_text_prompt_is_one_user_message_and_not_chat(write_rows):
    row = rows_of(write_rows({"prompt": "2+3=", "ground_truth": "5", "solution": "five"}))[0]
    assert row.messages == ({"role": "user", "content": "2+3="},)
    assert row.ground_truth == "5"
    assert row.extra_info == {"solution": "five"}


def test_extra_info_keys_override_columns(write_rows):
    row = rows_of(write_rows({"prompt": CHAT, "index": 7, "extra_info": {"index": 1}}))[0]
    assert row.extra_info == {"index": 1}


def test_prompt_key_selects_the_prompt_column(write_rows):
    path = write_rows({"question": "2+3=", "prompt": "unused"})
    row = rows_of(path, prompt_key="question")[0]
    assert row.messages[0]["content"] == "2+3="
    assert row.extra_info["prompt"] == "unused"


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
        ('{"prompt": "a"} {"prompt": "b"}', "line 2: not JSON: Extra data"),
        ("[" * 100_000, "line 2: not JSON:"),
        ('{"prompt": "a", "prompt": "b"}', "line 2: not JSON: key 'prompt': must occur only once"),
        ('[{"prompt": "a"}]', "line 2: must be a JSON object, got list"),
        ("null", "line 2: must be a JSON object, got null or missing"),
        ('{"question": "x", "answer": 1}', "no column 'prompt' (prompt_key); the columns are"),
        ("{}", "the columns are: none"),
        ('{"prompt": null}', "prompt must be text or a list of chat messages, got null or missing"),
        ('{"prompt": []}', "got an empty list"),
        ('{"prompt": 5}', "got int"),
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
        ('{"prompt": "a", "reward_model": "5"}', "reward_model must be an object, got int"),
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
    assert "cannot be read: No such file" in refusal(tmp_path / name)
    (tmp_path / name).mkdir()
    assert "directory" in refusal(tmp_path / name)


def test_an_unknown_extension_lists_the_supported_ones(tmp_path):
    for name in ("rows.txt", "rows.csv", "rows.jsonl.gz"):
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
    if name == "rows.jsonl":
        write_rows(row)
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
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
        (str(CHAT), "looks like chat messages, which must be JSON: Expecting"),
        (json.dumps(CHAT)[:-1], "looks like chat messages, which must be JSON: Expecting"),
        ('[{"role": "user"}]', "content of message 1 of prompt must be text"),
        ('[{"role": "user", "content": "a"}, {"content": "b"}]', "message 2 of prompt"),
    ):
        assert words in refusal(write_rows({"prompt": chat}))


@pytest.mark.parametrize("extension", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", ["fifo", "device", "sparse", "noise"])
def test_an_endless_row_is_refused_quickly(tmp_path, extension, kind):
    path = tmp_path / f"rows{extension}"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(200 << 20)
    else:
        path.write_bytes(os.urandom(5000))
    refusal(path)
    with pytest.raises(ConfigError):
        table = open_table(str(path))
        # The noise is one row, refused on reading.
        (bad, *_) = table.read_rows([0])
        raise bad[2]
