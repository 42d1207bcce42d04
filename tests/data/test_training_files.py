"""Files too large to classify before a run: sampled first, then read on demand."""

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.data import indexed_table as table
from streamrl.data import prompt_file
from streamrl.data.config import parse_data_files
from streamrl.data.pass_rates import PassRates
from streamrl.data.pretrain_texts import TextStream, load_texts
from streamrl.data.prompt_file import PromptLimits, TrainingFiles, open_training_files
from streamrl.data.prompt_stream import PromptStream
from streamrl.errors import ConfigError, DataError
from streamrl.messages import parse_uid

WHOLE, FRAME = 20, 3
"""Limits of this module: rows of a fully classified file, and tokens that the template adds."""


@pytest.fixture(autouse=True)
def sample_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"NUM_FIRST_ROWS": 5, "NUM_SPREAD_ROWS": 4, "NUM_LONGEST_ROWS": 2}
    for name, rows in {**sizes, "MAX_FULLY_CLASSIFIED_ROWS": WHOLE}.items():
        monkeypatch.setattr(prompt_file, name, rows)


def open_rows(
    *entries: Any, tokenizer: Any, limit: int = 50, on_long: str = "error", **settings: Any
) -> TrainingFiles:
    files = parse_data_files(list(entries), key="data.train")
    limits = PromptLimits(limit, 300, on_long)
    return open_training_files(files, lambda: tokenizer, limits, **settings)


def stream_of(data: TrainingFiles, *, seed: int = 1, **settings: Any) -> PromptStream:
    return PromptStream(data, seed=seed, **settings)


def numbered(size: int) -> list[dict[str, Any]]:
    return [{"prompt": str(i), "ground_truth": str(i)} for i in range(size)]


def test_a_sampled_file_has_the_order_of_a_fully_classified_file(
    tokenizer, write_rows, monkeypatch
):
    path = write_rows(*numbered(50))
    large = open_rows(path, tokenizer=tokenizer)
    monkeypatch.setattr(prompt_file, "MAX_FULLY_CLASSIFIED_ROWS", 50)
    complete = open_rows(path, tokenizer=tokenizer)
    are_complete = [data.files[0].is_fully_classified for data in (large, complete)]
    assert are_complete == [False, True]
    drawn, expected = stream_of(large).draw_prompts(120), stream_of(complete).draw_prompts(120)
    assert [prompt.uid for prompt in drawn] == [prompt.uid for prompt in expected]
    assert [prompt.ground_truth for prompt in drawn] == [item.ground_truth for item in expected]


