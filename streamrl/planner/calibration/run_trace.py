"""Trace of a finished run as plain data: steps, spans of each process, and generated groups.

Sources in the run directory: config.yaml, metrics.jsonl, events.jsonl, trace.json and the run log.
A span of a generator is that of a whole group, or, in a run with an environment, of a turn of an
episode.
"""

import math
import os
import statistics
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from streamrl.buffer.run_log import TrainedStep, read_log
from streamrl.buffer.segment_file import JournalRecord, list_segments
from streamrl.buffer.step_assembler import TrainedGroup
from streamrl.config.role_counts import with_placement_mode
from streamrl.config.run_config import RunConfig, load_config
from streamrl.dataflow import GENERATE_CALL
from streamrl.errors import ConfigError, JournalError
from streamrl.files.bounded_read import iter_jsonl
from streamrl.planner.problem.workload import EmpiricalLengths, EpisodeTurns, EpisodeWork, TurnWork
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from streamrl.telemetry.chrome_trace import TRACE_FILE, read_spans
from streamrl.telemetry.sinks import EVENTS_FILE, METRICS_FILE
from streamrl.telemetry.spans import Span

Admissions = Mapping[str, tuple[float, int]]
"""Time of admission and version, by uid."""


@dataclass(frozen=True)
class GeneratedGroup:
    """A group of a finished run, or a turn of it: when it was sampled, and the tokens.

    intervals: start and end of sampling; several if sampling was paused. Those of a group of
        episodes include the time of their environment.
    prompt_tokens: tokens before the first sampled token.
    lengths: sampled tokens of each rollout.
    admitted_s, admitted_version: time of admission, and the oldest version that may sample the
        group.
    cached_tokens: prompt tokens in the prefix cache.
    reset_s: seconds of the environment before the first turn.
    """

    process: str
    stage: str
    uid: str
    intervals: tuple[tuple[float, float], ...]
    prompt_tokens: int
    lengths: tuple[int, ...]
    admitted_s: float
    admitted_version: int
    cached_tokens: int = 0
    reset_s: float = 0.0

    @property
    def start_s(self) -> float:
        return self.intervals[0][0]

    @property
    def end_s(self) -> float:
        return self.intervals[-1][1]


Work = TypeVar("Work", GeneratedGroup, Span)


def split_gaps(works: Iterable[Work]) -> Iterator[list[Work]]:
    """Yield the works of a process, ordered by start, between moments at which it had none."""
    overlapping: list[Work] = []
    end_s = float("-inf")
    for work in works:
        if overlapping and work.start_s >= end_s:
            yield overlapping
            overlapping = []
        overlapping.append(work)
        end_s = max(end_s, work.end_s)
    if overlapping:
        yield overlapping


def _iter_ended_parts(
    spans: Sequence[Span], key_names: Sequence[str], last_fact: str
) -> Iterator[tuple[Span, tuple[tuple[float, float], ...]]]:
    """Yield the last span of each work that ended, and the intervals of all its spans.

    Works differ in their process, name or facts of `key_names`. Sampling that is paused has several
    spans, of which only the last has the fact `last_fact`.
    """
    intervals: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.end_s):
        if all(name in span.args for name in key_names):
            key = (span.process, span.name, *(span.args[name] for name in key_names))
            intervals[key].append((span.start_s, span.end_s))
            if span.args.get(last_fact):
                yield span, tuple(intervals.pop(key))


def collect_groups(
    spans: Sequence[Span], admitted: Admissions, *, since: float
) -> list[GeneratedGroup]:
    """Return the completely sampled groups that begin at `since` or later, by begin."""
    groups = [
        GeneratedGroup(
            span.process,
            span.name,
            str(span.args["uid"]),
            intervals,
            int(span.args["prompt"]),
            tuple(int(tokens) for tokens in str(span.args["lengths"]).split()),
            *admitted.get(str(span.args["uid"]), (intervals[0][0], 0)),
        )
        for span, intervals in _iter_ended_parts(spans, ("uid", "prompt"), "lengths")
        if intervals[0][0] >= since
    ]
    return sorted(groups, key=lambda group: group.start_s)


