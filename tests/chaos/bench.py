"""Run chaos scenarios on a toy task: real runs, a real kill -9, and an audit of the result."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.buffer.run_log import (
    LedgerCounts,
    audit_run_log,
    read_history,
    read_log,
    recover_run_log,
)
from streamrl.config.preflight import prepare_run
from streamrl.config.run_config import load_config
from streamrl.messages import parse_uid
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from tests.chaos.scenarios import HOST, TRANSPORT, Scenario
from tests.e2e.launched import Launched, events, rows
from tests.toy import write_toy

INJECT = Path(__file__).with_name("inject")
STEPS, GROUPS_PER_STEP = 6, 4
ROWS = 10
"""Rows of the data set; few, so that a run has more than two epochs."""
DETERMINISTIC_METRICS = (
    "reward/mean",
    "reward/std",
    "loss/policy",
    "policy/grad_norm",
    "policy/ratio_mean",
)
"""Step metrics determined by micro-batches, their order and the weights."""
HEALING_LIMIT_S = 100.0
"""Limit of a step in which an actor restarts, s; three times an engine's start."""
MAX_KIND_CHARS = 100
"""Longest part of a baseline's name that tells its settings."""
REWARD = """
def score(prompt, completion):
    return sum(map(ord, completion)) % 7 / 7
"""


@dataclass(frozen=True)
class TrainedRun:
    """Finished run: uids of each step, from the run log, and metrics."""

    steps: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, run_dir: Path) -> "TrainedRun":
        return cls(list(_read_steps(run_dir)), rows(run_dir))

    @property
    def by_epoch(self) -> dict[int, set[int]]:
        return group_by_epoch([uid for step in self.steps for uid in step])


def group_by_epoch(uids: Sequence[str]) -> dict[int, set[int]]:
    """Collect row indices of the data set by epoch."""
    epochs: dict[int, set[int]] = {}
    for uid in uids:
        epoch, index, _ = parse_uid(uid)
        epochs.setdefault(epoch, set()).add(index)
    return epochs


@dataclass(frozen=True)
class ScenarioResult:
    """Result of a scenario, with problems if it failed."""

    scenario: Scenario
    seconds: float
    problems: Sequence[str]


