"""Trace of a finished run as plain data: steps, spans of each process, and generated groups.

Sources in the run directory: config.yaml, metrics.jsonl, events.jsonl, trace.json and the run log.
A span of a generator is that of a whole group. In a run with an environment it is that of a turn;
turns are not read.
"""

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from streamrl.buffer.journal import JournalRecord, list_segments
from streamrl.buffer.run_log import TrainedGroup, TrainedStep, read_log
from streamrl.config.role_counts import with_placement_mode
from streamrl.config.run_config import RunConfig, load_config
from streamrl.dataflow import GENERATE_CALL
from streamrl.errors import ConfigError, JournalError
from streamrl.files.bounded_read import iter_jsonl
from streamrl.planner.problem.workload import EmpiricalLengths
from streamrl.planner.to_planner_problem import check_generates
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.telemetry.chrome_trace import TRACE_FILE, read_spans
from streamrl.telemetry.sinks import EVENTS_FILE, METRICS_FILE
from streamrl.telemetry.spans import Span


@dataclass(frozen=True)
class GeneratedGroup:
    """A group of a finished run: when it was sampled, and the tokens.

    intervals: start and end of sampling; several if sampling was paused.
    prompt_tokens: tokens before the first sampled token.
    lengths: sampled tokens of each rollout.
    admitted_s: time of admission.
    """

    process: str
    stage: str
    intervals: tuple[tuple[float, float], ...]
    prompt_tokens: int
    lengths: tuple[int, ...]
    admitted_s: float

    @property
    def start_s(self) -> float:
        return self.intervals[0][0]

    @property
    def end_s(self) -> float:
        return self.intervals[-1][1]


def collect_groups(
    spans: Sequence[Span], admitted: Mapping[str, float], *, since: float
) -> list[GeneratedGroup]:
    """Return the completely sampled groups that begin at `since` or later, by begin.

    admitted: times of admission by uid.
    Sampling that is paused has several spans, of which only the last has lengths.
    """
    intervals: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    groups = []
    for span in sorted(spans, key=lambda span: span.end_s):
        if not {"uid", "prompt"} <= span.args.keys():
            continue
        uid = str(span.args["uid"])
        key = (span.process, span.name, uid)
        intervals[key].append((span.start_s, span.end_s))
        if not span.args.get("lengths"):
            continue
        sampled = tuple(intervals.pop(key))
        if sampled[0][0] >= since:
            lengths = tuple(int(tokens) for tokens in str(span.args["lengths"]).split())
            prompt, admitted_s = int(span.args["prompt"]), admitted.get(uid, sampled[0][0])
            groups.append(
                GeneratedGroup(span.process, span.name, sampled, prompt, lengths, admitted_s)
            )
    return sorted(groups, key=lambda group: group.start_s)


ENGINE_WARM_UP_STEPS = 2
"""Number of steps in which engines still warm up, after the stream has filled."""
MAX_LOGGED_STEPS = 2000
"""Steps of a long run that are analyzed, the last ones."""
MIN_STEPS = 6
"""Minimum number of steady steps of a run for a reliable fit."""


@dataclass(frozen=True)
class MeasuredStep:
    """A training step of a run: start and end (seconds since the epoch), groups, metrics row."""

    version: int
    start_s: float
    end_s: float
    groups: tuple[TrainedGroup, ...]
    row: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RunTrace:
    """Steps, spans and groups of a finished run.

    cores: CPU cores of the run's machine; 0 if the run used GPUs or several nodes.
    steps: steady steps only; `excluded_steps` counts all others by reason.
    spans: of the whole run, by time.
    generated_groups: groups that begin after the start of the first of `steps`; none in a run with
        an environment.
    """

    run_dir: Path
    config: RunConfig
    cores: int
    steps: Sequence[MeasuredStep]
    excluded_steps: Mapping[str, int]
    spans: Sequence[Span]
    generated_groups: Sequence[GeneratedGroup]

    @cached_property
    def spans_by_process(self) -> Mapping[str, Sequence[Span]]:
        """Spans by process name, of those that end after the start of the first steady step."""
        spans_by_process = defaultdict(list)
        for span in self.spans:
            if span.end_s >= self.steps[0].start_s:
                spans_by_process[span.process].append(span)
        return spans_by_process

    @cached_property
    def lengths(self) -> EmpiricalLengths:
        return EmpiricalLengths.from_samples(
            [tokens for group in self._trained_groups for tokens in group.lengths]
        )

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return statistics.fmean(group.prompt_tokens for group in self._trained_groups)

    @property
    def _trained_groups(self) -> Sequence[GeneratedGroup]:
        groups = [group for group in self.generated_groups if group.stage == GENERATE_CALL.stage]
        if not groups:
            raise ConfigError(
                f"{self.run_dir}: {TRACE_FILE} has no sampled groups with lengths: the run has an"
                " environment, or the file is truncated or of an older version"
            )
        return groups

    @property
    def mean_step_s(self) -> float:
        return statistics.fmean(step.step_s for step in self.steps)

    @property
    def staleness_mean(self) -> float:
        weights = [sum(group.info.num_loss_tokens for group in s.groups) for s in self.steps]
        values = [float(step.row["staleness/mean"]) for step in self.steps]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    @property
    def idle_fractions(self) -> dict[str, float]:
        total_s = sum(step.step_s for step in self.steps)
        return {
            call.stage: sum(s.row[f"idle/{call.stage}"] * s.step_s for s in self.steps) / total_s
            for call in self.config.dataflow.ordered_calls
        }

    @property
    def filtered_fraction(self) -> float:
        first, last = (step.row for step in (self.steps[0], self.steps[-1]))
        filtered, trained = (
            float(last[f"ledger/{name}"]) - float(first[f"ledger/{name}"])
            for name in ("filtered", "trained")
        )
        return filtered / (filtered + trained) if filtered > 0 else 0.0


