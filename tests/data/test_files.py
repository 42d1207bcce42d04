"""Values of data.train and data.eval: paths, mappings, lists, and reading options per file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config.run_config import dump_config, load_config
from streamrl.data.config import DataConfig, parse_data_files
from streamrl.data.prompt_file import PromptLimits, load_prompts, open_training_files
from streamrl.errors import ConfigError


def load_files(tokenizer, train, **settings):
    config = DataConfig(train=train, **settings)
    return load_prompts(config.train_files, tokenizer, PromptLimits(50, 300, config.on_long_prompt))


def test_files_may_be_a_path_a_mapping_or_a_list():
    for train in ("a/x.jsonl", {"path": "a/x.jsonl"}, ["a/x.jsonl"], [{"path": "a/x.jsonl"}]):
        (file,) = DataConfig(train=train).train_files
        assert (file.path, file.prompt_key, file.name) == ("a/x.jsonl", "prompt", "x")
        assert (file.weight, file.label_key, file.template, file.filter) == (None, "", "model", "")
    empty_values: tuple[Any, ...] = ("", None, [])
    for empty in empty_values:
        assert DataConfig(eval=empty).eval_files == ()


def test_each_file_has_its_own_options():
    train = [
        "a.jsonl",
        {"kind": "file", "path": "b", "split": "test", "prompt_key": "input", "label_key": "label"},
    ]
    first, second = DataConfig(train=train).train_files
    assert (first.prompt_key, second.prompt_key, second.label_key) == ("prompt", "input", "label")
    assert second.name == "b_test"
    earlier = {"kind": "file", "path": "a.jsonl"}  # in directories of earlier runs
    assert DataConfig(train=earlier).train_files[0].path == "a.jsonl"


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (3, "data.train=3: must be a path, a mapping of path, weight, split"),
        (True, "data.train=true: must be a path"),
        ({"weight": 1}, "data.train.path: missing"),
        (
            ["a", {"path": "b", "wieght": 1}],
            "data.train[1].wieght=1: unknown; the nearest key is w",
        ),
        ({"path": "a", "weight": 0}, "data.train.weight=0.0: must be above 0"),
        ({"path": "a", "kind": "reasoning_gym"}, "data.train.kind=reasoning_gym: no longer a key"),
        (["a", {"path": "b", "weight": 1}], "data.train[0].weight: missing; give all files"),
        ({"path": "a", "name": "x/y"}, "data.train.name='x/y': must be printable"),
    ],
)
def test_an_invalid_entry_names_its_key(train, words):
    with pytest.raises(ConfigError) as caught:
        DataConfig(train=train)
    assert str(caught.value).startswith(words)


def test_eval_files_need_distinct_names_and_no_weights():
    files = [{"path": "math/test.jsonl"}, {"path": "code/test.jsonl", "name": "code"}]
    assert [file.name for file in DataConfig(eval=files).eval_files] == ["test", "code"]
    with pytest.raises(
        ConfigError, match=r"data.eval\[1\].name=test: already the name of data.eval\[0\]"
    ):
        DataConfig(eval=["math/test.jsonl", "code/test.jsonl"])
    with pytest.raises(ConfigError, match=r"data.eval\[0\].weight=2: evaluation uses every row"):
        DataConfig(eval=[{"path": "a", "weight": 2}])


RECIPE = """
model: {path: some/model}
rewards: [{kind: exact}]
data:
  train:
    - some/rows.jsonl
    - {path: other, split: train, template: plain, filter: "keep.py:short"}
  eval: {path: held_out, template: chat.jinja}
