"""The benchmark against TRL: equal settings, figures, and failures of a side."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import trl
from benchmarks.process_tree import ProcessTree
from benchmarks.trl import Launch, RunError, RunLength, Step
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.prompt_file import PromptLimits, load_prompts

ROOT = Path(__file__).resolve().parents[2]
WORKS = "import time; t = time.process_time\nwhile t() < {}: pass\n"
"""A program that uses so many seconds of processor time."""


def python(program: str) -> Launch:
    return Launch([sys.executable, "-c", program], lambda: [])


def play(launch: Launch, folder: Path, *, deadline_s: float = 60.0) -> trl.Figures:
    return trl.run_launch(launch, folder, length=RunLength(3, 1), deadline_s=deadline_s)


def test_trl_gets_the_settings_of_the_recipe(tmp_path: Path):
    task = trl.TrainingTask(trl.DEMO, ["trainer.lr=3e-4"], ROOT / "rows.jsonl")
    spec = trl.make_peer_spec(task, 30, tmp_path)
    assert (spec.groups, spec.group_size, spec.max_new_tokens) == (32, 8, 12)
    assert (spec.lr, spec.temperature, spec.grad_clip) == (3e-4, 1.0, 1.0)
    assert spec.pattern == r"(?:^|=)(-?\d+)$"
    assert spec.model.endswith("examples/arithmetic/build/base_model")


def test_both_sides_get_the_same_model_and_rows_for_the_long_tailed_task(tmp_path: Path):
    task = trl.make_long_tailed(tmp_path, [])
    spec, config = trl.make_peer_spec(task, 10, tmp_path), task.config()
    assert spec.model == config.model.path == str(tmp_path / "model")
    assert [spec.rows] == [file.path for file in config.data.train_files]
    assert (spec.groups * spec.group_size, spec.max_new_tokens) == (256, 256)
    tokenizer, limits = load_tokenizer(spec.model), PromptLimits(trl.PROMPT_TOKENS, trl.NUM_WORDS)
    (loaded,) = load_prompts(config.data.train_files, tokenizer, limits)
    prompts = [prompt.token_ids for prompt in loaded.prompts]
    assert len(prompts) == trl.NUM_ROWS
    assert all(len(ids) == trl.PROMPT_TOKENS and min(ids) >= 4 for ids in prompts)


def test_figures_leave_the_first_steps_out(tmp_path: Path):
    # The first step ends 20 s after the command, and takes long.
    steps = [Step(1020.0, 9.0, 300.0, 0.5)]
    steps += [Step(1020.0 + i, seconds, 100.0, 0.5) for i, seconds in enumerate((1.0, 2.0, 3.0))]
    with ProcessTree(psutil.Process().pid) as tree:
        pass
    figures = trl.summarize_steps(1000.0, steps, 1, tree)
    assert (figures["start_s"], figures["step_s"], figures["step_s_mean"]) == (20.0, 2.0, 2.0)
    assert figures["tokens_per_s"] == 50.0


def test_ratios_are_ours_over_trls_round_by_round():
    names = ("step_s", "step_s_mean", "tokens_per_s", "start_s", "cpu_step_s")
    peer = dict.fromkeys((*names, "peak_rss_mb", "peak_pss_mb"), 4.0)
    ours = {**dict.fromkeys(peer, 2.0), "tokens_per_s": 8.0}
    result = trl.compute_ratios(ours, peer)
    assert (result["step_s"], result["tokens_per_s"]) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('loading'); sys.exit('no model')", r"^exit code 1: no model$"),
        ("print('done')", r"^made 0 of 3 steps; last line: done$"),
    ],
)
def test_a_failed_or_short_run_is_an_error_with_its_last_line(
    tmp_path: Path, program: str, message: str
):
    with pytest.raises(RunError, match=message):
        play(python(program), tmp_path)


def test_a_failure_of_either_side_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(trl, "launch_streamrl", lambda *_: python("raise SystemExit('no room')"))
    with pytest.raises(SystemExit) as exit_info:
        trl.main(["--tasks", "long_tailed", "--quick", "--python", sys.executable])
    captured = capsys.readouterr()
    assert (exit_info.value.code, captured.out) == (1, "")
    assert captured.err.splitlines()[-1] == "trl: long_tailed: streamrl: exit code 1: no room"


@pytest.fixture
def working_tree() -> Iterator[subprocess.Popen[str]]:
    """A process that prints a line after half a second of work, as its child's, and stays."""
    child = f"subprocess.run([sys.executable, '-c', {WORKS.format(0.5)!r}])"
    program = f"import subprocess, sys\n{child}\n{WORKS.format(0.5)}"
    program += "print('done', flush=True)\nsys.stdin.read()\n"
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def test_a_process_tree_counts_memory_and_processor_time(working_tree: subprocess.Popen[str]):
    assert working_tree.stdout is not None
    with ProcessTree(working_tree.pid) as tree:
        assert working_tree.stdout.readline() == "done\n"
    spent = psutil.Process(working_tree.pid).cpu_times()
    # Counted from the first sample on, which may be late.
    assert 0 < tree.cpu_s(0.0, 2e9) <= spent.user + spent.system + spent.children_user + 1.0
    assert 0 < tree.usage.rss_mb < 1000