def load_run_trace(run_dir: Path) -> RunTrace:
    """Load the trace of the run in a directory.

    Raises ConfigError, in one line, if the run is too short or incomplete.
    """
    config = load_config(check_run_dir(run_dir), skips_dry_run=True)
    check_generates(config)
    if not os.path.isfile(run_dir / METRICS_FILE):
        raise ConfigError(f"{run_dir}: has no {METRICS_FILE}")
    # The trace of a long run holds its end only; no earlier row, step or admission is kept.
    spans = _read_run_spans(run_dir)
    run_log = _read_run_log(run_dir, since_s=spans[0].start_s)
    rows = _read_rows(run_dir / METRICS_FILE, run_log.trained_steps.keys())
    steps, excluded = _select_steady_steps(config, run_log, rows, spans)
    if len(steps) < MIN_STEPS:
        reasons = ", ".join(f"{count} {why}" for why, count in excluded.items() if count)
        raise ConfigError(
            f"{run_dir}: too short: {len(steps)} steady steps, must be at least {MIN_STEPS}"
            + (f"; left out: {reasons}" if reasons else "")
        )
    _check_rows(config, steps, run_dir / METRICS_FILE)
    groups = collect_groups(spans, run_log.admissions, since=steps[0].start_s)
    machine_event = _read_machine_event(run_dir)
    has_one_cpu_machine = not machine_event["on_gpu"] and machine_event["nodes"] == 1
    cores = int(machine_event["cores"]) if has_one_cpu_machine else 0
    placed_config = with_placement_mode(config, machine_event["placement"])
    return RunTrace(run_dir, placed_config, cores, steps, excluded, spans, groups)


def _read_rows(path: Path, versions: Collection[int]) -> dict[int, Mapping[str, Any]]:
    """Return the rows of metrics.jsonl by step, of the steps that trained these versions.

    Raises ConfigError for a row without step or step time.
    """
    rows: dict[int, Mapping[str, Any]] = {}
    for number, row in enumerate(iter_jsonl(path), start=1):
        for name in ("step", "time/step_s"):
            _check_number(row, name, f"{path}:{number}")
        if int(row["step"]) - 1 in versions:
            rows[int(row["step"])] = row
    return rows


def _check_rows(config: RunConfig, steps: Sequence[MeasuredStep], path: Path) -> None:
    names = ["staleness/mean", "ledger/filtered", "ledger/trained"]
    names += [f"idle/{call.stage}" for call in config.dataflow.ordered_calls]
    for step in steps:
        for name in names:
            _check_number(step.row, name, f"{path}: step {step.version + 1}")


def _check_number(row: Any, name: str, location: str) -> None:
    value = row.get(name) if isinstance(row, Mapping) else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{location}: has no {name}, a number")


def _read_run_spans(run_dir: Path) -> list[Span]:
    """Return the spans in the run's trace, ordered by start.

    Raises ConfigError if the file is no trace or has no spans.
    """
    try:
        spans = read_spans(run_dir / TRACE_FILE)
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run_dir}: {TRACE_FILE} is not the trace of a run: {error!r}") from None
    if not spans:
        raise ConfigError(f"{run_dir}: {TRACE_FILE} has no spans: no step yet")
    return sorted(spans, key=lambda span: (span.start_s, span.end_s))


