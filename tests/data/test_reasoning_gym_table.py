"""Tasks of reasoning-gym as rows: by index, the same in every process, apart from evaluation."""

import contextlib
import json
import pickle
import sys

import pytest

from streamrl.data import reasoning_gym_table, training_files
from streamrl.data.config import DataConfig, ReasoningGymTasks
from streamrl.data.prompt_file import PromptLimits, load_data_rows, load_prompts
from streamrl.data.prompt_stream import PromptStream
from streamrl.data.reasoning_gym_table import (
    ReasoningGymTable,
    create_dataset,
    make_task,
    task_worker,
)
from streamrl.data.training_files import open_training_files
from streamrl.errors import ConfigError

SUMS = {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 40, "seed": 7}
MIXED = {
    "kind": "reasoning_gym",
    "dataset": "composite",
    "size": 30,
    "options": {
        "datasets": [
            {"name": "chain_sum", "weight": 2, "config": {"min_terms": 2, "max_terms": 2}},
            {"name": "leg_counting", "weight": 1, "config": {}},
        ]
    },
}
LIMITS = PromptLimits(400, 300)


@pytest.fixture(scope="module", autouse=True)
def ended_worker():
    """End the process that makes the tasks of these tests."""
    yield
    task_worker.close()


def parse_entry(entry):
    (file,) = DataConfig(train=entry).train_files
    return file


def open_tasks(**settings):
    tasks = ReasoningGymTasks(**{"dataset": "chain_sum", "size": 10, **settings})
    return ReasoningGymTable(tasks, path="reasoning_gym:x", key="data.train")


def read_records(table, rows):
    return [record for _, _, record in table.read_rows(rows)]


def test_a_row_is_the_task_with_its_seed_and_index():
    entry = {**SUMS, "system": "Add.", "environment": "tools"}
    first, second, *_ = load_data_rows(parse_entry(entry))
    # As reasoning_gym.create_dataset("chain_sum", seed=7)[0] and [1].
    question = "State the final answer to the following arithmetic problem: 60 + 93 - 16 + 19 ="
    assert [message["content"] for message in first.messages] == ["Add.", question]
    assert (first.ground_truth, second.ground_truth) == ("156", "1010")
    assert (second.index, second.data_source, second.environment) == (1, "chain_sum", "tools")
    assert second.location == "reasoning_gym:chain_sum task 1"


@pytest.mark.parametrize(
    "dataset", ["chain_sum", "knights_knaves", "countdown", "family_relationships"]
)
def test_a_late_task_is_made_without_those_before_it(dataset):
    table = open_tasks(dataset=dataset, size=10**9)
    (late,) = read_records(table, [10**9 - 1])
    (again,) = read_records(pickle.loads(pickle.dumps(table)), [10**9 - 1])
    assert late == again
    assert late["prompt"] != read_records(table, [0])[0]["prompt"]


def test_a_stream_of_tasks_resumes_at_the_next_task(tokenizer):
    def open_stream():
        files = open_training_files([parse_entry(SUMS)], lambda: tokenizer, LIMITS)
        return PromptStream(files, seed=1, reads_ahead=False)

    stream, resumed = open_stream(), open_stream()
    stream.draw_prompts(50)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    uids = [(p.uid, p.ground_truth) for p in stream.draw_prompts(40)]
    assert [(p.uid, p.ground_truth) for p in resumed.draw_prompts(40)] == uids
    assert resumed.get_prompt(uids[0][0]).ground_truth == uids[0][1]


def test_other_tasks_are_not_resumed(tokenizer, monkeypatch):
    monkeypatch.setattr(training_files, "MAX_FULLY_CLASSIFIED_ROWS", 9)

    def open_stream(**changes):
        entry = parse_entry({**SUMS, "template": "plain", **changes})
        return PromptStream(open_training_files([entry], lambda: tokenizer, LIMITS), seed=1)

    state = open_stream().state_dict()
    for changes in ({"seed": 8}, {"options": {"max_terms": 3}}, {"system": "Add."}):
        with pytest.raises(ConfigError, match=r"the content of data\.train"):
            open_stream(**changes).load_state_dict(state)


def test_a_composite_mixes_datasets_and_names_them():
    sources = [row.data_source for row in load_data_rows(parse_entry(MIXED))]
    assert {*sources} == {"chain_sum", "leg_counting"}
    assert sources.count("chain_sum") > sources.count("leg_counting")