def test_an_open_table_pickles_and_has_its_rows_in_any_format_and_order(
    write_rows, tmp_path, monkeypatch
):
    rows = numbered(30)
    (tmp_path / "shards").mkdir()
    for i, part in enumerate((rows[:20], rows[20:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "shards" / f"{i}.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mapped.parquet", row_group_size=7)
    for name in (write_rows(*rows), tmp_path / "shards", tmp_path / "mapped.parquet"):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache" / Path(name).stem))
        opened_table = table.open_table(str(name))
        unpickled = pickle.loads(pickle.dumps(opened_table))
        records = [record for _, _, record in unpickled.read_rows([29, 0, 7])]
        assert records == [rows[i] for i in (29, 0, 7)]
    # Unpacked once, named by the hash of the content.
    (cached,) = table.get_cache_dir().iterdir()
    before = cached.stat().st_mtime_ns
    table.open_table(str(tmp_path / "mapped.parquet"))
    assert cached.stat().st_mtime_ns == before


def test_an_unpacking_error_names_the_cache_folder(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(numbered(3)), tmp_path / "rows.parquet")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be unpacked into .*set HF_DATASETS_CACHE"):
        table.open_table(str(tmp_path / "rows.parquet"))


def test_bad_rows_are_refused_in_the_sample_and_skipped_when_drawn(tokenizer, tmp_path):
    lines = [json.dumps(row) for row in numbered(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines[:3], '{"prompt": 5}', *lines[4:]]))
    with pytest.raises(ConfigError, match=f"{path} line 4: prompt must be text"):
        open_rows(str(path), tokenizer=tokenizer)
    path.write_text("\n".join([*lines[:20], "not json", *lines[21:]]))
    stream = stream_of(open_rows(str(path), tokenizer=tokenizer))
    drawn = stream.draw_prompts(49)
    assert sorted(parse_uid(prompt.uid)[1] for prompt in drawn) == [i for i in range(50) if i != 20]
    skipped = stream.take_skipped()
    assert skipped.metrics["data/bad"] == 1
    assert skipped.problems[0].startswith(f"{path} line 21: not JSON")


def test_the_longest_rows_bound_the_prompt_length(tokenizer, write_rows, tmp_path):
    rows = numbered(50)
    rows[33]["prompt"] = "x" * 17
    for path in (write_rows(*rows), str(tmp_path / "rows.parquet")):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        data = open_rows(path, tokenizer=tokenizer)
        assert data.files[0].max_prompt_tokens == 20
        assert data.max_prompt_tokens == 25
        assert open_rows(path, tokenizer=tokenizer, max_sampled_tokens=22).max_prompt_tokens == 22
        assert open_rows(path, tokenizer=tokenizer, max_sampled_tokens=3).max_prompt_tokens == 20
        assert open_rows(path, tokenizer=tokenizer, max_sampled_tokens=None).max_prompt_tokens == 50
    # The longest rows are not representative.
    assert data.mean_prompt_tokens == (5 * 4 + 3 * 5) / 8
    chat = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    pq.write_table(pa.Table.from_pylist(chat), tmp_path / "chat.parquet")
    data = open_rows(str(tmp_path / "chat.parquet"), tokenizer=tokenizer)
    assert data.files[0].max_prompt_tokens == 20


def test_if_the_sample_is_filtered_out_all_rows_are_classified(tokenizer, write_rows, tmp_path):
    keep = tmp_path / "keep.py"
    keep.write_text("def late(prompt): return int(prompt.ground_truth) == 30\n")
    path = write_rows(*numbered(50))
    data = open_rows({"path": path, "filter": f"{keep}:late"}, tokenizer=tokenizer)
    assert [prompt.ground_truth for prompt in stream_of(data).draw_prompts(2)] == ["30", "30"]
    keep.write_text("def late(prompt): return False\n")
    with pytest.raises(ConfigError, match="no usable prompt: 50 filtered"):
        open_rows({"path": path, "filter": f"{keep}:late"}, tokenizer=tokenizer)


def test_a_stream_resumes_only_on_the_same_rows(tokenizer, write_rows):
    path = write_rows(*numbered(50))
    stream = stream_of(open_rows(path, tokenizer=tokenizer))
    stream.draw_prompts(7)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = stream_of(open_rows(path, tokenizer=tokenizer))
    resumed.load_state_dict(state)
    assert [prompt.uid for prompt in resumed.draw_prompts(60)] == [
        prompt.uid for prompt in stream.draw_prompts(60)
    ]
    changes: list[dict[str, object]]
    changes = [{"prompt": "?"}, {"solution": "1"}, {"extra_info": {"a": {"b": 1}}}]
    for change in changes:
        rows = numbered(50)
        rows[31] |= change
        changed = stream_of(open_rows(write_rows(*rows), tokenizer=tokenizer))
        with pytest.raises(ConfigError, match="fingerprint"):
            changed.load_state_dict(state)
    # Earlier versions hashed the prompts, not their other columns.
    state["fingerprint"], _, _ = state["fingerprint"].partition("+")
    stream_of(open_rows(write_rows(*numbered(50)), tokenizer=tokenizer)).load_state_dict(state)
    entry = {"path": write_rows(*numbered(50)), "template": "plain"}
    with pytest.raises(ConfigError, match="fingerprint"):
        stream_of(open_rows(entry, tokenizer=tokenizer)).load_state_dict(state)


def test_a_file_that_changes_during_a_run_is_an_error(tokenizer, write_rows):
    path = write_rows(*numbered(50))
    stream = stream_of(open_rows(path, tokenizer=tokenizer))
    Path(path).write_text("{}\n" * 5000)
    with pytest.raises(DataError, match=f"{path}: the file has changed since"):
        stream.draw_prompts(1)


def test_get_prompt_reads_a_row_again(tokenizer, write_rows):
    a, b = write_rows(*numbered(30)), write_rows(*numbered(40), name="b.jsonl")
    Path(a).write_text(Path(a).read_text().replace("\n", "\n\n"))
    stream = stream_of(open_rows(a, b, tokenizer=tokenizer))
    drawn_prompts, state = stream.draw_prompts(100), stream.state_dict()
    for drawn in drawn_prompts:
        reread = stream.get_prompt(drawn.uid)
        assert (reread.uid, reread.row_location) == (drawn.uid, drawn.row_location)
        assert reread.token_ids.tolist() == drawn.token_ids.tolist()
        assert stream.get_prompt(f"{drawn.uid[:-1]}1").uid == f"{drawn.uid[:-1]}1"
    assert stream.state_dict() == state
    with pytest.raises(ValueError, match="no prompt with index 1 "):
        stream.get_prompt("0:1:0")  # a blank line


# Pretraining texts: loading, and batches determined by seed and batch number.

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


def test_a_curriculum_sorts_each_epoch_by_its_column(tokenizer, write_rows):
    rows = [row | {"level": 50 - i // 10} for i, row in enumerate(numbered(30))]
    data = open_rows(write_rows(*rows), tokenizer=tokenizer)
    stream = stream_of(data, curriculum="level")
    epochs = [[prompt.ground_truth for prompt in stream.draw_prompts(30)] for _ in range(2)]
    for answers in epochs:
        levels = [50 - int(answer) // 10 for answer in answers]
        assert levels == sorted(levels), "not from easy to hard"
        assert sorted(answers) == sorted(map(str, range(30)))
    assert epochs[0] != epochs[1], "rows of a level in the same order in each epoch"
    with pytest.raises(ConfigError, match=r"data.curriculum=levle: the column must be a finite"):
        stream_of(data, curriculum="levle")


def test_a_stream_by_difficulty_resumes_with_its_rates_and_keeps_the_files_shares(
    tokenizer, write_rows
):
    weighted = [
        {"path": write_rows(*numbered(size), name=name), "weight": weight}
        for name, size, weight in (("a.jsonl", 40, 1), ("b.jsonl", 20, 3))
    ]
    data = open_rows(*weighted, tokenizer=tokenizer)
    stream = stream_of(data, pass_rates=PassRates())
    assert stream.pass_rates is not None
    first = stream.draw_prompts(80)
    stream.pass_rates.record_results(0, {p.uid: float(int(p.ground_truth) % 2) for p in first})
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = stream_of(data, pass_rates=PassRates())
    resumed.load_state_dict(state)
    uids = []
    for each in (stream, resumed):
        assert each.pass_rates is not None
        each.pass_rates.advance_version(1)
        uids.append([prompt.uid for prompt in each.draw_prompts(200)])
    assert uids[0] == uids[1]
    plain = [prompt.uid for prompt in stream_of(data).draw_prompts(280)][80:]
    assert uids[0] != plain, "results without an effect"
    assert sum(int(uid.split(":")[1]) >= 40 for uid in uids[0]) == pytest.approx(150, abs=1)
