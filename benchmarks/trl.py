"""Comparison with TRL's GRPO: `python -m benchmarks.trl` prints one JSON object.

Two tasks; both systems use the same model directory, rows, reward, batch, token limit, learning
rate and number of steps, float32 on the CPU, no KL term:

demo: `configs/grpo_arithmetic.yaml`, 32 prompts x 8 rollouts of at most 12 tokens.
long_tailed: 32 x 8 rollouts of at most 256 tokens by a random model of 1 M parameters with 64
    tokens, one of which ends a rollout, so that lengths are geometric.

Each run is a process of its own. Runs alternate (streamrl, TRL, streamrl, TRL ...), so that a
change of the machine's speed affects both. TRL (`benchmarks/trl_peer.py`) generates with
transformers and computes with a thread per core; its vLLM mode needs a GPU or a server with a GPU.
TRL is on policy; streamrl's recipes have max_staleness 1 unless --max-staleness overrides it.

Per run, after WARM_UP_STEPS: step_s is the median; tokens_per_s counts sampled tokens; busy_cores
and cpu_step_s cover all processes of the run. start_s is from the command to the end of the first
step. Peak memory is the sum over the processes, as RSS (shared pages once per process) and as PSS
(once). Other programs of the machine: other_cores_before counts the cores that they kept busy in
the second before the run, other_cores those during it, load_before is the load average of a minute.
Results are medians over the rounds, ratios medians of the per-round ratios.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.command import (
    ROOT,
    BenchmarkError,
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
)
from benchmarks.core_meter import CoreMeter, read_machine_time
from benchmarks.process_tree import ProcessTree
from benchmarks.runs import QUIET, make_arithmetic
from streamrl.config.run_config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_jsonl
from streamrl.telemetry.sinks import METRICS_FILE

PARITY_PYTHON = ROOT / ".venv-parity" / "bin" / "python"
DEMO = ROOT / "configs" / "grpo_arithmetic.yaml"
STREAMRL, TRL = "streamrl", "trl"
STEPS = {"demo": 30, "long_tailed": 10}
"""Steps of each run, including the warm-up."""
WARM_UP_STEPS = 4
BEFORE_S = 1.0
"""Time for which the load of other programs is measured before a run."""

NUM_WORDS = 64
"""Vocabulary size of the long-tailed task's model: one token in NUM_WORDS ends a rollout."""
PROMPT_TOKENS = 8
NUM_ROWS = 512
LONG_TAILED: dict[str, Any] = {
    "algorithm": {"name": "grpo", "group_size": 8},
    "pipeline": {"groups_per_step": 32, "max_staleness": 1, "micro_batch_tokens": 4096},
    "generator": {"max_new_tokens": 256, "max_concurrent_rollouts": 512, "kv_cache_mb": 256},
    "rewards": [{"kind": "exact", "pattern": r"(\d)$"}],
    # Small enough to leave the lengths unchanged.
    "trainer": {"lr": 1e-7},
}
QUICK = {
    "long_tailed": [
        "pipeline.groups_per_step=4",
        "algorithm.group_size=4",
        "generator.max_new_tokens=32",
    ]
}

Figures = dict[str, float]


class RunError(BenchmarkError):
    """Failure or timeout of a run."""


