"""A run that was made, as plain data: its steps, what each process did, how long things were.

Read from its directory: config.yaml, metrics.jsonl, events.jsonl, trace.json and the books.
"""

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from streamrl.buffer.books.run_log import TrainedGroup, TrainedStep, read_log
from streamrl.buffer.log.segment_file import list_segments
from streamrl.calibration.lengths import GroupedLengths
from streamrl.config import RunConfig, load_config
from streamrl.config.role_counts import with_placement_mode
from streamrl.dataflow import GENERATE_CALL
from streamrl.errors import ConfigError, JournalError
from streamrl.placement import EmpiricalLengths
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from streamrl.telemetry.chrome_trace import TRACE_FILE, read_spans
from streamrl.telemetry.sinks import EVENTS_FILE, METRICS_FILE, read_jsonl
from streamrl.telemetry.spans import Span

ENGINE_WARM_UP_STEPS = 2
"""Steps in which engines still warm up, once the stream is full."""
MIN_CORES = 0.1
"""Others leave a run at least this of a machine's cores."""
CORE_METRICS = ("cpu/machine", "cpu/stages", "cpu/queue")
MIN_STEPS = 6
"""Fewer say nothing that can be relied on."""


@dataclass(frozen=True)
class MachineCores:
    """What a run was made on: `cores` of its one node, where all computes on them; 0 elsewhere.

    taken: how many of them others kept busy, who have nothing to do with the run; queue: how many
    its queue and its books did. Both are means.
    """

    cores: int
    taken: float = 0.0
    queue: float = 0.0

    @property
    def available_cores(self) -> float:
        """Cores that were there for the run."""
        return max(self.cores - self.taken, MIN_CORES) if self.cores else 0.0

    def with_metrics(self, rows: Sequence[Mapping[str, Any]]) -> "MachineCores":
        """With what steps say of its cores, where they do."""
        means = {name: _average_present([row.get(name) for row in rows]) for name in CORE_METRICS}
        if not self.cores or None in means.values():
            return self
        whole, stages, queue = (float(value or 0.0) for value in means.values())
        taken = max(0.0, whole - stages - queue)
        return replace(self, taken=taken, queue=queue)

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> "MachineCores":
        """As a run noted it."""
        return cls(0 if event["on_gpu"] or event["nodes"] > 1 else int(event["cores"]))


@dataclass(frozen=True)
class MeasuredStep:
    """A step: [start_s, end_s] of the epoch, what was trained, and its row of the metrics."""

    version: int
    start_s: float
    end_s: float
    groups: tuple[TrainedGroup, ...]
    row: Mapping[str, Any]

    @property
    def step_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class GeneratedGroup:
    """A group that was generated: when, in one piece or in several, and how long it became.

    lengths: tokens of each completion. admitted_s, admitted_version: when the books let its prompt
    in, and the oldest version it may be sampled from.
    """

    process: str
    stage: str
    uid: str
    intervals: tuple[tuple[float, float], ...]
    prompt_tokens: int
    lengths: tuple[int, ...]
    admitted_s: float
    admitted_version: int

    @property
    def start_s(self) -> float:
        """When it began."""
        return self.intervals[0][0]

    @property
    def end_s(self) -> float:
        """When it was done."""
        return self.intervals[-1][1]


