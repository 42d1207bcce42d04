"""What a resume reads, checked before it touches a file or starts a process.

The books, the snapshots and journals of the shards, the trainers' state, the metrics: all that
would be found missing, damaged or foreign later, when actors have started and rows are cut off.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.buffer import Ledger, StageSchema
from streamrl.buffer.books.run_log import RecoveredRunLog, TrainedStep, read_log, recover_run_log
from streamrl.buffer.group import ShardState
from streamrl.buffer.prompt_codec import decode_prompt
from streamrl.buffer.recovery import recover_state
from streamrl.buffer.repartition import repartition_journals
from streamrl.buffer.wire_types import get_shard_index
from streamrl.config.run_config import RunConfig
from streamrl.data import PromptStream
from streamrl.dataflow import POLICY, CallKind, Dataflow
from streamrl.errors import CheckpointError, ConfigError, DataError, JournalError, LedgerError
from streamrl.run_dir.checkpoint import (
    RUN_LOG_FOLDER,
    Checkpoint,
    QueueLayout,
    ResumePoint,
    check_files,
    find_next_generation,
    get_journal_dir,
)
from streamrl.run_dir.run_lock import check_links
from streamrl.telemetry.metric_names import parse_metrics_row
from streamrl.telemetry.sinks import EVENTS_FILE, METRICS_FILE, read_jsonl


def load_run_log(
    run_dir: Path, state: Mapping[str, Any] | None, *, debug: bool = False
) -> RecoveredRunLog:
    """Read the books of a run behind a checkpoint's state, or from their beginning.

    Raises JournalError for a log that cannot be read, and LedgerError for one that contradicts
    itself or the checkpoint.
    """
    first = state["cuts"][RUN_LOG_FOLDER] if state is not None else 0
    ledger = state["ledger"] if state is not None else None
    records = read_log(get_journal_dir(run_dir, RUN_LOG_FOLDER), first=first)
    return recover_run_log(records, ledger, debug=debug)


def redraw_prompts(prompts: PromptStream, drawn: Sequence[str], run_dir: Path) -> None:
    """Have prompts go on behind those that were drawn since the checkpoint.

    Raises JournalError if the data gives others.
    """
    again = [prompt.uid for prompt in prompts.draw_prompts(len(drawn))]
    if again != list(drawn):
        was, now = next(pair for pair in zip(drawn, again, strict=True) if pair[0] != pair[1])
        folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
        raise JournalError(f"{folder}: prompt {was} was admitted, the data gives {now}")


def check_resume(
    resume: ResumePoint, layout: QueueLayout, config: RunConfig, prompts: PromptStream
) -> None:
    """Raise ConfigError in one line if a run cannot go on from here; nothing is touched.

    `layout` is where its groups are; `prompts` stay where they are.
    """
    from streamrl.telemetry.sink_group import check_resumable_sinks

    check_links(resume.run_dir)
    place = f"--resume {resume.checkpoint.path if resume.checkpoint else resume.run_dir}"
    try:
        if resume.checkpoint is not None:
            _check_checkpoint(resume.checkpoint, config.dataflow)
        if config.queue.journal.enabled:
            _check_queue(resume, layout, config, prompts)
        _check_metric_rows(resume.run_dir)
        check_resumable_sinks(config.telemetry, resume.run_dir)
    except (CheckpointError, DataError, JournalError, LedgerError) as error:
        if (
            resume.checkpoint is None
            or resume.has_contiguous_journal
            or not resume.should_keep_journal
        ):
            has_begun = resume.checkpoint is None and isinstance(error, JournalError)
            hint = ": nothing goes on without a checkpoint; start a run of another name"
            raise ConfigError(f"{place}: {error}{hint if has_begun else ''}") from None
        raise ConfigError(
            f"--resume {resume.run_dir}: {error}: a checkpoint newer than"
            f" {resume.checkpoint.path.name} is lost; {place} goes on from that one, without what"
            " came after it"
        ) from None


def _check_checkpoint(checkpoint: Checkpoint, dataflow: Dataflow) -> None:
    from streamrl.engines.checkpoint.sharded_state import PROGRESS_FILE, check_saved_state
    from streamrl.engines.checkpoint.trainer_checkpoint import load_legacy_progress
    from streamrl.engines.models.supported_models import check_weight_files

    check_files(checkpoint)
    for role in (call.role for call in dataflow.select_calls(CallKind.TRAIN)):
        model, state = checkpoint.get_role_dirs(role)
        place = f"--resume {checkpoint.path}: {role}"
        check_weight_files(str(model), place, is_served=role == POLICY)
        if (state / PROGRESS_FILE).is_file():
            check_saved_state(state)
        elif ranks := sorted(state.glob("rank_*.pt")):
            for path in ranks:
                load_legacy_progress(path)
        else:
            raise CheckpointError(f"{state} holds no state of a trainer")


def _check_queue(
    resume: ResumePoint, layout: QueueLayout, config: RunConfig, prompts: PromptStream
) -> None:
    state = resume.checkpoint.state if resume.checkpoint else None
    steps: Collection[TrainedStep] = ()
    if resume.should_keep_journal:
        found = load_run_log(resume.run_dir, state)
        others = copy.copy(prompts)
        others.take_skipped()  # which the run counts itself, as it draws them
        redraw_prompts(others, found.drawn_uids, resume.run_dir)
        steps = found.steps_to_replay.values()
    elif state is not None:
        Ledger.from_state(state["ledger"])
    ports = {
        call.stage: StageSchema(call.needs, call.produces) for call in config.dataflow.queue_calls
    }
    books = [_read_shard(resume, name, ports) for name in layout.shard_names]
    for step in steps:
        for group in step.groups:
            book = books[get_shard_index(group.uid, len(books))]
            if not book.retired_groups.get(group.uid) and group.uid not in book.groups:
                raise JournalError(
                    f"step {step.version} has to be made again, but its group {group.uid} is in no"
                    " journal; go back to an older checkpoint"
                )


def _read_shard(resume: ResumePoint, name: str, ports: Mapping[str, StageSchema]) -> ShardState:
    """All of a shard, read as its actor will; damaged records are left out there, too."""
    journal = get_journal_dir(resume.run_dir, name) if resume.should_keep_journal else None
    book, _ = recover_state(ports, journal, resume.find_snapshot(name))
    for group in book.groups.values():
        try:
            decode_prompt(group.prompt)
        except JournalError as error:
            raise JournalError(f"{name}: group {group.uid}: {error}") from None
    return book


def _check_metric_rows(run_dir: Path) -> None:
    """Rows are cut off behind the checkpoint and told to sinks, and events kept: all are read."""
    for name in (METRICS_FILE, EVENTS_FILE):
        path = run_dir / name
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        try:
            lines = read_jsonl(path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--resume: {error}") from None
        for number, line in enumerate(lines, start=1):
            if problem := _find_line_problem(line, name):
                raise ConfigError(f"--resume: {path}:{number}: {problem}")


def _find_line_problem(line: object, name: str) -> str:
    """What is wrong with a line of metrics or events."""
    if not isinstance(line, dict):
        return "no object"
    if name == EVENTS_FILE:
        return ""
    if not isinstance(line.get("step"), int):
        return "a row without its step"
    try:
        parse_metrics_row(line)
    except ValueError as error:
        return str(error)
    return ""


def repartition_queue(resume: ResumePoint, layout: QueueLayout, shards: int) -> None:
    """Deal the groups of a run to another number of shards.

    Until the new folders are the run's, which is one rename, the old ones are as they were. Raises
    the system's errors, and JournalError.
    """
    new = QueueLayout(shards, find_next_generation(resume.run_dir))
    folders = [get_journal_dir(resume.run_dir, name) for name in new.shard_names]
    old = [
        (get_journal_dir(resume.run_dir, name), resume.find_snapshot(name))
        for name in layout.shard_names
    ]
    repartition_journals(old, folders)
    new.write(resume.run_dir)