@dataclass(frozen=True)
class SampledTurn(GeneratedGroup):
    """Turn of an episode in a trace, as a group of one rollout.

    prompt_tokens: tokens before the turn.
    episode: number of the episode within its group.
    environment_s: seconds that the environment took in the episode so far.
    """

    episode: int = 0
    turn: int = 0
    environment_s: float = 0.0

    @property
    def tokens(self) -> int:
        return self.lengths[0]

    @property
    def key(self) -> tuple[str, str, int]:
        """Process, uid and number of the episode."""
        return self.process, self.uid, self.episode


@dataclass(frozen=True)
class RecordedEpisodes:
    """Episodes of a run by group, each as its turns in order.

    final_s: mean seconds of the environment after the last turn.
    """

    groups: Sequence[Sequence[Sequence[SampledTurn]]]
    final_s: float

    @classmethod
    def from_turns(
        cls,
        turns: Sequence[SampledTurn],
        *,
        ended: Collection[str],
        group_size: int,
        environment_s: float,
    ) -> "RecordedEpisodes":
        """Collect the whole groups among turns.

        ended: uids of the groups that ended. environment_s: mean seconds of the environment in an
            episode, from its reset to its score.
        """
        by_uid: dict[str, list[Sequence[SampledTurn]]] = defaultdict(list)
        for (_, uid, _), episode in split_episodes(turns).items():
            if uid in ended and episode[0].turn == 0:
                by_uid[uid].append(episode)
        groups = [episodes for episodes in by_uid.values() if len(episodes) == group_size]
        last_turns = [episode[-1] for episodes in groups for episode in episodes]
        recorded_s = sum(turn.environment_s for turn in last_turns) / max(1, len(last_turns))
        return cls(groups, max(0.0, environment_s - recorded_s))

    def list_groups(self) -> list[GeneratedGroup]:
        """Return the groups, each from its first turn until its environment is done, by begin."""
        groups = []
        for episodes in self.groups:
            first = min((episode[0] for episode in episodes), key=lambda turn: turn.start_s)
            end_s = max(episode[-1].end_s for episode in episodes) + self.final_s
            groups.append(
                GeneratedGroup(
                    first.process,
                    first.stage,
                    first.uid,
                    ((first.start_s, end_s),),
                    first.prompt_tokens,
                    tuple(sum(turn.tokens for turn in episode) for episode in episodes),
                    first.admitted_s,
                    first.admitted_version,
                    reset_s=first.environment_s,
                )
            )
        return sorted(groups, key=lambda group: group.start_s)

    def list_works(self) -> tuple[EpisodeWork, ...]:
        return tuple(
            EpisodeWork(tuple(_to_works(episode)), self.final_s)
            for episodes in self.groups
            for episode in episodes
        )


def _to_works(episode: Sequence[SampledTurn]) -> Iterable[TurnWork]:
    """Yield the work of each turn; what precedes the first turn is part of the prompt."""
    first = episode[0]
    yield TurnWork(first.environment_s, 0, first.tokens)
    for before, turn in pairwise(episode):
        # A context that was rewritten may be shorter than the last one.
        observed_tokens = max(0, turn.prompt_tokens - before.prompt_tokens - before.tokens)
        seconds = turn.environment_s - before.environment_s
        yield TurnWork(seconds, observed_tokens, turn.tokens)


def collect_turns(
    spans: Sequence[Span], admitted: Admissions, *, since: float
) -> list[SampledTurn]:
    """Return the completely sampled turns that begin at `since` or later, by begin.

    The tokens of the turn before are cached, unless its process loaded a version since.
    """
    turns = [
        SampledTurn(
            span.process,
            span.name,
            str(span.args["uid"]),
            intervals,
            int(span.args["context"]),
            (int(span.args["tokens"]),),
            *admitted.get(str(span.args["uid"]), (intervals[0][0], 0)),
            episode=int(span.args["episode"]),
            turn=int(span.args["turn"]),
            environment_s=float(span.args["environment_s"]),
        )
        for span, intervals in _iter_ended_parts(spans, ("uid", "episode", "turn"), "tokens")
        if intervals[0][0] >= since
    ]
    loads = {span.process: list[float]() for span in spans}
    for span in spans:
        if span.name == "pull":
            insort(loads[span.process], span.end_s)
    latest: dict[tuple[str, str, int], SampledTurn] = {}
    for i, turn in enumerate(sorted(turns, key=lambda turn: turn.start_s)):
        before, pulled = latest.get(turn.key), loads[turn.process]
        cached_tokens = 0
        if turn.turn and before is not None:
            has_loaded = bisect_right(pulled, before.end_s) < bisect_right(pulled, turn.start_s)
            cached_tokens = 0 if has_loaded else before.prompt_tokens + before.tokens
        latest[turn.key] = turns[i] = replace(turn, cached_tokens=cached_tokens)
    return turns


