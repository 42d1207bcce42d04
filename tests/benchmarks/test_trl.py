"""The benchmark beside TRL: same settings for both, figures, and what it says when a side fails."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import trl
from benchmarks.process_tree import ProcessTree
from benchmarks.trl import Launch, Length, RunError, Step
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.classify_rows import PromptLimits
from streamrl.data.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[2]
WORKS = "import time; t = time.process_time\nwhile t() < {}: pass\n"
"""A program that computes for so many seconds of processor time."""


def python(program: str) -> Launch:
    return Launch([sys.executable, "-c", program], lambda: [])


def play(launch: Launch, folder: Path, *, deadline_s: float = 60.0) -> trl.Figures:
    return trl.play(launch, folder, length=Length(3, 1), deadline_s=deadline_s)


def test_trl_gets_the_settings_of_the_recipe(tmp_path: Path) -> None:
    task = trl.Task(trl.DEMO, ["trainer.lr=3e-4"], ROOT / "rows.jsonl")
    spec = trl.peer_spec(task, 30, tmp_path)
    assert (spec.groups, spec.group_size, spec.max_new_tokens) == (32, 8, 12)
    assert (spec.lr, spec.temperature, spec.grad_clip) == (3e-4, 1.0, 1.0)
    assert spec.pattern == r"(?:^|=)(-?\d+)$"
    assert spec.model.endswith("examples/arithmetic/build/base_model")


def test_the_long_tailed_task_is_one_model_and_one_file_of_rows_for_both(tmp_path: Path) -> None:
    task = trl.make_long_tailed(tmp_path, [])
    spec, config = trl.peer_spec(task, 10, tmp_path), task.config()
    assert spec.model == config.model.path == str(tmp_path / "model")
    assert [spec.rows] == [file.path for file in config.data.train_files]
    assert (spec.groups * spec.group_size, spec.max_new_tokens) == (256, 256)
    tokenizer, limits = load_tokenizer(spec.model), PromptLimits(trl.PROMPT_TOKENS, trl.NUM_WORDS)
    (loaded,) = load_prompts(config.data.train_files, tokenizer, limits)
    prompts = [prompt.token_ids for prompt in loaded.prompts]
    assert len(prompts) == trl.NUM_ROWS
    assert all(len(ids) == trl.PROMPT_TOKENS and min(ids) >= 4 for ids in prompts)


def test_figures_leave_the_first_steps_out(tmp_path: Path) -> None:
    # The first step ends 20 s after the command, and takes long.
    steps = [Step(1020.0, 9.0, 300.0, 0.5)]
    steps += [Step(1020.0 + i, seconds, 100.0, 0.5) for i, seconds in enumerate((1.0, 2.0, 3.0))]
    with ProcessTree(psutil.Process().pid) as tree:
        pass
    figures = trl.figures_of(1000.0, steps, 1, tree)
    assert (figures["start_s"], figures["step_s"], figures["step_s_mean"]) == (20.0, 2.0, 2.0)
    assert figures["tokens_per_s"] == 50.0


def test_ratios_are_ours_over_trls_round_by_round() -> None:
    names = ("step_s", "step_s_mean", "tokens_per_s", "start_s", "cpu_step_s")
    peer = dict.fromkeys((*names, "peak_rss_mb", "peak_pss_mb"), 4.0)
    ours = {**dict.fromkeys(peer, 2.0), "tokens_per_s": 8.0}
    found = trl.ratios(ours, peer)
    assert (found["step_s"], found["tokens_per_s"]) == (0.5, 2.0)


def test_a_side_that_fails_is_said_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^exit code 1: no such model$"):
        play(python("import sys; print('loading'); sys.exit('no such model')"), tmp_path)


def test_a_side_that_ends_too_early_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^made 0 of 3 steps; last line: done$"):
        play(python("print('done')"), tmp_path)


@pytest.mark.slow
def test_a_side_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(RunError, match=r"made 0 of 3 steps in --deadline=3 s"):
        play(python(program), tmp_path, deadline_s=3.0)
    assert not [p for p in psutil.Process().children(recursive=True) if child in cmdline(p)]


def cmdline(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def test_the_environment_is_asked_for_where_it_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        trl.main(["--python", str(tmp_path / "python")])
    said = capsys.readouterr()
    assert ended.value.code == 2
    line = f"{tmp_path}/python is missing: `make parity-env` builds it"
    assert said.err.startswith(f"trl: {line} ")
    assert said.err.count("\n") == 1
    assert not said.out


def test_a_failure_of_either_side_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trl, "launch_streamrl", lambda *_: python("raise SystemExit('no room')"))
    with pytest.raises(SystemExit) as ended:
        trl.main(["--tasks", "long_tailed", "--quick", "--python", sys.executable])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (1, "")
    assert said.err.splitlines()[-1] == "trl: long_tailed: streamrl: exit code 1: no room"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "5"], "--steps=5: must be at least 6, 2 behind --warm-up"),
        (["--rounds", "0"], "argument --rounds: 0: must be a whole number, 1 or more"),
        (["--warm-up", "x"], "argument --warm-up: x: must be a whole number, 1 or more"),
        (["--max-staleness", "-1"], "argument --max-staleness: -1: must be a whole number, 0"),
    ],
)
def test_a_bad_argument_is_one_clear_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        trl.main(words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith(f"trl: {line} ")
    assert said.err.count("\n") == 1


@pytest.fixture
def working_tree() -> Iterator[subprocess.Popen[str]]:
    """A process that says when it and its child have computed for half a second each, and stays."""
    program = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {WORKS.format(0.5)!r}])\n"
        f"{WORKS.format(0.5)}"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_process_tree_counts_memory_and_processor_time(
    working_tree: subprocess.Popen[str],
) -> None:
    assert working_tree.stdout is not None
    with ProcessTree(working_tree.pid) as tree:
        assert working_tree.stdout.readline() == "done\n"
    spent = psutil.Process(working_tree.pid).cpu_times()
    # From its first sample on, which may come late: the parent's own half second, at least.
    assert 0 < tree.cpu_s(0.0, 2e9) <= spent.user + spent.system + spent.children_user + 1.0
    assert 0 < tree.usage.rss_mb < 1000