def test_tasks_mix_with_files_by_weight(tokenizer, write_rows):
    rows = {"path": write_rows({"prompt": "1"}, {"prompt": "2"}), "weight": 1}
    files = DataConfig(train=[rows, {**SUMS, "weight": 3, "name": "sums"}]).train_files
    loaded = load_prompts(files, tokenizer, LIMITS, max_prompts=2)
    assert [file.file.name for file in loaded] == ["rows", "sums"]
    assert [file.file.weight for file in loaded] == [1, 3]
    assert [prompt.uid for prompt in loaded[1].prompts] == ["0:2:0", "0:3:0"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "gym"}, "data.train.kind=gym: must be one of file, reasoning_gym"),
        ({"dataset": None}, "data.train.dataset: missing"),
        ({"size": "many"}, "data.train.size='many': must be a whole number"),
        ({"size": 0}, "data.train.size=0: must be 1 or more"),
        ({"seed": -1}, "data.train.seed=-1: must be 0 or more"),
        ({"options": {"seed": 3}}, "data.train.options.seed: give seed beside dataset"),
        ({"path": "rows.jsonl"}, "data.train.path='rows.jsonl': unknown; "),
        ({"label_key": "x"}, "data.train.label_key='x': unknown; "),
        ({"dataset": "composite"}, "data.train.options.datasets: must be a list of mappings"),
        ({"weight": 0}, "data.train.weight=0: must be a number above 0"),
    ],
)
def test_an_invalid_entry_names_its_key(changes, words):
    entry = {name: value for name, value in {**SUMS, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        DataConfig(train=entry)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": "chain_sun"}, "data.train.dataset=chain_sun: no such dataset; the nearest"),
        ({"options": {"terms": 3}}, "data.train.options: chain_sum: .*unexpected keyword.*terms"),
        ({"options": {"min_terms": -1}}, "data.train.options: chain_sum: min_terms must be"),
    ],
)
def test_a_dataset_or_option_that_does_not_exist_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        open_tasks(**settings)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    message = r"kind=reasoning_gym: .* run pip install 'streamrl\[reasoning_gym\]'"
    with pytest.raises(ConfigError, match=message):
        create_dataset(ReasoningGymTasks("chain_sum", 1).to_text(), setting="data.train")


@pytest.mark.parametrize(
    ("train", "evaluation", "has_overlap"),
    [
        (SUMS, {**SUMS, "seed": 8}, True),
        (SUMS, {**SUMS, "seed": 46, "size": 1}, True),
        (SUMS, {**SUMS, "seed": 47}, False),
        (SUMS, {**SUMS, "seed": 0, "size": 7}, False),
        (SUMS, {**SUMS, "dataset": "leg_counting"}, False),
        (MIXED, {**SUMS, "seed": 0, "size": 1}, False),
        (MIXED, {**SUMS, "seed": 0, "size": 2}, True),
        (MIXED, {**MIXED, "seed": 30}, False),
    ],
)
def test_tasks_of_an_evaluation_must_not_be_among_those_of_training(train, evaluation, has_overlap):
    if not has_overlap:
        DataConfig(train=train, eval=evaluation)
        return
    with pytest.raises(ConfigError, match=r"data\.eval\.seed=\d+: \d+ tasks of chain_sum are also"):
        DataConfig(train=train, eval=evaluation)


class ListedTasks:
    """Dataset of listed tasks; an exception is raised, and an endless one never made."""

    def __init__(self, *tasks):
        self._tasks = tasks

    def __getitem__(self, index):
        task = self._tasks[index]
        if isinstance(task, Exception):
            raise task
        while task == "endless":
            # As code that retries until it succeeds.
            with contextlib.suppress(Exception):
                sum(range(1000))
        return task


def test_a_task_that_fails_or_takes_long_is_a_bad_row_that_says_why(monkeypatch):
    monkeypatch.setattr(reasoning_gym_table, "MAX_TASK_SECONDS", 0.05)
    fine = {"question": "1+1", "answer": "2", "metadata": {}}
    dataset = ListedTasks(fine, ValueError("no task\nhere"), "endless", fine)
    made = [make_task(dataset, index, name="x") for index in range(4)]
    assert made == [
        ("1+1", "2", "x"),
        "cannot be made: ValueError: no task here",
        "took more than 0.05 s to make; choose options that make smaller tasks, or another dataset",
        ("1+1", "2", "x"),
    ]


def test_another_process_makes_the_same_tasks():
    # The tasks of these two depend on the hashes of text.
    names = ("isomorphic_strings", "polynomial_multiplication")
    tables = [open_tasks(dataset=name) for name in names]
    before = [read_records(table, range(3)) for table in tables]
    task_worker.close()
    assert [read_records(table, range(3)) for table in tables] == before
