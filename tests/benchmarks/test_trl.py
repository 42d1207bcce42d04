"""The benchmark against TRL: equal settings, and failures of a side."""

import sys
from pathlib import Path

import pytest

from benchmarks import trl
from benchmarks.trl import Launch, RunError, RunLength
from streamrl.data.chat_template import load_tokenizer
from streamrl.data.prompt_file import PromptLimits, load_prompts

ROOT = Path(__file__).resolve().parents[2]


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
