import io
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from streamrl.telemetry import console as console_module
from streamrl.telemetry.console import LiveConsole, PlainConsole
from streamrl.telemetry.progress import WorkStatus
from tests.telemetry.rows import full_row, make_run_info
from tests.virtual_time import ManualClock

WIDTHS = (60, 80, 120)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CLOCK = ManualClock()


@pytest.fixture(autouse=True)
def manual_clock(monkeypatch):
    CLOCK.now = 0.0
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=CLOCK))


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, _environ={})


def pipe(width):
    return Console(file=io.StringIO(), force_terminal=False, width=width)


def lines(console):
    return ESCAPES.sub("", console.file.getvalue()).replace("\r", "\n").splitlines()


def view(live, width):
    """Return the live view as text."""
    text = io.StringIO()
    Console(file=text, width=width).print(live.render())
    return text.getvalue()


def run(console, *, steps=(1, 2, 3)):
    """Log a short run: start-up, the base model's evaluation, steps with events, a last
    evaluation."""
    console.start({})
    console.show_status(WorkStatus("starting: generator 0/1, trainer 1/2"))
    CLOCK.now += 25.0
    console.log_step(0, {"eval/pass_at_1": 0.125})
    for step in steps:
        CLOCK.now += 2.0
        for number in range(5):
            console.log_event("drop", {"cause": "reward_error", "uid": f"0:{number}:0"})
        console.log_step(step, full_row(step))
    console.log_step(steps[-1] + 1, full_row(steps[-1] + 1) | {"eval/pass_at_1": 0.75})


@pytest.fixture
def live(tmp_path):
    """Return a live console of width 80; not started, so that no background thread draws."""
    return LiveConsole(make_run_info(tmp_path), terminal(80))


@pytest.fixture
def plain(tmp_path):
    return PlainConsole(make_run_info(tmp_path), pipe(80))


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(width, tmp_path):
    run_info = make_run_info(tmp_path / ("long" * 30))
    console = LiveConsole(run_info, terminal(width))
    run(console)
    console.log_event("stall", {"reason": "a reason of many words " * 10})
    for step in range(5, 200):
        console.add_row(step, full_row(step))
    assert max(len(line) for line in view(console, width).splitlines()) <= width
    console.close({"note": "x" * 200})
    printed = lines(console.console)
    assert max(len(line) for line in printed) <= width
    assert any("pass_at_1" in line for line in printed)


def test_the_plain_console_prints_a_line_per_step(tmp_path):
    console = PlainConsole(make_run_info(tmp_path), pipe(160))
    run(console)
    steps = [line for line in lines(console.console) if line.startswith(" step ")]
    assert len(steps) == 4
    assert steps[0] == (
        " step 1/40  reward 0.100  right: all 50%, none 50%  length 0  entropy 0.50"
        "  probability 0.50  staleness 0.6, largest 2  2.0 s/step  1:18 left  12.3k tokens/s"
        "  waiting: reward 1, reference 2, train 3"
        "  busy: generate 100%, reward 75%, reference 50%, train 25%"
    )
    console.close({})
    text = console.console.file.getvalue()  # type: ignore[attr-defined]
    assert text.isascii() and "\x1b" not in text


def test_the_plain_console_repeats_a_status_every_half_minute(plain):
    plain.start({})
    for completed in range(100):
        plain.show_status(WorkStatus("evaluating", 100, "prompts", completed))
        CLOCK.now += 1.0
    printed = [" ".join(line.split()) for line in lines(plain.console)]
    assert [line for line in printed if "evaluating" in line] == [
        f"{time} evaluating: {completed} of 100 prompts"
        for time, completed in (("0:00", 0), ("0:30", 30), ("1:00", 60), ("1:30", 90))
    ]


def test_events_are_printed_verbatim_without_fields_that_only_a_resume_reads(plain):
    plain.start({})
    plain.log_event("machine", {"cores": 2, "objective": "e8add", "goes_back": False})
    plain.log_event("[bold]", {"text": "[red]x[/red]"})
    text = "\n".join(lines(plain.console))
    assert "cores=2" in text and "objective" not in text and "goes_back" not in text
    assert "[bold]" in text and "[red]x[/red]" in text


def test_frequent_events_are_limited_per_step_and_counted(plain):
    plain.start({})
    for _ in range(9):
        plain.log_event("drop", {"cause": "timeout"})
    plain.log_event("stall", {"stage": "train"})
    plain.log_step(1, full_row(1))
    text = "\n".join(lines(plain.console))
    assert text.count("cause=timeout") == 3
    assert "6 more, see events.jsonl" in text
    assert "stage=train" in text


