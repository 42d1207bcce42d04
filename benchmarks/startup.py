"""Time to the first step: `python -m benchmarks.startup` prints one JSON object.

- start: seconds from `streamrl train` on the demo's recipe to its first metrics row, and CPU
  seconds by kind of process until then.
- plain_start: the same with workers that import their libraries themselves, as Ray starts them,
  instead of being forked.
- restart: seconds from kill -9 of the generator to its return.
- limit: a bare process that imports vLLM and builds the demo's engine, the longest chain of a
  start.
- commands: seconds of commands that only read files.

Results are medians over the repeats.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks.command import (
    ROOT,
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
    run_command,
)
from benchmarks.runs import RECIPE, make_arithmetic
from streamrl.actors.launch.fork_server import FORK_VARIABLE, SERVER_CODE

MARK = "STREAMRL_STARTUP_BENCHMARK"
DEADLINE_S = 180.0
POLL_S = 0.02
SCAN_S = 1.0
"""Interval between scans of all processes, which take CPU time themselves."""
PLAIN = {FORK_VARIABLE: "0"}
REPORTED_STEPS = 12
"""Minimum number of steps for `streamrl report`."""
COMMANDS = {"plan --help": ["plan", "--help"], "report": ["report"], "doctor": ["doctor"]}
BARE_ENGINE = """
import os, sys
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.engines.generator_config import GeneratorConfig
os.environ.update(make_vllm_env("cpu"))
from streamrl.engines.vllm.engine import build_vllm_engine
from streamrl.engines.vllm.requests import EngineSpec
config = GeneratorConfig(max_new_tokens=12, max_concurrent_rollouts=512)
build_vllm_engine(EngineSpec(sys.argv[1], config, 64))
os._exit(0)
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Start the demo, kill its generator, and print the results."""
    run_benchmark(make_parser(), measure, argv)


def make_parser() -> BenchmarkParser:
    """Declare the number of repeats."""
    parser = BenchmarkParser("startup", __doc__)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.set_quick(repeats=1)
    return parser


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return medians of all results; measured in turn, round by round."""
    make_arithmetic()
    starts, plain, restarts, limits, processors = [], [], [], [], []
    commands: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(arguments.repeats):
        report_progress(f"round {turn + 1} of {arguments.repeats}")
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "startup"
            with launch_demo(run_dir) as run:
                start_s, processor_s = run.wait_for_first_step()
                restart_s = run.kill_generator()
                run.wait_for_steps(REPORTED_STEPS)
            with launch_demo(run_dir.with_name("plain"), PLAIN) as run:
                plain.append(run.wait_for_first_step())
            starts.append(start_s)
            restarts.append(restart_s)
            processors.append(processor_s)
            for name, words in COMMANDS.items():
                words = [*words, str(run_dir)] if name == "report" else words
                commands[name].append(time_command("-m", "streamrl.cli", *words))
        model = ROOT / "examples" / "arithmetic" / "build" / "base_model"
        limits.append(time_command("-c", BARE_ENGINE, str(model)))
    kinds = sorted({kind for one in processors for kind in one})
    by_kind = {kind: round(statistics.median(one[kind] for one in processors), 2) for kind in kinds}
    start_s, limit_s = statistics.median(starts), statistics.median(limits)
    plain_s = statistics.median(seconds for seconds, _ in plain)
    return {
        "start_s": start_s,
        "plain_start_s": plain_s,
        "start_processor_s": round(sum(by_kind.values()), 2),
        "plain_start_processor_s": statistics.median(sum(one.values()) for _, one in plain),
        "processor_s_by_process": by_kind,
        "restart_s": statistics.median(restarts),
        "limit_s": limit_s,
        "start_over_plain": start_s / plain_s,
        "start_over_limit": start_s / limit_s,
        "commands_s": {name: statistics.median(seconds) for name, seconds in commands.items()},
    }


def time_command(*words: str) -> float:
    """Return the seconds of a Python process. Raises BenchmarkError if it fails."""
    started = time.perf_counter()
    run_command([sys.executable, *words], f"python {words[1]}", timeout_s=DEADLINE_S, cwd=ROOT)
    return time.perf_counter() - started


class DemoRun:
    """Run of the demo's recipe; an environment variable marks its processes."""

    def __init__(self, run_dir: Path, log: Path, env: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self._mark = uuid.uuid4().hex
        self._log = log
        self._started = time.perf_counter()
        words = [str(RECIPE), f"run.dir={run_dir.parent}", f"run.name={run_dir.name}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "streamrl.cli", "train", *words, "run.steps=100000"],
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, MARK: self._mark},
            cwd=ROOT,
            start_new_session=True,
        )

    def wait_for_first_step(self) -> tuple[float, dict[str, float]]:
        """Return the seconds to the first metrics row, and CPU seconds by kind of process."""
        metrics = self._run_dir / "metrics.jsonl"
        used: dict[int, tuple[str, float]] = {}
        scan_at = self._started + SCAN_S

        def scan() -> None:
            for process in self._processes():
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    used[process.pid] = get_process_kind(process), times.user + times.system

        def has_stepped() -> bool:
            nonlocal scan_at
            if time.perf_counter() > scan_at:
                scan()
                scan_at = time.perf_counter() + SCAN_S
            return metrics.exists() and metrics.stat().st_size > 0

        self._wait(has_stepped, "the first step")
        seconds = time.perf_counter() - self._started
        scan()
        processor_s: dict[str, float] = defaultdict(float)
        for kind, spent in used.values():
            processor_s[kind] += spent
        return seconds, processor_s

    def kill_generator(self) -> float:
        """Kill the generator; return the seconds until the run reports its return."""
        generators = [p for p in self._processes() if "GeneratorActor" in get_process_kind(p)]
        if len(generators) != 1:
            raise BenchmarkError(f"the run has {len(generators)} generators, not one")
        events = self._run_dir / "events.jsonl"
        started = time.perf_counter()
        generators[0].kill()
        self._wait(lambda: '"restarted"' in events.read_text(), "the generator's return")
        return time.perf_counter() - started

    def wait_for_steps(self, count: int) -> None:
        """Wait for this many metrics rows."""
        metrics = self._run_dir / "metrics.jsonl"
        self._wait(lambda: metrics.read_text().count("\n") >= count, f"{count} steps")

    def end(self) -> None:
        """Interrupt the run; kill remaining processes after half a minute."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30.0)
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _processes(self) -> list[psutil.Process]:
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    processes.append(process)
        return processes

    def _wait(self, condition: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if self._process.poll() is not None:
                *_, last = ["", *self._log.read_text().strip().splitlines()]
                raise BenchmarkError(f"{description}: the run ended early: {last}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{description}: not done after {DEADLINE_S:g} s")
            time.sleep(POLL_S)


def get_process_kind(process: psutil.Process) -> str:
    """Return the name of an actor's class, or of the program."""
    words = process.cmdline()
    if not words:
        return "ended"
    if words[0].startswith("ray::"):
        return words[0].partition("::")[2].partition(".")[0]
    if "streamrl.cli" in words:
        return "driver"
    if SERVER_CODE in words:
        return "fork server"
    is_python = Path(words[0]).name.startswith("python")
    script = next((word for word in words[1:] if not word.startswith("-")), words[0])
    return Path(script if is_python else words[0]).name


@contextlib.contextmanager
def launch_demo(run_dir: Path, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[DemoRun]:
    """Start the demo; stop its processes on exit."""
    run = DemoRun(run_dir, run_dir.parent / "output.txt", env)
    try:
        yield run
    finally:
        run.end()


if __name__ == "__main__":
    main()
