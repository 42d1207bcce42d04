"""Pages to follow from top to bottom: files are valid, commands print what the pages show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.run_config import load_config
from tests.docs.commands import FENCE, ROOT
from tests.e2e.shared_runs import Ended, make_builds

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("five_minutes", "own_model")}
FILES = {
    match[1]: block
    for page in PAGES.values()
    for _, block in FENCE.findall(page)
    if (match := re.match(r"# (\w+\.(?:py|yaml))\n", block))
}
SECTIONS = dict(
    re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGES["five_minutes"], flags=re.DOTALL | re.MULTILINE
    )
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone after `make demo`, but for the demo's run, with the files of the page."""
    make_builds([ROOT / "configs" / "grpo_arithmetic.yaml"])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "runs").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_configs_of_the_page_are_valid():
    configs = {name: load_config(Path(name)) for name in FILES if name.endswith(".yaml")}
    assert {name: config.run.name for name, config in configs.items()} == {
        "mine.yaml": "mine",
        "second_try.yaml": "second_try",
        "reverser.yaml": "reverser",
    }


@pytest.mark.slow
@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("section", [name for name in SECTIONS if "```sh" in SECTIONS[name]])
def test_the_commands_of_a_section_print_what_it_shows(section: str, folder: Path, demo: Ended):
    (folder / "runs" / "demo").symlink_to(demo.run_dir)
    check_commands(SECTIONS[section], demo.output)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_commands_of_the_page_of_an_own_model_print_what_it_shows():
    check_commands(PAGES["own_model"], "")


def check_commands(text: str, demo_output: str) -> None:
    """Run the commands of a page or section, and find the lines that it shows after each."""
    blocks = [block for block in FENCE.findall(text) if block[0] in ("sh", "text")]
    for (language, commands), (next_language, shown) in zip(
        blocks, [*blocks[1:], ("", "")], strict=True
    ):
        if language == "sh":
            expected = shown if next_language == "text" else ""
            output = demo_output if commands == "make demo\n" else run_shell(commands, expected)
            assert output.strip()
            missing = set(list_patterns(expected)) - set(list_patterns(output))
            assert not missing, output


def run_shell(commands: str, shown: str) -> str:
    """Run commands as a reader does, who types the lines after `you>`; return their output."""
    typed = re.findall(r"^you> (.*)$", shown, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-euc", commands],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        input="".join(f"{line}\n" for line in typed),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def list_patterns(text: str) -> list[str]:
    """Return the lines of an output, other than `...`, with # for every number."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [re.sub(r"\d[\d.:]*", "#", line) for line in lines if line not in ("", "...")]
