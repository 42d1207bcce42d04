"""Environment and rows that `play` uses, with `--check` or without."""

import argparse
import json

import numpy as np
import pytest

from streamrl.cli.play import choose_environment, read_prompts
from streamrl.data.config import DataFile
from streamrl.environments.config import EnvironmentConfig, EnvironmentSpec
from streamrl.errors import ConfigError
from streamrl.messages import Prompt

ONE = EnvironmentConfig(path="one.py", options={"size": 4})
TWO = EnvironmentConfig(
    named={"guess": EnvironmentSpec(path="guess.py"), "other": EnvironmentSpec(path="other.py")}
)


def choose(recipe, *, row="", path=None, name=None, location="rows.jsonl line 1"):
    arguments = argparse.Namespace(environment=path, environment_name=name)
    prompt = Prompt("0:0:0", np.zeros(1, np.int32), row_location=location, environment=row)
    return choose_environment(arguments, recipe, prompt)


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        (ONE, {}, ("", "one.py")),
        (TWO, {"row": "guess"}, ("guess", "guess.py")),
        (TWO, {"row": "guess", "name": "other"}, ("other", "other.py")),
        (TWO, {"row": "none", "path": "mine.py"}, ("", "mine.py")),
        (EnvironmentConfig(), {"path": "mine.py"}, ("", "mine.py")),
    ],
)
def test_a_file_goes_before_a_name_and_a_name_before_the_row(recipe, words, expected):
    config = choose(recipe, **words)
    name, spec = config.single
    assert (name, spec.path) == expected


def test_a_file_of_the_command_line_has_no_options_of_the_config():
    assert choose(ONE, path="mine.py").options == {}


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (EnvironmentConfig(), {}, "give ENVIRONMENT, as file.py:Class, or a --config with"),
        (TWO, {"name": "guess", "path": "a.py"}, "--environment=guess has no effect: ENVIRONMENT="),
        (TWO, {"name": "gues"}, "--environment=gues: not in environment.named .* nearest .* guess"),
        (ONE, {"name": "guess"}, "--environment=guess: not in environment.named of --config"),
        (TWO, {"location": ""}, "give --environment NAME, one of guess, other"),
        (TWO, {}, "rows.jsonl line 1: column environment=: .* one of guess, other"),
        (
            ONE,
            {"row": "guess"},
            "rows.jsonl line 1: column environment=guess: the run has none",
        ),
    ],
)
def test_an_environment_that_the_config_lacks_is_refused(recipe, words, message):
    with pytest.raises(ConfigError, match=message):
        choose(recipe, **words)


def test_rows_of_an_environment_are_read_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": str(i), "environment": "ab"[i % 2]} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(environment):
        prompts = read_prompts(
            DataFile(str(path), prompt_key="prompt"),
            lambda messages: np.zeros(1, np.int32),
            first=0,
            count=2,
            environment=environment,
        )
        return [prompt.messages[0]["content"] for prompt in prompts]

    assert (read("b"), read(None)) == (["1", "3"], ["0", "1"])
    with pytest.raises(ConfigError, match="no row names the environment c"):
        read("c")