@pytest.mark.parametrize(("kind", "output"), [(LiveConsole, terminal), (PlainConsole, pipe)])
def test_the_summary_shows_rewards_totals_and_ledger(kind, output, tmp_path):
    console = kind(make_run_info(tmp_path), output(120))
    run(console)
    ledger = "admitted 21 = trained 10 + filtered 2 + dropped 2 + in flight 7"
    console.close({"ledger": ledger, "wandb": "offline", "written": "runs/demo"})
    printed = [" ".join(line.split()) for line in lines(console.console)]
    assert "steps 4 of 40" in printed
    assert "reward 0.100 -> 0.400" in printed
    assert "eval pass_at_1 0.125 -> 0.750" in printed
    assert "wall time 0:31" in printed
    assert "tokens 98,760" in printed
    assert f"ledger {ledger}" in printed, "as of the run's end, not of its last row"
    assert "wandb offline" in printed
    assert "written runs/demo" in printed


def test_a_run_saved_before_its_first_step_prints_the_checkpoint(plain):
    plain.start({})
    plain.close({"outcome": "interrupted", "checkpoint": "c", "written": "runs/demo"})
    printed = [" ".join(line.split()) for line in lines(plain.console)]
    assert printed[-2:] == ["outcome interrupted", "written runs/demo"]


def test_the_view_shows_the_status_before_the_first_step(live):
    live.show_status(WorkStatus("starting: generator 0/1, trainer 1/2"))
    CLOCK.now = 12.0
    text = view(live, 80)
    assert "demo  step 0/40" in text
    assert "starting: generator 0/1, trainer 1/2  0:12" in text
    assert "reward" not in text


def test_the_view_shows_reward_staleness_and_every_stage(live):
    live.log_step(0, {"eval/pass_at_1": 0.125})
    for step in (1, 2):
        live.log_step(step, full_row(step))
    live.log_step(3, full_row(3) | {"eval/pass_at_1": 0.5})
    CLOCK.now += 1.0
    text = view(live, 80)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "step 3/40" in text and "1:13 left" in text
    assert "reward 0.300 \u2581\u2584\u2588 from 0.100" in rows
    assert "eval pass_at_1 0.500 \u2581\u2588 from 0.125" in rows
    assert re.search(r"staleness +0\.61 +\S+ +largest 2, bound 2 versions", text)
    assert "tokens/s 12.3k 2.0 s per step" in rows
    assert "weights v3 publish 0.50 s, pull 0.50 s" in rows
    assert re.search(r"generate +\S+ +100%", text)
    assert re.search(r"train +5 +\S+ +25%", text)
    assert "starting" not in text


def test_the_view_counts_what_a_status_has_done(live):
    live.log_step(1, full_row(1))
    CLOCK.now = 60.0
    live.show_status(WorkStatus("evaluating", 64, "prompts", completed=16, elapsed_s=10.0))
    assert re.search(r"evaluating  \u2501+ +16 of 64 prompts  0:30 left", view(live, 80))


def test_a_full_idle_bar_and_unknown_values_can_be_drawn(live):
    row = full_row(1) | {"idle/train": 1.0, "idle/reward": float("nan"), "queue/depth/train": 0}
    live.log_step(1, row | {"reward/mean": float("nan"), "weights/version": float("nan")})
    assert re.search(r"train +0 +0%", view(live, 80))


def test_the_cursor_is_restored_after_an_interrupt(live):
    with pytest.raises(KeyboardInterrupt):
        try:
            live.start({})
            raise KeyboardInterrupt
        finally:
            live.close({})
    text = live.console.file.getvalue()
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert sys.stdout is not None and not hasattr(sys.stdout, "rich_proxied_file")


def test_filter_cost_is_shown_with_a_filter(tmp_path):
    run_info = replace(make_run_info(tmp_path), has_filter=True)
    cost = {"filter/share": 0.9, "filter/generate_s": 11.5, "filter/score_s": 0.75}
    console = PlainConsole(run_info, pipe(120))
    console.start({})
    for step in (1, 2):
        console.log_step(step, full_row(step) | cost)
    console.close({})
    text = " ".join(" ".join(lines(console.console)).split())
    assert "filtered 90%, 12.2 s" in text and "filtered 2 groups (17%)" in text
    live = LiveConsole(run_info, terminal(80))
    assert "filtered" not in view(live, 80)
    live.add_row(1, full_row(1) | cost | {"filter/oversample": 8.0})
    assert "filtered 90% 12.2 s of generation and scoring lost" in " ".join(view(live, 80).split())