class Bench:
    """Folder with a toy task and its runs; scenarios with equal settings share a baseline run."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_toy(folder)
        lines = (folder / "rows.jsonl").read_text().splitlines()[:ROWS]
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "reward.py").write_text(REWARD)
        self._baseline: dict[str, TrainedRun] = {}

    def get_baseline(self, settings: Mapping[str, Any]) -> TrainedRun:
        """Return a run with these settings and without a kill; the transport does not matter."""
        settings = {key: value for key, value in settings.items() if key != TRANSPORT}
        words = (f"{key.partition('.')[2]}-{value}" for key, value in settings.items())
        # A setting may be a path or a list.
        kind = re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-")[-MAX_KIND_CHARS:]
        if kind not in self._baseline:
            run_dir = self.get_run_dir(f"baseline-{kind}")
            shutil.rmtree(run_dir, ignore_errors=True)
            run = Launched(self._make_arguments(run_dir.name, settings), self.folder)
            problems = [*_check_end(run, code=0), *audit_run(run_dir, settings)]
            assert not problems, "\n".join(problems)
            self._baseline[kind] = TrainedRun.read(run_dir)
        return self._baseline[kind]

    def get_run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def _make_arguments(self, name: str, settings: Mapping[str, Any]) -> list[str]:
        settings = {
            "run.dir": self.folder / "runs",
            "run.name": name,
            "run.steps": STEPS,
            "pipeline.groups_per_step": GROUPS_PER_STEP,
            "checkpoint.every": 2,
            "checkpoint.keep": 1,
            "evaluation.at_start": "false",
            "evaluation.at_end": "false",
            "rewards": f"[{{kind: function, path: {self.folder}/reward.py, function: score}}]",
            **settings,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        return ["train", str(self.folder / "recipe.yaml"), *words]

    def run_scenario(self, scenario: Scenario, *, with_baseline: bool = True) -> ScenarioResult:
        """Run, kill, resume unless the run heals, and audit.

        Compare the result with a baseline run or, without it, with the prompts of the seed.
        """
        baseline = self.get_baseline(scenario.settings) if with_baseline else None
        started = time.monotonic()
        problems = list(self._find_problems(scenario, baseline))
        return ScenarioResult(scenario, time.monotonic() - started, problems)

    def _find_problems(self, scenario: Scenario, baseline: TrainedRun | None) -> Iterator[str]:
        name = scenario.name.replace(":", "-")
        run_dir, marker = self.get_run_dir(name), self.folder / f"{name}.killed"
        shutil.rmtree(run_dir, ignore_errors=True)
        marker.unlink(missing_ok=True)
        env = self._make_env(scenario.plan(run_dir, marker))
        run = Launched(self._make_arguments(name, scenario.settings), self.folder, env)
        exit_code = 0 if scenario.heals else 1
        problems, before = list(_check_end(run, code=exit_code)), rows(run_dir)
        if not marker.exists():
            yield from ["no process was killed: the fault point was not hit", *problems]
            return
        if scenario.heals:
            problems, before = problems + list(_check_healing(run_dir, scenario)), []
        else:
            problems += _check_last_line(run, scenario)
            again = Launched(["train", "--resume", str(run_dir)], self.folder, env)
            problems += _check_end(again, code=0)
        if not problems:
            problems += compare_metrics(before, rows(run_dir), "before the crash")
            problems += audit_run(run_dir, scenario.settings)
            problems += self._compare_trained(TrainedRun.read(run_dir), baseline, scenario)
        yield from problems

    def _compare_trained(
        self, result: TrainedRun, baseline: TrainedRun | None, scenario: Scenario
    ) -> Iterator[str]:
        """Compare prompts, and for on-policy runs also steps and metrics."""
        if baseline is None:
            words = self._make_arguments("prompts", {})[2:]
            prompts = prepare_run(load_config(self.folder / "recipe.yaml", words)).prompts
            drawn = prompts.draw_prompts(STEPS * GROUPS_PER_STEP)
            expected = group_by_epoch([prompt.uid for prompt in drawn])
        else:
            expected = baseline.by_epoch
        if result.by_epoch != expected:
            yield f"trained {result.by_epoch}, without the crash {expected}"
        if baseline is not None and scenario.is_on_policy:
            if [set(step) for step in result.steps] != [set(step) for step in baseline.steps]:
                yield f"steps of {result.steps}, without the crash {baseline.steps}"
            yield from compare_metrics(
                baseline.rows, result.rows, "without the crash", tolerance=1e-4
            )

    @staticmethod
    def _make_env(plan: Mapping[str, Any]) -> dict[str, str]:
        paths = [str(INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), "STREAMRL_CHAOS": json.dumps(plan)}


def _check_end(run: Launched, *, code: int) -> Iterator[str]:
    """Check that the run ends with this exit code, without traceback or orphans."""
    try:
        exit_code = run.wait()
    except AssertionError as error:
        yield str(error)
        return
    if exit_code != code:
        yield f"exit code {exit_code}, expected {code}:\n{run.output}"
    if "Traceback" in run.output or "(raylet)" in run.output:
        yield f"a traceback or a message from Ray:\n{run.output}"
    if orphans := run.orphans():
        yield f"still alive: {orphans}"


def _check_last_line(run: Launched, scenario: Scenario) -> Iterator[str]:
    """Check that the driver names the dead actor."""
    last = run.output.strip().splitlines()[-1]
    if not (last.startswith("streamrl: ") and scenario.actor in last and "died" in last):
        yield f"the last line does not say that {scenario.actor} died: {last}"


def _check_healing(run_dir: Path, scenario: Scenario) -> Iterator[str]:
    """Check that only this actor, or no actor, died, and that it restarted in time."""
    slowest_s = max((row["time/step_s"] for row in rows(run_dir)), default=0.0)
    if slowest_s > HEALING_LIMIT_S:
        yield f"a step took {slowest_s:.0f} s"
    for name in ("died", "restarted"):
        actors = [event["actor"] for event in events(run_dir, name)]
        expected = [] if scenario.role == HOST else [scenario.actor]
        if actors != expected:
            yield f"events {name}: {actors}, expected {expected}"


def _read_steps(run_dir: Path) -> Iterator[list[str]]:
    for record in read_log(get_journal_dir(run_dir, RUN_LOG_FOLDER)):
        if record.meta["kind"] == "step":
            yield list(record.meta["uids"])


def audit_run(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """Check the run log and the metrics of a finished run, killed or not."""
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    account, num_groups = audit_run_log(read_history(folder)), STEPS * GROUPS_PER_STEP
    yield from account.problems
    if account.counts != LedgerCounts(num_groups, num_groups, 0, 0, 0, ()):
        yield f"prompts in the run log: {account.counts}"
    recovered = recover_run_log(read_log(folder), None)
    if [*recovered.steps_to_replay] != [*range(STEPS)] or account.num_steps != STEPS:
        yield f"steps in the run log: {account.num_steps}, {[*recovered.steps_to_replay]}"
    if recovered.ledger.counts != account.counts:
        yield f"the ledger: {recovered.ledger.counts}"
    for version, step in recovered.steps_to_replay.items():
        oldest = min(group.info.min_version for group in step.groups)
        if version - oldest > settings["pipeline.max_staleness"]:
            yield f"step {version} trained tokens of version {oldest}"
    yield from _audit_metrics(rows(run_dir))


def _audit_metrics(metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    steps = [row["step"] for row in metrics]
    if steps != list(range(1, STEPS + 1)):
        yield f"steps in metrics.jsonl: {steps}"
    trained = [row["ledger/trained"] for row in metrics]
    # A step repeated after resume counts later steps too, since they are in the run log already.
    early = [r["step"] for r in metrics if r["ledger/trained"] < GROUPS_PER_STEP * r["step"]]
    if early or trained != sorted(trained):
        yield f"ledger/trained in metrics.jsonl: {trained}"


Rows = Sequence[Mapping[str, Any]]


def compare_metrics(
    before: Rows, after: Rows, when: str, *, tolerance: float = 1e-6
) -> Iterator[str]:
    """Compare metrics of equal steps; `when` describes the run of `before`."""
    after_by_step = {row["step"]: row for row in after}
    for row in before:
        row_after = after_by_step.get(row["step"], {})
        for name in DETERMINISTIC_METRICS:
            x, y = row[name], row_after.get(name)
            if y is None or abs(x - y) > tolerance * max(1.0, abs(x)):
                yield f"step {row['step']}: {name} is {y}, {when} {x}"