@dataclass(frozen=True)
class TrainingTask:
    """Recipe with overrides, for both systems; `rows` as JSONL for TRL."""

    recipe: Path
    overrides: Sequence[str]
    rows: Path

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The resolved config."""
        return load_config(self.recipe, [*QUIET, *self.overrides, *overrides])


@dataclass(frozen=True)
class PeerSpec:
    """Contents of the JSON file for `benchmarks.trl_peer`."""

    model: str
    rows: str
    folder: str
    steps_file: str
    steps: int
    groups: int
    group_size: int
    max_new_tokens: int
    temperature: float
    lr: float
    grad_clip: float
    pattern: str
    seed: int


@dataclass(frozen=True)
class Step:
    """Reported step: time (epoch seconds), duration, sampled tokens, mean reward."""

    time: float
    seconds: float
    tokens: float
    reward: float


@dataclass(frozen=True)
class Launch:
    """Training command, and a function that reads the steps so far."""

    command: Sequence[str]
    read: Callable[[], list[Step]]


@dataclass(frozen=True)
class RunLength:
    """Number of steps; the first `warm_up` do not count."""

    steps: int
    warm_up: int


def main(argv: Sequence[str] | None = None) -> None:
    """Make all runs and print the results."""
    run_benchmark(make_parser(), measure, argv)


def make_parser() -> BenchmarkParser:
    """Declare tasks, rounds and lengths."""
    parser = BenchmarkParser("trl", __doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--rounds", type=at_least(1), default=2, help="runs of each system (2)")
    parser.add_argument(
        "--steps", type=at_least(1), help="steps of each run (demo 30, long_tailed 10)"
    )
    parser.add_argument(
        "--warm-up", type=at_least(1), default=WARM_UP_STEPS, help="steps that do not count (4)"
    )
    parser.add_argument(
        "--max-staleness", type=at_least(0), help="max_staleness of streamrl (1, as in the recipes)"
    )
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="timeout of each run, s (600)"
    )
    parser.add_argument("--python", type=Path, default=PARITY_PYTHON, help="TRL's Python")
    parser.set_quick(tasks=["demo"], rounds=1, steps=3, warm_up=1)
    return parser


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of each task. Raises ConfigError and RunError."""
    least = arguments.warm_up + 2
    if not 0 < arguments.deadline < math.inf:
        raise ConfigError(f"--deadline={arguments.deadline:g}: must be above 0, and finite")
    if arguments.steps is not None and arguments.steps < least:
        raise ConfigError(
            f"--steps={arguments.steps}: must be at least {least}, 2 behind --warm-up"
        )
    if not arguments.python.is_file():
        raise ConfigError(f"{arguments.python} is missing: `make parity-env` builds it")
    with tempfile.TemporaryDirectory() as folder:
        results = {
            name: measure_task(Path(folder) / name, name, arguments) for name in arguments.tasks
        }
    return {"cores": os.cpu_count(), **results}