"""


def test_paths_become_absolute_and_the_config_round_trips(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    config = load_config(recipe)
    here = Path.cwd()
    first, second = config.data.train_files
    assert (first.path, second.path) == (f"{here}/some/rows.jsonl", f"{here}/other")
    assert (second.template, second.filter) == ("plain", f"{here}/keep.py:short")
    assert config.data.eval_files[0].template == f"{here}/chat.jinja"
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_overrides_set_a_file_an_entry_or_a_key(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    data = load_config(recipe, ["data.train=/x.parquet", "data.eval={path: /y, name: z}"]).data
    assert [file.path for file in (*data.train_files, *data.eval_files)] == ["/x.parquet", "/y"]
    data = load_config(recipe, ["data.train[1].split=test", "data.train[0]=/x.jsonl"]).data
    assert data.train_files[0].path == "/x.jsonl"
    assert data.train_files[1].split == "test"
    with pytest.raises(ConfigError, match=r"data.train\[1\].splitt='x': unknown; .* split"):
        load_config(recipe, ["data.train[1].splitt=x"])


def test_prompts_of_several_files_have_distinct_indices(tokenizer, write_rows):
    a = write_rows({"prompt": "a"}, {"prompt": "x" * 99}, name="a.jsonl")
    b = write_rows({"prompt": "b"}, {"prompt": "c"}, name="b.jsonl")
    files = load_files(tokenizer, [a, b], on_long_prompt="skip")
    loaded_prompts = [prompt for file in files for prompt in file.prompts]
    assert [prompt.uid for prompt in loaded_prompts] == ["0:0:0", "0:2:0", "0:3:0"]
    assert [prompt.row_location for prompt in files[1].prompts] == [f"{b} line 1", f"{b} line 2"]
    assert [len(file.prompts) for file in files] == [1, 2]
    with pytest.raises(ConfigError, match=r"0 filtered, 1 too long \(the limit is 50 tokens\)"):
        load_files(tokenizer, write_rows({"prompt": "x" * 99}), on_long_prompt="skip")


def test_file_shares_follow_weights_or_prompt_counts(tokenizer, write_rows):
    a = write_rows({"prompt": "a"}, name="a.jsonl")
    b = write_rows(*({"prompt": str(i)} for i in range(3)), name="b.jsonl")

    def mix(train):
        files = DataConfig(train=train).train_files
        opened = open_training_files(files, lambda: tokenizer, PromptLimits(50, 300))
        return [*zip([len(file.row_indices) for file in opened.files], opened.shares, strict=True)]

    assert mix([a, b]) == [(1, 0.25), (3, 0.75)]
    weighted = [{"path": a, "weight": 4}, {"path": b, "weight": 1.0}]
    assert mix(weighted) == [(1, 0.8), (3, 0.2)]


KEEP = """
def short(prompt):
    return len(prompt.messages[0]["content"]) < 3

def none(prompt):
    return False

def fails(prompt):
    return prompt.extra_info["level"] < 3

def says_yes(prompt):
    return "yes"