def split_episodes(
    turns: Sequence[SampledTurn],
) -> Mapping[tuple[str, str, int], Sequence[SampledTurn]]:
    """Return the turns of each episode by process, uid and number.

    Only the turns of its last attempt count.
    """
    episodes: dict[tuple[str, str, int], list[SampledTurn]] = {}
    for turn in turns:
        if turn.turn == 0 or turn.key not in episodes:
            episodes[turn.key] = []
        episodes[turn.key].append(turn)
    return episodes


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
    generated_groups: groups that begin after the start of the first of `steps`.
    engine_requests: what the engines sampled at once: these groups, or the turns of episodes.
    episode_turns: turns of the rollouts of `generated_groups`; None without an environment.
    """

    run_dir: Path
    config: RunConfig
    cores: int
    steps: Sequence[MeasuredStep]
    excluded_steps: Mapping[str, int]
    spans: Sequence[Span]
    generated_groups: Sequence[GeneratedGroup]
    engine_requests: Sequence[GeneratedGroup]
    episode_turns: EpisodeTurns | None

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
        return [group for group in self.generated_groups if group.stage == GENERATE_CALL.stage]

    @property
    def median_step_s(self) -> float:
        return statistics.median(step.step_s for step in self.steps)

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
        seconds = [step.step_s for step in self.steps]
        return {
            call.stage: sum(
                step.row[f"idle/{call.stage}"] * step_s
                for step, step_s in zip(self.steps, seconds, strict=True)
            )
            / sum(seconds)
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
    location = str(run_dir)
    config = _load_run_config(run_dir, location)
    if not config.queue.journal.enabled:
        raise ConfigError(f"{location}: has no run log: queue.journal.enabled=false")
    if not os.path.isfile(run_dir / METRICS_FILE):
        raise ConfigError(f"{location}: has no {METRICS_FILE}")
    # The trace of a long run holds its end only; no earlier row, step or admission is kept.
    spans = _read_run_spans(run_dir, location)
    run_log = _read_run_log(run_dir, location, since_s=spans[0].start_s)
    rows = _read_rows(run_dir / METRICS_FILE, run_log.trained_steps.keys())
    steps, excluded = _select_steady_steps(config, run_log, rows, spans)
    if len(steps) < MIN_STEPS:
        reasons = ", ".join(f"{count} {why}" for why, count in excluded.items() if count)
        raise ConfigError(
            f"{location}: too short: {len(steps)} steady steps, must be at least {MIN_STEPS}"
            + (f"; left out: {reasons}" if reasons else "")
        )
    _check_rows(config, steps, run_dir / METRICS_FILE)
    if config.environment.is_enabled:
        groups, requests, turns = _read_episodes(config, steps, spans, run_log, location)
    else:
        groups = collect_groups(spans, run_log.admissions, since=steps[0].start_s)
        requests, turns = groups, None
    if not groups:
        raise ConfigError(
            f"{location}: {TRACE_FILE} has no generate spans with lengths: the file is truncated"
            " or of an older version"
        )
    machine_event = _read_machine_event(run_dir, location)
    has_one_cpu_machine = not machine_event["on_gpu"] and machine_event["nodes"] == 1
    cores = int(machine_event["cores"]) if has_one_cpu_machine else 0
    placed_config = with_placement_mode(config, machine_event["placement"])
    return RunTrace(run_dir, placed_config, cores, steps, excluded, spans, groups, requests, turns)


def _read_episodes(
    config: RunConfig,
    steps: Sequence[MeasuredStep],
    spans: Sequence[Span],
    run_log: "_RunLogIndex",
    location: str,
) -> tuple[list[GeneratedGroup], Sequence[GeneratedGroup], EpisodeTurns]:
    """Return the groups, the turns as groups of one rollout, and the turns of the groups' episodes.

    Raises ConfigError, naming the `location`, without a whole group or the environment's time.
    """
    environment_s = _average_present([step.row.get("episode/environment_s") for step in steps])
    if environment_s is None:
        raise ConfigError(f"{location}: {METRICS_FILE} has no episode/environment_s")
    turns = collect_turns(spans, run_log.admissions, since=steps[0].start_s)
    episodes = RecordedEpisodes.from_turns(
        turns,
        ended=run_log.ended,
        group_size=config.algorithm.group_size,
        environment_s=environment_s,
    )
    if not episodes.groups:
        raise ConfigError(
            f"{location}: {TRACE_FILE} has no group whose {config.algorithm.group_size} episodes"
            " are recorded from the first turn on"
        )
    return (
        episodes.list_groups(),
        turns,
        EpisodeTurns(episodes.list_works()),
    )


def describe_missing_run(run_dir: Path) -> str:
    """Return why a directory is not a run directory, for an error message."""
    if os.path.isdir(run_dir):
        return "holds no config.yaml"
    return "not a directory" if os.path.exists(run_dir) else "no such directory"


def _average_present(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def _load_run_config(run_dir: Path, location: str) -> RunConfig:
    path = run_dir / "config.yaml"
    if not os.path.isfile(path):
        raise ConfigError(f"{location}: no run: {describe_missing_run(run_dir)}")
    return load_config(path, skips_dry_run=True)


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


def _read_run_spans(run_dir: Path, location: str) -> list[Span]:
    """Return the spans in the run's trace, ordered by start.

    location: name of the run in errors. Raises ConfigError if the file is no trace or has no spans.
    """
    try:
        spans = read_spans(run_dir / TRACE_FILE)
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{location}: {TRACE_FILE} is not the trace of a run: {error!r}"
        ) from None
    if not spans:
        raise ConfigError(f"{location}: {TRACE_FILE} has no spans: no step yet")
    return sorted(spans, key=lambda span: (span.start_s, span.end_s))


def _read_machine_event(run_dir: Path, location: str) -> Mapping[str, Any]:
    latest: Mapping[str, Any] = {}
    for event in iter_jsonl(run_dir / EVENTS_FILE):
        latest = event if event.get("event") == "machine" else latest
    if missing := {"on_gpu", "nodes", "cores", "placement"} - latest.keys():
        raise ConfigError(f"{location}: {EVENTS_FILE} has no machine with {min(missing)}")
    return latest


@dataclass
class _RunLogIndex:
    """Trained steps and admissions in a run log, without those that ended before `since_s`.

    trained_steps: by version, the step, the time of its record, and the number of steps since the
        last start of the run; the last MAX_LOGGED_STEPS.
    admissions: by uid, time and version.
    ended: uids of groups that were trained, or sampled and then ended otherwise.
    left_out: number of earlier steps, by the number of steps since a start of the run, at most
        MAX_LOGGED_STEPS.
    """

    since_s: float
    trained_steps: dict[int, tuple[TrainedStep, float, int]] = field(default_factory=dict)
    admissions: dict[str, tuple[float, int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    left_out: Counter[int] = field(default_factory=Counter)
    _since_start: int = 0

    def add_record(self, record: JournalRecord) -> None:
        meta = record.meta
        match meta["kind"]:
            case "open":
                self._since_start = 0
            case "admit":
                entry = float(meta["time"]), int(meta["version"])
                self.admissions.update(dict.fromkeys(meta["uids"], entry))
            case "step":
                self._add_step(record)
            case "end" if float(meta["time"]) < self.since_s:
                self.admissions.pop(meta["uid"], None)
            case "end" if meta["filtered"]:
                self.ended.add(meta["uid"])

    def _add_step(self, record: JournalRecord) -> None:
        meta, steps = record.meta, self.trained_steps
        time_s, number = float(meta["time"]), self._since_start
        self._since_start += 1
        if time_s < self.since_s:
            for uid in meta["uids"]:
                self.admissions.pop(uid, None)
        else:
            steps[meta["version"]] = TrainedStep.from_record(record), time_s, number
            self.ended.update(meta["uids"])
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


def _read_run_log(run_dir: Path, location: str, *, since_s: float) -> _RunLogIndex:
    """Read trained steps and admissions from the run log; leave out what ended before `since_s`.

    Raises ConfigError, naming the `location`, if the log is missing or damaged.
    """
    index = _RunLogIndex(since_s)
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    if not list_segments(folder):
        raise ConfigError(f"{location}: has no run log in {folder.relative_to(run_dir)}")
    try:
        for record in read_log(folder):
            index.add_record(record)
    except (OSError, JournalError) as error:
        raise ConfigError(f"{location}: cannot read the run log: {error}") from None
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
