"""`streamrl data check` reads every row like a run and reports bad rows."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from streamrl.cli.main import main


def row(content: object, **more: object) -> str:
    return json.dumps({"data_source": "sums", "prompt": content, "ground_truth": "1", **more})


@pytest.fixture
def bad_rows(tmp_path: Path) -> Path:
    """Line 1 is valid, 2 and 5 are bad, 3 is too long, 4 repeats line 1 without ground truth."""
    path = tmp_path / "messy.jsonl"
    duplicate = row("1+1", ground_truth=None, data_source="more")
    lines = [row("1+1"), "{", row("1+" * 80 + "1"), duplicate, row([]), row("12+12")]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: object) -> tuple[int, str]:
        code = main(["data", "check", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_a_valid_file_is_summarized_with_exit_code_0(toy: Path, check: Callable[..., tuple]):
    code, text = check(toy / "rows.jsonl", "--model", toy / "model")
    assert code == 0
    assert text.splitlines() == [
        f"{toy}/rows.jsonl: 100 rows, 100 of them usable",
        "  sources          toy 100",
        "  prompts          4 to 4 tokens, median 4, 95 % up to 4 (limit 127)",
    ]


def test_every_bad_row_is_listed_with_exit_code_2(toy, bad_rows, check):
    code, text = check(bad_rows, "--model", toy / "model")
    assert code == 2
    assert f"{bad_rows}: 6 rows, 3 of them usable" in text
    assert "sources          sums 2, more 1" in text
    assert "no ground truth  1" in text and "duplicates       1" in text
    row_locations = [
        line.split(": ")[0].strip() for line in text.splitlines() if "messy.jsonl line" in line
    ]
    assert row_locations == [f"{bad_rows} line {number}" for number in (2, 3, 5)]


def test_long_prompts_may_be_skipped(toy, bad_rows, check, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    config = yaml.safe_load((toy / "recipe.yaml").read_text())
    config["data"]["on_long_prompt"] = "skip"
    recipe.write_text(yaml.safe_dump(config))
    code, text = check(bad_rows, "--config", recipe)
    assert code == 2 and "skipped          1 too long" in text and "bad rows         2" in text


def test_json_contains_the_same_counts(toy, bad_rows, check):
    code, text = check(bad_rows, "--model", toy / "model", "--json")
    (report,) = json.loads(text)["files"]
    assert code == 2
    assert (report["rows"], report["kept"], report["bad"], report["too_long"]) == (6, 3, 3, 0)
    assert report["lengths"] == {"min": 4, "median": 4, "p95": 6, "max": 6}
    assert report["sources"] == {"sums": 2, "more": 1}
    places = [problem.split(": ")[0] for problem in report["problems"]]
    assert places == [f"{bad_rows} line {number}" for number in (2, 3, 5)]


def test_a_recipe_provides_files_model_and_limits(toy, bad_rows, check):
    code, text = check("--config", toy / "recipe.yaml")
    assert (code, text.count("100 rows, 100 of them usable")) == (0, 2)
    assert "(limit 122)" in text
    code, text = check(bad_rows, "--config", toy / "recipe.yaml")
    assert code == 2 and "limit is 122" in text


@pytest.mark.parametrize("words", [["{toy}/rows.jsonl"], []])
def test_a_recipe_may_be_part_of_a_config_and_lie_in_a_run_directory(toy, tmp_path, check, words):
    data = {} if words else {"train": str(toy / "rows.jsonl")}
    parts = {"data": data, "generator": {"max_new_tokens": 6}, "rewards": [{"kind": "model"}]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parts))
    files = [word.format(toy=toy) for word in words]
    for recipe in (tmp_path, tmp_path / "config.yaml"):
        code, text = check(*files, "--model", toy / "model", "--config", recipe)
        assert code == 0 and "100 rows, 100 of them usable" in text and "(limit 122)" in text


def test_column_options_select_prompt_and_label(toy, tmp_path, check):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "1+1", "label": "2"}\n{"input": "1+2"}\n')
    words = (path, "--model", toy / "model", "--prompt-key", "input", "--template", "plain")
    assert check(*words)[0] == 0
    code, text = check(*words, "--label-key", "label")
    assert code == 2 and "line 2: no column 'label' (label_key)" in text


def test_filter_and_template_options_are_applied(toy, tmp_path, check):
    (tmp_path / "mine.py").write_text("def keep(prompt): return '+' in str(prompt.messages)\n")
    (tmp_path / "bad.jinja").write_text("{{ messages[0].content }}{% endfor %}\n")
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{row('1+1')}\n{row('12')}\n")
    words = (path, "--model", toy / "model")
    code, text = check(*words, "--filter", f"{tmp_path}/mine.py:keep")
    assert code == 0 and "2 rows, 1 of them usable" in text and "filtered         1" in text
    code, text = check(*words, "--template", tmp_path / "bad.jinja")
    assert (code, len(text.splitlines())) == (2, 1)
    assert f"template={tmp_path}/bad.jinja:1: TemplateSyntaxError: " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a file"),
        (["rows.jsonl"], "--model, or a --config with model.path"),
        (["--config", "{toy}/model"], "not a run directory: holds no config.yaml"),
        (["nowhere.jsonl", "--model", "{toy}/model"], "nowhere.jsonl: cannot be read"),
        (["{toy}/rows.jsonl", "--model", "{toy}"], r"{toy}: not a model directory: config\.json"),
        (["--config", "{toy}/recipe.yaml", "--split", "x"], "--split=x .* no file is named"),
    ],
)
def test_bad_arguments_are_a_one_line_error(toy, refuse, words, message):
    error = refuse("data", "check", *(word.format(toy=toy) for word in words))
    assert re.search(message.replace("{toy}", str(toy)), error)