@dataclass(frozen=True)
class RunTrace:
    """The steady part of a run.

    steps: without those that are no rule: `left_out` says why each of the others is. spans: of all
    the run, in order of time. sampled: groups that were generated from the first of the steps on.
    """

    run_dir: Path
    config: RunConfig
    machine: MachineCores
    steps: Sequence[MeasuredStep]
    excluded_steps: Mapping[str, int]
    spans: Sequence[Span]
    generated_groups: Sequence[GeneratedGroup]

    @cached_property
    def spans_by_process(self) -> Mapping[str, Sequence[Span]]:
        """The spans that end after the first of the steps has begun."""
        found = defaultdict(list)
        for span in self.spans:
            if span.end_s >= self.steps[0].start_s:
                found[span.process].append(span)
        return found

    @cached_property
    def lengths(self) -> EmpiricalLengths:
        """How many tokens the completions of the steps have."""
        return EmpiricalLengths.from_samples(
            [tokens for one in self._trained_groups for tokens in one.lengths]
        )

    @cached_property
    def grouped_lengths(self) -> GroupedLengths:
        """The same, those of one prompt together."""
        return GroupedLengths.from_groups(
            (one.uid, one.stage, one.lengths) for one in self.generated_groups
        )

    @cached_property
    def mean_prompt_tokens(self) -> float:
        """Mean of a prompt."""
        return statistics.fmean(one.prompt_tokens for one in self._trained_groups)

    @property
    def _trained_groups(self) -> Sequence[GeneratedGroup]:
        return [one for one in self.generated_groups if one.stage == GENERATE_CALL.stage]

    @property
    def median_step_s(self) -> float:
        """Median length of a step."""
        return statistics.median(step.step_s for step in self.steps)

    @property
    def mean_step_s(self) -> float:
        """Mean length of a step."""
        return statistics.fmean(step.step_s for step in self.steps)

    @property
    def staleness_mean(self) -> float:
        """Of a trained token, in versions."""
        return self._average_metric(
            "staleness/mean", lambda step: sum(g.info.num_loss_tokens for g in step)
        )

    @property
    def idle_fractions(self) -> dict[str, float]:
        """By stage, the part of the steps' time that its processes computed nothing."""
        seconds = [step.step_s for step in self.steps]
        return {
            call.stage: sum(
                step.row[f"idle/{call.stage}"] * own
                for step, own in zip(self.steps, seconds, strict=True)
            )
            / sum(seconds)
            for call in self.config.dataflow.ordered_calls
        }

    @property
    def filtered_fraction(self) -> float:
        """Of all groups that ended as they should, the part that was filtered."""
        first, last = (one.row for one in (self.steps[0], self.steps[-1]))
        filtered, trained = (
            float(last[f"ledger/{name}"]) - float(first[f"ledger/{name}"])
            for name in ("filtered", "trained")
        )
        return filtered / (filtered + trained) if filtered > 0 else 0.0

    @property
    def mean_group_s(self) -> float:
        """Mean time of a step for each of its groups."""
        return self.mean_step_s / statistics.fmean(len(step.groups) for step in self.steps)

    def _average_metric(
        self, name: str, weight: Callable[[Sequence[TrainedGroup]], float]
    ) -> float:
        weights = [weight(step.groups) for step in self.steps]
        values = [float(step.row[name]) for step in self.steps]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    def compute_median(self, name: str) -> float | None:
        """Of a metric, over the steps that have it."""
        found = [step.row[name] for step in self.steps if step.row.get(name) is not None]
        return statistics.median(found) if found else None


def load_run_trace(run_dir: Path) -> RunTrace:
    """What a run directory says. Raises ConfigError, in one line, for one that says too little."""
    place = str(run_dir)
    config = _load_run_config(run_dir, place)
    if not config.queue.journal.enabled:
        raise ConfigError(f"{place}: has no books: queue.journal.enabled=false")
    rows = _read_rows(run_dir / METRICS_FILE, place)
    spans = _read_run_spans(run_dir, place)
    books = _read_run_log(run_dir, place)
    steps, left_out = _select_steady_steps(config, list(books.iter_steps(rows)), spans)
    if len(steps) < MIN_STEPS:
        out = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        raise ConfigError(
            f"{place}: too short: {len(steps)} steps to go by, must be at least {MIN_STEPS}"
            + (f"; left out: {out}" if out else "")
        )
    _check_rows(config, steps, run_dir / METRICS_FILE)
    sampled = _collect_groups(spans, books.admissions, since=steps[0].start_s)
    if not sampled:
        raise ConfigError(
            f"{place}: {TRACE_FILE} has no generate spans with lengths: cut off, or made by an"
            " older streamrl"
        )
    noted = _read_machine_event(run_dir)
    machine = _make_machine_cores(noted).with_metrics([step.row for step in steps])
    there = with_placement_mode(config, noted.get("placement", config.placement.mode))
    return RunTrace(run_dir, there, machine, steps, left_out, spans, sampled)


def load_run_lengths(run_dir: Path) -> EmpiricalLengths:
    """How many tokens the completions of a run have, as `--lengths RUN` asks."""
    return load_run_trace(run_dir).lengths


def describe_missing_run(run_dir: Path) -> str:
    """Why what has no config.yaml is no run's directory."""
    if os.path.isdir(run_dir):
        return "holds no config.yaml"
    return "not a directory" if os.path.exists(run_dir) else "no such directory"