"""


@pytest.fixture
def keep(tmp_path):
    path = tmp_path / "keep.py"
    path.write_text(KEEP)
    return path


def test_filtered_rows_are_counted(tokenizer, write_rows, keep):
    rows = write_rows({"prompt": "a"}, {"prompt": "x" * 99}, {"prompt": "bb"})
    train = {"path": rows, "filter": f"{keep}:short"}
    (file,) = load_files(tokenizer, train)  # the filter drops the long row before the length check
    assert [prompt.uid for prompt in file.prompts] == ["0:0:0", "0:2:0"]
    assert file.notes == [f"{rows}: 1 prompts skipped, filtered by {keep}:short"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fails", "{rows} line 1: filter: fails at {keep}:9: KeyError: 'level'"),
        ("says_yes", "{rows} line 1: filter: says_yes in {keep} returned 'yes', not True or False"),
        ("none", "{rows}: no usable prompt: 1 filtered, 0 too long (the limit is 50 tokens)"),
    ],
)
def test_a_failing_filter_names_the_users_line(tokenizer, write_rows, keep, function, words):
    rows = write_rows({"prompt": "a"})
    with pytest.raises(ConfigError) as caught:
        load_files(tokenizer, {"path": rows, "filter": f"{keep}:{function}"})
    assert str(caught.value) == words.format(rows=rows, keep=keep)


def test_the_template_is_model_plain_or_a_file(tokenizer, write_rows, tmp_path):
    rows = write_rows({"prompt": "2+3="})
    jinja = tmp_path / "chat.jinja"
    jinja.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}\n")

    def text(template):
        (file,) = load_files(tokenizer, {"path": rows, "template": template})
        (prompt,) = file.prompts
        return tokenizer.decode(prompt.token_ids)

    assert text("model") == "<user>2+3=</s><assistant>"
    assert text("plain") == "<s>2+3="
    assert text(str(jinja)) == "[2+3=]"
    with pytest.raises(
        ConfigError, match=r"data\.train\.template=chatml: must be model, plain or a jinja file"
    ):
        text("chatml")


# Tokens of the template, "<user>" + text + "</s>" + "<assistant>"; the text has one per byte.
FRAME = 3


def load(path, tokenizer, *, vocab_size=300, environments=None):
    files = parse_data_files(path, key="data.train")
    limits = PromptLimits(20, vocab_size, environments=environments)
    (loaded,) = load_prompts(files, tokenizer, limits)
    return loaded.prompts


def test_prompts_carry_the_row_and_int32_tokens(tokenizer, write_rows):
    path = write_rows(
        {"prompt": "abc", "data_source": "letters", "ground_truth": "d", "extra_info": {"n": 3}}
    )
    (prompt,) = load(path, tokenizer)
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.shape == (FRAME + 3,)
    assert (prompt.uid, prompt.data_source, prompt.ground_truth) == ("0:0:0", "letters", "d")
    assert prompt.extra_info["n"] == 3


def test_a_row_may_name_its_environment(tokenizer, write_rows):
    path = write_rows({"prompt": "a", "environment": "guess"}, {"prompt": "b"})
    (named, other) = load(path, tokenizer)
    assert (named.environment, other.environment) == ("guess", "")
    assert "environment" not in named.extra_info
    path = write_rows({"prompt": "a", "environment": "b"}, {"prompt": "a", "environment": "a"})
    prompts = load(path, tokenizer, environments=("a", "b"))
    assert [prompt.environment for prompt in prompts] == ["b", "a"]


NAMED, UNNAMED = {"prompt": "a", "environment": "gues"}, {"prompt": "a"}


@pytest.mark.parametrize(
    ("row", "environments", "message"),
    [
        (UNNAMED, ("guess", "other"), "column environment=: must be one of guess, other"),
        (NAMED, ("guess", "other"), "column environment=gues: must be one of guess, other"),
        (NAMED, ("",), "column environment=gues: the run has none with a name"),
        ({"prompt": "a", "environment": 3}, ("guess",), "environment must be text, got int"),
    ],
)
def test_a_row_without_one_of_the_environments_of_the_run_is_refused(
    tokenizer, write_rows, row, environments, message
):
    path = write_rows(row)
    with pytest.raises(ConfigError) as caught:
        load(path, tokenizer, environments=environments)
    assert str(caught.value).startswith(f"{path} line 1: {message}")


@pytest.mark.parametrize("environments", [(), ("",), None])
def test_a_row_needs_no_name_for_the_only_environment(tokenizer, write_rows, environments):
    (prompt,) = load(write_rows(UNNAMED), tokenizer, environments=environments)
    assert prompt.environment == ""


def test_a_longer_prompt_is_an_error_with_row_and_length(tokenizer, write_rows):
    path = write_rows({"prompt": "x"}, {"prompt": "x" * 18})
    with pytest.raises(ConfigError) as caught:
        load(path, tokenizer)
    assert str(caught.value).startswith(
        f"{path} line 2: the prompt has 21 tokens, the limit is 20 "
    )


def test_a_token_outside_the_vocabulary_is_refused(tokenizer, write_rows):
    path = write_rows({"prompt": "a"})
    largest = max(load(path, tokenizer)[0].token_ids)
    load(path, tokenizer, vocab_size=largest + 1)
    with pytest.raises(ConfigError, match=rf"line 1: .*token id {largest}, .* has {largest} ids"):
        load(path, tokenizer, vocab_size=largest)


def test_a_prompt_without_tokens_is_refused(tokenizer, write_rows):
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="line 1: the prompt has no tokens"):
        load(write_rows({"prompt": ""}), tokenizer)


def test_the_prompt_limit_is_the_rest_of_the_context():
    assert DataConfig().compute_prompt_limit(model_tokens=100, max_new_tokens=30) == 70
    config = DataConfig(max_prompt_tokens=70)
    assert config.compute_prompt_limit(model_tokens=100, max_new_tokens=30) == 70
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens=70: must be at most 69: "):
        config.compute_prompt_limit(model_tokens=99, max_new_tokens=30)
    with pytest.raises(ConfigError, match=r"generator.max_new_tokens=99: no tokens are left"):
        config.compute_prompt_limit(model_tokens=99, max_new_tokens=99)