def _read_machine_event(run_dir: Path) -> Mapping[str, Any]:
    latest: Mapping[str, Any] = {}
    for event in iter_jsonl(run_dir / EVENTS_FILE):
        latest = event if event.get("event") == "machine" else latest
    if missing := {"on_gpu", "nodes", "cores", "placement"} - latest.keys():
        raise ConfigError(f"{run_dir}: {EVENTS_FILE} has no machine with {min(missing)}")
    return latest


@dataclass
class _RunLogIndex:
    """Trained steps and admissions in a run log, without those that ended before `since_s`.

    trained_steps: by version, the step, the time of its record, and the number of steps since the
        last start of the run; the last MAX_LOGGED_STEPS.
    admissions: times by uid.
    left_out: number of earlier steps, by the number of steps since a start of the run, at most
        MAX_LOGGED_STEPS.
    """

    since_s: float
    trained_steps: dict[int, tuple[TrainedStep, float, int]] = field(default_factory=dict)
    admissions: dict[str, float] = field(default_factory=dict)
    left_out: Counter[int] = field(default_factory=Counter)
    _since_start: int = 0

    def add_record(self, record: JournalRecord) -> None:
        meta = record.meta
        match meta["kind"]:
            case "open":
                self._since_start = 0
            case "admit":
                self.admissions.update(dict.fromkeys(meta["uids"], float(meta["time"])))
            case "step":
                self._add_step(record)
            case "end" if float(meta["time"]) < self.since_s:
                self.admissions.pop(meta["uid"], None)

    def _add_step(self, record: JournalRecord) -> None:
        meta, steps = record.meta, self.trained_steps
        time_s, number = float(meta["time"]), self._since_start
        self._since_start += 1
        if time_s < self.since_s:
            for uid in meta["uids"]:
                self.admissions.pop(uid, None)
        else:
            steps[meta["version"]] = TrainedStep.from_record(record), time_s, number
            if len(steps) <= MAX_LOGGED_STEPS:
                return
            _, _, number = steps.pop(next(iter(steps)))
        self.left_out[min(number, MAX_LOGGED_STEPS)] += 1

    def iter_steps(
        self, rows: Mapping[int, Mapping[str, Any]]
    ) -> Iterator[tuple[MeasuredStep, int]]:
        """Yield each trained step with a metrics row, and its number since the last start."""
        for version, (step, end_s, since_start) in sorted(self.trained_steps.items()):
            row = rows.get(version + 1)
            if row is None:
                continue
            start_s = end_s - float(row["time/step_s"])
            yield MeasuredStep(version, start_s, end_s, step.groups, row), since_start


def _read_run_log(run_dir: Path, *, since_s: float) -> _RunLogIndex:
    """Read trained steps and admissions from the run log; leave out what ended before `since_s`.

    Raises ConfigError if the log is missing or damaged.
    """
    index = _RunLogIndex(since_s)
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    if not list_segments(folder):
        raise ConfigError(f"{run_dir}: has no run log in {folder.relative_to(run_dir)}")
    try:
        for record in read_log(folder):
            index.add_record(record)
    except (OSError, JournalError) as error:
        raise ConfigError(f"{run_dir}: cannot read the run log: {error}") from None
    return index


def _select_steady_steps(
    config: RunConfig,
    run_log: _RunLogIndex,
    rows: Mapping[int, Mapping[str, Any]],
    spans: Sequence[Span],
) -> tuple[list[MeasuredStep], dict[str, int]]:
    """Return the steady steps of a run, and the number of excluded steps by reason."""
    lead, steady = config.pipeline.max_steps_ahead, []
    warm_up = max(lead + ENGINE_WARM_UP_STEPS, config.critic.warmup_alone)
    saves = [span for span in spans if span.name == "save"]
    reasons = (
        "to warm up",
        "after the last prompt",
        "evaluated or saved",
        "no longer in the trace",
    )
    excluded = dict.fromkeys(reasons, 0)
    for since_start, count in run_log.left_out.items():
        excluded["to warm up" if since_start < warm_up else "no longer in the trace"] += count
    was_evaluated, traced_s = False, spans[0].start_s
    for step, since_start in run_log.iter_steps(rows):
        is_disturbed = was_evaluated or any(
            save.start_s < step.end_s and step.start_s < save.end_s for save in saves
        )
        was_evaluated = any(name.startswith("eval/") for name in step.row)
        if since_start < warm_up:
            excluded["to warm up"] += 1
        elif step.version > config.run.steps - 1 - lead:
            excluded["after the last prompt"] += 1
        elif step.start_s < traced_s:
            excluded["no longer in the trace"] += 1
        elif is_disturbed:
            excluded["evaluated or saved"] += 1
        else:
            steady.append(step)
    return steady, excluded
