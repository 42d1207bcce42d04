"""Checks of everything a resume reads, before it changes a file or starts a process.

Covers every file of the checkpoint with its hash (format 3: its size only; the trainers report
other damage when they load), the run log, the shards' snapshots and journals, and metrics.
Otherwise a damaged file would only surface after actors have started and metric rows have been cut.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.buffer import Ledger, StageSchema
from streamrl.buffer.durable_shard import recover_state, repartition_shards
from streamrl.buffer.encoding import decode_prompt, get_shard_index
from streamrl.buffer.group import ShardState
from streamrl.buffer.run_log import (
    RecoveredRunLog,
    StreamEvent,
    TrainedStep,
    check_checkpoint,
    read_log,
    recover_run_log,
)
from streamrl.config.run_config import RunConfig
from streamrl.data.prompt_stream import PromptStream
from streamrl.dataflow import CallKind, Dataflow
from streamrl.errors import CheckpointError, ConfigError, DataError, JournalError, LedgerError
from streamrl.files.bounded_read import read_jsonl, wrap_file_errors
from streamrl.run_dir.checkpoint import (
    RUN_LOG_FOLDER,
    Checkpoint,
    QueueLayout,
    ResumePoint,
    check_files,
    find_next_generation,
    get_journal_dir,
    suggest_whole_checkpoint,
)
from streamrl.run_dir.run_lock import check_links
from streamrl.telemetry.chrome_trace import check_trace
from streamrl.telemetry.metric_names import parse_metrics_row
from streamrl.telemetry.sinks import EVENTS_FILE, METRICS_FILE, load_run_id


def load_run_log(run_dir: Path, state: Mapping[str, Any] | None) -> RecoveredRunLog:
    """Recover the state of a run from its run log, from a checkpoint or the log's beginning on.

    state: state of the checkpoint, None without a checkpoint. Raises JournalError for an
    unreadable log, and LedgerError if the log contradicts itself or the checkpoint.
    """
    first = state["cuts"][RUN_LOG_FOLDER] if state is not None else 0
    ledger = state["ledger"] if state is not None else None
    records = read_log(get_journal_dir(run_dir, RUN_LOG_FOLDER), first=first)
    return recover_run_log(records, ledger)


def redraw_prompts(prompts: PromptStream, events: Sequence[StreamEvent], run_dir: Path) -> None:
    """Advance the prompt stream past the prompts drawn since the checkpoint, and check them.

    `check_resume` does so with a copy of the stream before anything starts.

    events: draws and results in the run log, in order. Raises JournalError if the data now yields
    different prompts.
    """
    for event in events:
        if prompts.replays is not None:
            prompts.replays.record_step(event.version, event.trained)
        if prompts.pass_rates is not None:
            prompts.pass_rates.record_results(event.version, event.pass_rates)
            if event.drawn_uids:
                prompts.pass_rates.advance_version(event.version)
        for old in event.drawn_uids:
            if (new := next(prompts).uid) != old:
                folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
                raise JournalError(
                    f"{folder}: prompt {old} was admitted, but the data now yields {new}"
                )


def check_resume(
    resume: ResumePoint, layout: QueueLayout, config: RunConfig, prompts: PromptStream
) -> None:
    """Raise a one-line ConfigError if the run cannot resume from `resume`. Changes no file.

    layout: shard folders of the run. prompts: prompt stream at the checkpoint; its position stays
    unchanged.
    """
    check_links(resume.run_dir)
    location = f"--resume {resume.checkpoint.path if resume.checkpoint else resume.run_dir}"
    try:
        if resume.checkpoint is not None:
            _check_checkpoint(resume.checkpoint)
        if config.queue.journal.enabled:
            _check_queue(resume, layout, config, prompts)
        _check_metric_rows(resume.run_dir)
        if config.telemetry.wandb.is_enabled:
            load_run_id(resume.run_dir)
        check_trace(resume.run_dir)
    except (CheckpointError, DataError, JournalError, LedgerError) as error:
        if (
            resume.checkpoint is None
            or resume.has_contiguous_journal
            or not resume.should_keep_journal
        ):
            is_first_start = resume.checkpoint is None and isinstance(error, JournalError)
            hint = ": the run has no checkpoint to resume from; start a run with another name"
            raise ConfigError(f"{location}: {error}{hint if is_first_start else ''}") from None
        raise ConfigError(
            f"--resume {resume.run_dir}: {error}: a checkpoint newer than"
            f" {resume.checkpoint.path.name} is lost; {location} resumes from that checkpoint and"
            " loses later steps"
        ) from None


def _check_checkpoint(checkpoint: Checkpoint) -> None:
    """Raise ConfigError unless every file of the checkpoint is as it was written."""
    try:
        check_files(checkpoint)
    except ConfigError as error:
        raise ConfigError(f"{error}{suggest_whole_checkpoint(checkpoint.path)}") from None


def _check_queue(
    resume: ResumePoint, layout: QueueLayout, config: RunConfig, prompts: PromptStream
) -> None:
    """Check the run log, and the snapshots and journals of all shards.

    Raises JournalError if a training step must be repeated and a group of the step is lost.
    """
    state = resume.checkpoint.state if resume.checkpoint else None
    steps: Collection[TrainedStep] = ()
    if resume.should_keep_journal:
        if state is not None:
            folder = get_journal_dir(resume.run_dir, RUN_LOG_FOLDER)
            check_checkpoint(folder, state, cut=state["cuts"][RUN_LOG_FOLDER])
        run_log = load_run_log(resume.run_dir, state)
        replayed = copy.copy(prompts)
        replayed.take_skipped()  # the run counts skipped rows again when it draws them
        redraw_prompts(replayed, run_log.stream_events, resume.run_dir)
        steps = run_log.steps_to_replay.values()
    elif state is not None:
        Ledger.from_state(state["ledger"])
    schemas = make_stage_schemas(config.dataflow)
    shards = [_read_shard(resume, name, schemas) for name in layout.shard_names]
    trained = {
        column for call in config.dataflow.select_calls(CallKind.TRAIN) for column in call.needs
    }
    for step in steps:
        for group in step.groups:
            shard = shards[get_shard_index(group.uid, len(shards))]
            stages = shard.retired_groups.get(group.uid, {}).values()
            lost = sorted(trained.difference(*(columns.column_names for columns in stages)))
            if lost and group.uid not in shard.groups:  # what an open group lacks is made again
                raise JournalError(
                    f"step {step.version} must be repeated, but the journals have no"
                    f" {', '.join(lost)} of its group {group.uid}; resume from an older checkpoint;"
                    " with run.name=NEW the checkpoint alone is resumed"
                )


def make_stage_schemas(dataflow: Dataflow) -> dict[str, StageSchema]:
    return {call.stage: StageSchema(call.needs, call.produces) for call in dataflow.queue_calls}


def _read_shard(resume: ResumePoint, name: str, schemas: Mapping[str, StageSchema]) -> ShardState:
    """Recover the state of the queue shard `name` from its files, and decode the prompts in it.

    Skips damaged records, as the shard's actor would. Raises JournalError for a damaged prompt.
    """
    journal = get_journal_dir(resume.run_dir, name) if resume.should_keep_journal else None
    state, _ = recover_state(schemas, journal, resume.find_snapshot(name))
    for group in state.groups.values():
        try:
            decode_prompt(group.prompt)
        except JournalError as error:
            raise JournalError(f"{name}: group {group.uid}: {error}") from None
    return state


def _check_metric_rows(run_dir: Path) -> None:
    """Raise ConfigError if a line of metrics.jsonl or events.jsonl cannot be parsed.

    A resume reads both files, and its first new step cuts the rows from there on.
    """
    for name, key in ((METRICS_FILE, "step"), (EVENTS_FILE, "event")):
        for number, line in enumerate(read_jsonl(run_dir / name), start=1):
            place = f"--resume: {run_dir / name}:{number}"
            is_row = isinstance(line, dict) and {"time", key} <= line.keys()
            if not is_row or (key == "step" and not isinstance(line["step"], int)):
                wanted = "integer step" if key == "step" else key
                raise ConfigError(f"{place}: must be a JSON object with time and {wanted}")
            with wrap_file_errors(place):
                parse_metrics_row(line if name == METRICS_FILE else {})


def repartition_queue(config: RunConfig, resume: ResumePoint, layout: QueueLayout) -> None:
    """Redistribute the groups in a run's journals over the configured number of queue shards.

    Does nothing if the number is the same, or the run has no journals.

    layout: present shard folders, which stay valid until one rename makes the new layout current.
    Raises OSError and JournalError.
    """
    if not config.queue.journal.enabled or layout.shards == config.queue.shards:
        return
    new = QueueLayout(config.queue.shards, find_next_generation(resume.run_dir))
    folders = [get_journal_dir(resume.run_dir, name) for name in new.shard_names]
    schemas = make_stage_schemas(config.dataflow)
    repartition_shards([_read_shard(resume, name, schemas) for name in layout.shard_names], folders)
    new.write(resume.run_dir)
