"""`streamrl rewards`: every kind with its options, including kinds of packages and user files."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import yaml

from streamrl.cli.main import main
from streamrl.cli.rewards import RewardOption, read_options
from streamrl.files.typed_settings import read_settings
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import REWARD_KINDS

KINDS_WITH_REQUIRED_OPTIONS = ("regex", "model", "judge")
"""Kinds with a required option."""


def read_output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["rewards", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installed package that provides the kind `brevity`."""
    (tmp_path / "terse.py").write_text(
        "import os\n"
        "def judge(prompt, completion, most=10):\n"
        "    print('judged in', os.getpid())\n"
        "    return most - len(completion)\n"
    )
    info = tmp_path / "terse-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: terse\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[streamrl.rewards]\nbrevity = terse:judge\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # A worker finds the package on the same path as streamrl.
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    yield tmp_path
    sys.modules.pop("terse", None)


def test_every_kind_is_printed_with_its_options(capsys):
    text = read_output(capsys)
    for name, kind in REWARD_KINDS.items():
        assert f"{name}: {kind.summary}\n" in text
    assert "  pattern  regular expression, searched anywhere in the completion [required]\n" in text
    assert "  timeout_s    deadline of one attempt, s; null: scorer.timeout_s [null]" in text


@pytest.mark.parametrize("kind", [*REWARD_KINDS.values(), RewardConfig])
def test_every_option_has_a_docstring_line(kind):
    settings = kind if kind is RewardConfig else kind.options_type
    assert set(read_options(settings)) == {field.name for field in dataclasses.fields(settings)}


@pytest.mark.parametrize(
    "kind", [kind for kind in REWARD_KINDS if kind not in KINDS_WITH_REQUIRED_OPTIONS]
)
def test_printed_defaults_equal_the_effective_defaults(capsys, kind):
    listed = json.loads(read_output(capsys, kind, "--json"))[kind]["options"]
    defaults = {name: yaml.safe_load(option["default"]) for name, option in listed.items()}
    options = REWARD_KINDS[kind].options_type
    assert read_settings(options, defaults, section="rewards") == options()


def test_own_options_precede_inherited_options():
    @dataclass
    class Base:
        """Base options.

        size: size of a cache,
            in MiB.
        """

        size: int = 3

    @dataclass
    class Derived(Base):
        """Derived options.

        color: name of a color.
        Nothing: is no field.
        """

        color: str | None = None

    assert list(read_options(Derived).items()) == [
        ("color", RewardOption("null", "name of a color")),
        ("size", RewardOption("3", "size of a cache, in MiB")),
    ]


def test_one_kind_by_name_or_the_nearest_suggestion(capsys):
    assert read_output(capsys, "regex").startswith(
        "regex: 1 if a pattern matches in the completion\n"
    )
    assert main(["rewards", "rgex"]) == 2
    line = "streamrl: rgex: no such kind of reward; the nearest kind is regex\n"
    assert capsys.readouterr().err == line


def test_kinds_registered_by_a_file_are_listed_with_its_path(capsys, tmp_path):
    path = tmp_path / "kinds.py"
    path.write_text(
        "from streamrl.rewards import reward\n"
        "@reward('politeness')\n"
        "def judge(prompt, completion):\n"
        "    '''1 for a thank you.\n\n    And more.'''\n"
    )
    listed = json.loads(read_output(capsys, "politeness", "--json", "--path", str(path)))[
        "politeness"
    ]
    assert listed["summary"] == "1 for a thank you."
    assert listed["source"] == str(path)
    assert "kwargs" in listed["options"] and "function" not in listed["options"]
    assert main(["rewards", "--path", "no.py"]) == 2
    assert capsys.readouterr().err == "streamrl: --path=no.py: no such file\n"


def test_markdown_cells_are_escaped(capsys):
    for line in read_output(capsys, "--markdown").splitlines():
        assert line == "" or line.count("|") - line.count("\\|") in (4, 5)
        words = re.sub(r"(`+).*?\1", "", line).replace("\\<", "")
        assert "<" not in words, "an unescaped < begins an HTML tag"


def test_a_kind_of_an_installed_package_is_listed_and_usable(capsys, package):
    assert "brevity: from an installed package (terse:judge)\n" in read_output(capsys)
    rows, outs = package / "rows.jsonl", package / "outs.jsonl"
    rows.write_text('{"prompt": "Say it."}\n')
    outs.write_text('{"index": 0, "completion": "short"}\n')
    reward = "{kind: brevity, kwargs: {most: 7}, replicas: 1}"
    assert main(["score", str(rows), "--completions", str(outs), "--reward", reward]) == 0
    assert json.loads(capsys.readouterr().out)["components"] == {"brevity": 2.0}


def test_a_built_in_kind_hides_a_plugin_of_the_same_name_with_a_note(capsys, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from streamrl.rewards import reward\n"
        "@reward('exact')\n"
        "def mine(prompt, completion): return 1.0\n"
    )
    assert main(["rewards", "exact", "--path", str(path)]) == 0
    out, error = capsys.readouterr()
    assert out.startswith(f"exact: {REWARD_KINDS['exact'].summary}")
    assert (
        error == f"streamrl: exact: {path}: hidden by streamrl's built-in kind of the same name\n"
    )


def test_a_full_disk_behind_stdout_is_a_one_line_error():
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "rewards"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert process.returncode == 1
    assert process.stderr == "streamrl: standard output: no space left\n"