def measure_task(folder: Path, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of both systems on one task, and the ratios."""
    folder.mkdir()
    task = TASKS[name](folder, QUICK.get(name, []) if arguments.quick else [])
    if arguments.max_staleness is not None:
        bound = f"pipeline.max_staleness={arguments.max_staleness}"
        task = replace(task, overrides=[*task.overrides, bound])
    length = RunLength(arguments.steps or STEPS[name], arguments.warm_up)
    systems: Mapping[str, Callable[[TrainingTask, int, Path], Launch]] = {
        STREAMRL: launch_streamrl,
        TRL: partial(launch_trl, python=arguments.python),
    }
    rounds: list[dict[str, Figures]] = []
    for i in range(arguments.rounds):
        figures = {}
        for system, launch in systems.items():
            report_progress(f"{name}, round {i + 1}: {system}")
            own = folder / f"{system}-{i}"
            own.mkdir()
            command = launch(task, length.steps, own)
            try:
                figures[system] = run_launch(
                    command, own, length=length, deadline_s=arguments.deadline
                )
            except RunError as error:
                raise RunError(f"{name}: {system}: {error}") from None
        rounds.append(figures)
    return {
        "steps": length.steps - length.warm_up,
        "rounds": len(rounds),
        **{system: compute_medians([one[system] for one in rounds]) for system in systems},
        "ratios": compute_medians([compute_ratios(one[STREAMRL], one[TRL]) for one in rounds]),
    }


def make_demo(folder: Path, overrides: Sequence[str]) -> TrainingTask:
    """Return the demo's task; make its base model if missing."""
    make_arithmetic()
    return TrainingTask(DEMO, overrides, ROOT / "examples" / "arithmetic" / "build" / "train.jsonl")


def make_long_tailed(folder: Path, overrides: Sequence[str]) -> TrainingTask:
    """Return a random model, prompts of random words, and a reward of 1 for one rollout in ten."""
    import numpy as np

    from benchmarks.random_model import write_model

    model = write_model(1, folder / "model", num_words=NUM_WORDS, max_length=512)
    words = np.random.default_rng(0).integers(4, NUM_WORDS, (NUM_ROWS, PROMPT_TOKENS))
    rows = [
        {"prompt": " ".join(f"t{i}" for i in row), "reward_model": {"ground_truth": "7"}}
        for row in words
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump({"model": {"path": model}, "data": {"train": str(path)}, **LONG_TAILED})
    )
    return TrainingTask(recipe, overrides, path)


TASKS: Mapping[str, Callable[[Path, Sequence[str]], TrainingTask]] = {
    "demo": make_demo,
    "long_tailed": make_long_tailed,
}


def launch_streamrl(task: TrainingTask, steps: int, folder: Path) -> Launch:
    """Return the launch of `streamrl train` on the task, with its run directory in `folder`."""
    own = [f"run.dir={folder}", "run.name=run", f"run.steps={steps}"]
    config = task.config(own)
    rollouts = config.pipeline.groups_per_step * config.algorithm.group_size

    def read() -> list[Step]:
        return [
            Step(
                row["time"],
                row["time/step_s"],
                row["rollout/length_mean"] * rollouts,
                row["reward/mean"],
            )
            for row in read_jsonl(config.run_dir / METRICS_FILE)
        ]

    words = [str(task.recipe), *QUIET, *task.overrides, *own]
    return Launch([sys.executable, "-m", "streamrl.cli", "train", *words], read)


def launch_trl(task: TrainingTask, steps: int, folder: Path, *, python: Path) -> Launch:
    """Return the launch of `benchmarks.trl_peer` on the task."""
    spec = make_peer_spec(task, steps, folder)
    path = folder / "spec.json"
    path.write_text(json.dumps(asdict(spec)))

    def read() -> list[Step]:
        return [
            Step(row["time"], row["seconds"], row["tokens"], row["reward"])
            for row in read_jsonl(Path(spec.steps_file))
        ]

    return Launch([str(python), "-m", "benchmarks.trl_peer", str(path)], read)


def make_peer_spec(task: TrainingTask, steps: int, folder: Path) -> PeerSpec:
    """Convert the task for TRL; every number comes from streamrl's own settings."""
    config = task.config()
    return PeerSpec(
        model=config.model.path,
        rows=str(task.rows),
        folder=str(folder / "trl"),
        steps_file=str(folder / "steps.jsonl"),
        steps=steps,
        groups=config.pipeline.groups_per_step,
        group_size=config.algorithm.group_size,
        max_new_tokens=config.generator.max_new_tokens,
        temperature=config.generator.temperature,
        lr=config.trainer.lr,
        grad_clip=config.trainer.grad_clip,
        pattern=config.rewards[0].options["pattern"],
        seed=config.run.seed,
    )


def run_launch(launch: Launch, folder: Path, *, length: RunLength, deadline_s: float) -> Figures:
    """Run a command and return its results. Raises RunError."""
    log = folder / "log.txt"
    # Each system sets its own threads: TRL uses all cores.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    meter = CoreMeter()
    meter.measure_cores(read_machine_time(), time.time())
    time.sleep(BEFORE_S)
    started = time.time()
    others = {
        "load_before": os.getloadavg()[0],
        "other_cores_before": meter.measure_cores(read_machine_time(), started),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            launch.command,
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    with ProcessTree(process.pid) as tree:
        try:
            code = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"made {len(launch.read())} of {length.steps} steps in"
                f" --deadline={deadline_s:g} s; last line: {read_last_line(log)}"
            ) from None
        finally:
            if process.poll() is None:
                tree.kill()
                process.wait()
    ended = time.time()
    machine_cores = meter.measure_cores(read_machine_time(), ended)
    others["other_cores"] = max(0.0, machine_cores - tree.cpu_s(started, ended) / (ended - started))
    if code:
        raise RunError(f"exit code {code}: {read_last_line(log)}")
    steps = launch.read()
    if len(steps) != length.steps:
        raise RunError(
            f"made {len(steps)} of {length.steps} steps; last line: {read_last_line(log)}"
        )
    return {**summarize_steps(started, steps, length.warm_up, tree), **others}


def read_last_line(log: Path) -> str:
    """Return the last line of a log, shortened."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "(nothing)"


def summarize_steps(
    started: float, steps: Sequence[Step], warm_up: int, tree: ProcessTree
) -> Figures:
    """Return the results of the steps after the first `warm_up`."""
    counted = steps[warm_up:]
    seconds = [step.seconds for step in counted]
    start, end = steps[warm_up - 1].time, steps[-1].time
    cpu_s = tree.cpu_s(start, end)
    return {
        "step_s": statistics.median(seconds),
        "step_s_mean": statistics.fmean(seconds),
        "tokens_per_s": sum(step.tokens for step in counted) / sum(seconds),
        "tokens_per_step": statistics.fmean(step.tokens for step in counted),
        "reward": statistics.fmean(step.reward for step in counted),
        "start_s": steps[0].time - started,
        "busy_cores": cpu_s / (end - start),
        "cpu_step_s": cpu_s / len(counted),
        "peak_rss_mb": tree.usage.rss_mb,
        "peak_pss_mb": tree.usage.pss_mb,
    }


def compute_medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each result over the rounds."""
    return {name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]}


def compute_ratios(ours: Figures, peer: Figures) -> Figures:
    """Return ours over the peer's; below 1 is better, except for tokens_per_s."""
    names = ("step_s", "step_s_mean", "tokens_per_s", "start_s", "cpu_step_s")
    return {
        name: ours[name] / peer[name]
        for name in (*names, "peak_rss_mb", "peak_pss_mb")
        if peer[name]
    }


if __name__ == "__main__":
    main()