def _average_present(values: Sequence[float | None]) -> float | None:
    """Of those that are there; None where none is."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _load_run_config(run_dir: Path, place: str) -> RunConfig:
    path = run_dir / "config.yaml"
    if not os.path.isfile(path):
        raise ConfigError(f"{place}: no run: {describe_missing_run(run_dir)}")
    return load_config(path, is_rehearsed=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _read_rows(path: Path, place: str) -> dict[int, Mapping[str, Any]]:
    """Rows of the metrics by step, each with how long it took."""
    if not os.path.isfile(path):
        raise ConfigError(f"{place}: has no {path.name}")
    found: dict[int, Mapping[str, Any]] = {}
    for number, row in enumerate(_read_lines(path), start=1):
        for name in ("step", "time/step_s"):
            _check_number(row, name, f"{path}:{number}")
        found[int(row["step"])] = row
    return found


def _check_rows(config: RunConfig, steps: Sequence[MeasuredStep], path: Path) -> None:
    """Raise ConfigError unless all have what every figure of a run is made of."""
    names = ["staleness/mean", "ledger/filtered", "ledger/trained"]
    names += [f"idle/{call.stage}" for call in config.dataflow.ordered_calls]
    for step in steps:
        for name in names:
            _check_number(step.row, name, f"{path}: step {step.version + 1}")


def _check_number(row: Any, name: str, place: str) -> None:
    value = row.get(name) if isinstance(row, Mapping) else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{place}: has no {name}, a number")


def _read_run_spans(run_dir: Path, place: str) -> list[Span]:
    try:
        spans = read_spans(run_dir / TRACE_FILE)
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: {TRACE_FILE} is not a run's: {error!r}") from None
    if not spans:
        raise ConfigError(
            f"{place}: no spans in {TRACE_FILE}: telemetry.trace=false, or no step yet"
        )
    return sorted(spans, key=lambda span: (span.start_s, span.end_s))


def _read_machine_event(run_dir: Path) -> Mapping[str, Any]:
    """What the run noted last of its machine, and of how it was placed on it."""
    noted = [e for e in _read_lines(run_dir / EVENTS_FILE) if e.get("event") == "machine"]
    return noted[-1] if noted else {}


def _make_machine_cores(noted: Mapping[str, Any]) -> MachineCores:
    """The run's; if it noted none, this one, without a GPU."""
    return MachineCores.from_event(noted) if noted else MachineCores(len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class _RunLogIndex:
    """When each step was booked and how many had been since a start; when prompts came in."""

    trained_steps: Mapping[int, tuple[TrainedStep, float, int]]
    admissions: Mapping[str, tuple[float, int]]

    def iter_steps(
        self, rows: Mapping[int, Mapping[str, Any]]
    ) -> Iterator[tuple[MeasuredStep, int]]:
        """Each step that has a row, and how many the process had made before it."""
        for version, (step, end_s, since_start) in sorted(self.trained_steps.items()):
            row = rows.get(version + 1)
            if row is None:
                continue
            start_s = end_s - float(row["time/step_s"])
            yield MeasuredStep(version, start_s, end_s, step.groups, row), since_start


def _read_run_log(run_dir: Path, place: str) -> _RunLogIndex:
    trained: dict[int, tuple[TrainedStep, float, int]] = {}
    admitted: dict[str, tuple[float, int]] = {}
    since_start = 0
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    if not list_segments(folder):
        raise ConfigError(f"{place}: has no books in {folder.relative_to(run_dir)}")
    try:
        for record in read_log(folder):
            meta = record.meta
            if meta["kind"] == "open":
                since_start = 0
            elif meta["kind"] == "admit":
                entry = float(meta["time"]), int(meta["version"])
                admitted.update(dict.fromkeys(meta["uids"], entry))
            elif meta["kind"] == "step":
                trained[meta["version"]] = (
                    TrainedStep.from_record(record),
                    float(meta["time"]),
                    since_start,
                )
                since_start += 1
    except (OSError, JournalError) as error:
        raise ConfigError(f"{place}: the books cannot be read: {error}") from None
    return _RunLogIndex(trained, admitted)


def _select_steady_steps(
    config: RunConfig, steps: Sequence[tuple[MeasuredStep, int]], spans: Sequence[Span]
) -> tuple[list[MeasuredStep], dict[str, int]]:
    """The steps that are as all others would be, and why the rest is not."""
    lead, found = config.pipeline.max_steps_ahead, []
    warm_up = max(lead + ENGINE_WARM_UP_STEPS, config.critic.warmup_alone)
    saves = [span for span in spans if span.name == "save"]
    reasons = (
        "to warm up",
        "after the last prompt",
        "evaluated or saved",
        "no longer in the trace",
    )
    left_out = dict.fromkeys(reasons, 0)
    evaluated, traced_s = False, min(span.start_s for span in spans)
    for step, since_start in steps:
        disturbed = evaluated or any(
            save.start_s < step.end_s and step.start_s < save.end_s for save in saves
        )
        evaluated = any(name.startswith("eval/") for name in step.row)
        if since_start < warm_up:
            left_out["to warm up"] += 1
        elif step.version > config.run.steps - 1 - lead:
            left_out["after the last prompt"] += 1
        elif step.start_s < traced_s:
            left_out["no longer in the trace"] += 1
        elif disturbed:
            left_out["evaluated or saved"] += 1
        else:
            found.append(step)
    return found, left_out


def _collect_groups(
    spans: Sequence[Span], admitted: Mapping[str, tuple[float, int]], *, since: float
) -> list[GeneratedGroup]:
    """Groups whose last piece says how long they became."""
    pieces: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    found = []
    for span in sorted(spans, key=lambda span: span.end_s):
        uid = span.args.get("uid")
        if uid is None or "prompt" not in span.args:
            continue
        own = pieces[span.process, span.name, str(uid)]
        own.append((span.start_s, span.end_s))
        lengths = span.args.get("lengths")
        if lengths and own[0][0] >= since:
            found.append(
                GeneratedGroup(
                    span.process,
                    span.name,
                    str(uid),
                    tuple(own),
                    int(span.args["prompt"]),
                    tuple(int(tokens) for tokens in str(lengths).split()),
                    *admitted.get(str(uid), (own[0][0], 0)),
                )
            )
    return sorted(found, key=lambda one: one.start_s)
