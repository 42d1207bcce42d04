"""The command line of all benchmarks: options, figures, and failures."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.actors import start_actor, wait_for_all
from benchmarks.command import BenchmarkError, BenchmarkParser, at_least, run_benchmark, run_command
from streamrl.errors import ActorLostError, ConfigError


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("sample", "A sample.\n\nMore of it.")
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.set_quick(steps=2, seeds=[0])
    return parser


def measure(arguments: argparse.Namespace) -> Mapping[str, Any]:
    print("a message of the cluster")
    return {"steps": arguments.steps}


@pytest.mark.parametrize(
    ("words", "steps", "seeds"),
    [
        ([], 20, [0, 1]),
        (["--quick"], 2, [0]),
        (["--quick", "--steps", "5"], 5, [0]),
        (["--steps", "5", "--quick"], 5, [0]),
    ],
)
def test_quick_sets_defaults_and_options_override_them(
    words: list[str], steps: int, seeds: list[int]
):
    parsed = make_parser().parse(words)
    assert (parsed.steps, parsed.seeds) == (steps, seeds)


def test_standard_output_is_one_json_object(capsys: pytest.CaptureFixture[str]):
    run_benchmark(make_parser(), measure, ["--json"])
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"steps": 20} and captured.out.count("\n") == 1
    assert captured.err == "a message of the cluster\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BenchmarkError("a flow: not done\ntraceback"), 1, "sample: a flow: not done\n"),
        (ConfigError("steps=0: too few"), 2, "sample: steps=0: too few (see sample --help)\n"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
):
    def fail(arguments: argparse.Namespace) -> Mapping[str, Any]:
        raise error

    with pytest.raises(SystemExit) as exit_info:
        run_benchmark(make_parser(), fail, [])
    captured = capsys.readouterr()
    assert (exit_info.value.code, captured.err, captured.out) == (code, line, "")


@pytest.mark.parametrize(
    ("words", "timeout_s", "rule"),
    [
        (["sh", "-c", "sleep 60 & sleep 60"], 0.2, "a command: not done after 0.2 s"),
        (["sh", "-c", "echo why >&2; exit 3"], 30.0, "a command: why"),
        (["no-such-command"], 30.0, "a command: .*No such file"),
    ],
)
def test_a_command_that_fails_or_hangs_is_an_error(words: list[str], timeout_s: float, rule: str):
    started = time.monotonic()
    with pytest.raises(BenchmarkError, match=rule):
        run_command(words, "a command", timeout_s=timeout_s)
    assert time.monotonic() - started < 30  # children of its own do not keep it open


class Worker:
    """An actor that answers, hangs, or ends its process."""

    async def answer(self, value: int) -> int:
        return value

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        os._exit(1)


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("local_ray")
def test_a_wait_for_actors_ends_with_the_first_that_fails():
    healthy, dying = start_actor(Worker), start_actor(Worker)
    answers = [healthy.answer.remote(n) for n in (1, 2)]
    hanging = healthy.hang.remote()
    assert wait_for_all(answers, "answers", timeout_s=60, beside=[hanging]) == [1, 2]
    with pytest.raises(BenchmarkError, match=r"a hang: not done after 0\.1 s"):
        wait_for_all([hanging], "a hang", timeout_s=0.1)
    with pytest.raises(ActorLostError, match="the flow: the actor died"):
        wait_for_all([hanging], "the flow", timeout_s=60, beside=[dying.die.remote()])
