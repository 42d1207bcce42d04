"""Train a run: check inputs, make its directory, start it, forward its reports, shut it down."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from streamrl.actors.coordination.coordinator import RunResult
from streamrl.actors.coordination.driver_events import (
    DriverReport,
    EventReport,
    RolloutReport,
    StepReport,
)
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.actors.launch.driver import RunSession
from streamrl.actors.launch.fork_server import describe_refusal, start_fork_server
from streamrl.actors.launch.ray_cluster import connect_cluster, get_object_store_bytes
from streamrl.actors.launch.serving_check import probe_serving
from streamrl.algorithms.adaptive_params import AdaptiveParams
from streamrl.buffer import Ledger
from streamrl.cli.run_setup.resume import RunDirClaim, claim_new_run, is_fork
from streamrl.cli.run_setup.signals import (
    INTERRUPTS,
    catch_first_interrupt,
    uninterrupted_exit_stack,
)
from streamrl.config.preflight import (
    PreparedRun,
    check_worker_memory,
    compute_shard_bytes,
    list_placement_options,
    list_resource_demands,
    prepare_run,
)
from streamrl.config.resume_checks import check_resume, repartition_queue
from streamrl.config.resume_overrides import describe_training
from streamrl.config.role_counts import describe_shared_slots, with_placement_mode
from streamrl.config.run_config import RunConfig, dump_config, load_config
from streamrl.data.prompt_stream import PromptStream
from streamrl.errors import ConfigError, DiskError, JournalError, NoSpaceError, StreamError
from streamrl.files.atomic_write import NO_SPACE, wrap_os_errors, write_atomic
from streamrl.run_dir.checkpoint import (
    Checkpoint,
    QueueLayout,
    ResumePoint,
    find_resume_point,
    link_checkpoint,
    list_checkpoints,
)
from streamrl.run_dir.crash_stacks import CrashRecord
from streamrl.run_dir.discarded import forget_discarded
from streamrl.run_dir.run_config_file import CONFIG_FILE
from streamrl.run_dir.run_lock import RunLock, acquire_run_lock
from streamrl.telemetry.console import RunInfo
from streamrl.telemetry.progress import ProgressLine, WorkStatus
from streamrl.telemetry.recorded_rows import GOES_BACK, START_EVENT, RecordedRows
from streamrl.telemetry.rollout_log import RolloutLog
from streamrl.telemetry.sink_group import SinkGroup, make_sink_group, preload_wandb
from streamrl.telemetry.sinks import METRICS_FILE, EventFields


@contextlib.contextmanager
def open_run_directory(
    config: RunConfig, resume: ResumePoint | None, layout: QueueLayout, claim: RunDirClaim
) -> Iterator[tuple[RolloutLog, ResumePoint | None]]:
    """Create the directory of a new run or a fork, or cut a resumed run back to its checkpoint.

    Yields the rollout log in the directory, and the resume point (None for a new run). If the run
    is refused or interrupted before its first step, a new directory is removed, and the run
    directory that it replaced is restored.
    """
    folder, recording = config.run_dir, config.telemetry.rollouts
    max_bytes = recording.max_gib * 2**30
    log = RolloutLog(folder, every=recording.every, max_bytes=max_bytes)
    replaced = folder.with_name(f".{folder.name}.replaced")
    is_new = resume is None or is_fork(config, resume)
    with wrap_os_errors(f"run directory {folder}", ConfigError):
        if is_new:
            resume = _make_run_dir(config, resume, layout, claim, replaced)
        else:
            assert resume is not None
            claim.run_lock = claim.run_lock or acquire_run_lock(folder)
            resume.discard_later()
            repartition_queue(config, resume, layout)
            write_atomic(folder / CONFIG_FILE, dump_config(config))
    try:
        yield log, resume
    except BaseException as error:
        metrics = folder / METRICS_FILE
        has_steps = metrics.exists() and metrics.stat().st_size
        is_refused = isinstance(error, ConfigError | KeyboardInterrupt)
        if is_new and not has_steps and (is_refused or replaced.exists()):
            shutil.rmtree(folder)
            if replaced.exists():
                replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _make_run_dir(
    config: RunConfig,
    resume: ResumePoint | None,
    layout: QueueLayout,
    claim: RunDirClaim,
    replaced: Path,
) -> ResumePoint | None:
    """Create and lock the directory of a new run (returns None) or a fork (its resume point).

    The directory is filled under a temporary name and then renamed, so other processes never see
    an incomplete directory. A replaced run is moved aside to the path `replaced`.
    """
    folder = config.run_dir
    partial_dir = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    partial_dir.mkdir(parents=True)
    lock: RunLock | None = None
    try:
        lock = acquire_run_lock(partial_dir)
        if resume is not None:
            assert resume.checkpoint is not None
            forked = ResumePoint(partial_dir, link_checkpoint(resume.checkpoint, partial_dir))
            (partial_dir / "journal").mkdir()
            layout.write(partial_dir)
            repartition_queue(config, forked, layout)
        write_atomic(partial_dir / CONFIG_FILE, dump_config(config))
        if folder.exists():
            # Another process created the folder after this command had checked.
            if claim.run_lock is None:
                claim_new_run(replace(config, run=replace(config.run, overwrite=False)), claim)
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        partial_dir.rename(folder)
    except BaseException:
        if lock is not None:
            lock.release()
        shutil.rmtree(partial_dir, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        raise
    if claim.run_lock is not None:
        claim.run_lock.close()
    lock.set_folder(folder)
    claim.run_lock = lock
    claim.source_locks.close()
    return None if resume is None else find_resume_point(folder)


def train(
    config: RunConfig,
    resume: ResumePoint | None,
    engines: RealEngineFactory,
    claim: RunDirClaim | None = None,
    progress: ProgressLine | None = None,
) -> RunResult:
    """Train a new, resumed or forked run, and write its run directory.

    engines: factory of the engines in the actors. claim: locks on run directories that the caller
    holds already. progress: shows the work before and after that of the run's console. Raises
    ConfigError before any file is written, and later the StreamError that ended the run.
    """
    origin, progress = resume, progress or ProgressLine()
    prepared, layout = _prepare_training(config, resume, progress)
    # `cli.main` has done this already; callers of `train` from Python have not.
    start_fork_server()
    # Import wandb in the background while Ray starts.
    preload_wandb(config.telemetry.wandb)
    with uninterrupted_exit_stack() as exit_stack, INTERRUPTS.preferred():
        INTERRUPTS.install()
        claim = claim or RunDirClaim()
        if claim.run_lock is None and (origin is None or is_fork(config, origin)):
            claim_new_run(config, claim)
        exit_stack.callback(claim.release)
        progress.describe("asking vLLM for the model")
        check_served = exit_stack.enter_context(probe_serving(config, prepared.max_length))
        progress.describe("starting Ray")
        site = exit_stack.enter_context(
            connect_cluster(config.placement, partial(list_placement_options, config, prepared))
        )
        placed_config = with_placement_mode(config, site.placement.mode)
        memory = check_worker_memory(placed_config, on_gpu=site.has_gpus)
        shard_bytes = compute_shard_bytes(config, prepared, node_stores=get_object_store_bytes())
        # Loads model classes.
        from streamrl.actors.launch.transport_plan import plan_transport

        demands = list_resource_demands(placed_config, prepared, site.has_gpus)
        transport = plan_transport(placed_config, demands, token=uuid.uuid4().hex[:12])
        progress.describe("asking vLLM for the model")
        unjudged = check_served()
        INTERRUPTS.check()
        log, resume = exit_stack.enter_context(open_run_directory(config, origin, layout, claim))
        exit_stack.callback(progress.describe, "stopping Ray")
        exit_stack.enter_context(progress.paused())
        sinks = make_sink_group(config.telemetry, _make_run_facts(config, resume))
        sinks.start(asdict(config))
        summary = {"outcome": "failed"}
        exit_stack.enter_context(_close_sinks_at_exit(sinks, summary))
        session = RunSession(
            placed_config,
            prepared,
            on_gpu=site.has_gpus,
            shard_bytes=shard_bytes,
            memory=memory,
            engines=engines,
        )
        exit_stack.callback(session.close)
        try:
            with INTERRUPTS.preferred():
                recorded = _record_start(sinks, placed_config, origin, site.machine_facts)
                notes = [*prepared.notes, describe_refusal(), site.placement.note, unjudged]
                notes += [
                    describe_shared_slots(placed_config),
                    memory.summary_line if memory else "",
                ]
                for text in filter(None, notes):
                    sinks.log_event("note", {"text": text})

                def report_status(text: str) -> None:
                    INTERRUPTS.check()
                    sinks.show_status(WorkStatus(text))

                checkpoint = resume.checkpoint if resume else None
                for text in session.start(checkpoint, transport, report_status):
                    sinks.log_event("corrupt", {"text": text})
                INTERRUPTS.check()
                finish = _forward_reports(session, sinks, log, claim, recorded, summary)
        except StreamError as error:
            summary |= {"written": str(config.run_dir)}
            raise _log_failure(error, session, sinks, config) from error.__cause__
        except KeyboardInterrupt:
            summary |= {"outcome": "interrupted"}
            raise
        summary |= _make_summary(finish, config.run_dir)
    return finish


def _prepare_training(
    config: RunConfig, resume: ResumePoint | None, progress: ProgressLine
) -> tuple[PreparedRun, QueueLayout]:
    """Load and check all inputs, before any file is written; return the queue's layout too."""
    progress.describe("checking config, model and data", unit="prompts")
    prepared = prepare_run(config, progress.advance)
    if resume is None:
        return prepared, QueueLayout(config.queue.shards)
    if resume.checkpoint is not None:
        _load_position(resume.checkpoint, config, prepared.prompts)
    stored = load_config(resume.run_dir, skips_dry_run=True)
    layout = resume.read_layout(shards=stored.queue.shards)
    check_resume(resume, layout, config, prepared.prompts)
    return prepared, layout


@contextlib.contextmanager
def _close_sinks_at_exit(sinks: SinkGroup, summary: EventFields) -> Iterator[None]:
    """Close the sinks at the end of the block, with the outcome of the run in `summary`.

    If the block raises an error, a disk error of closing is suppressed and cannot hide it.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(DiskError):
            sinks.close(summary)
        raise
    sinks.close(summary)


def _record_start(
    sinks: SinkGroup, config: RunConfig, origin: ResumePoint | None, machine: EventFields
) -> RecordedRows:
    """Log the facts of this start; return the rows of the steps that it may repeat."""
    facts = {**machine, **describe_training(config)}
    after = origin.version if origin else config.run.steps
    recorded = RecordedRows(config.run_dir, after=after, facts=facts)
    goes_back = origin is not None and not origin.should_keep_journal
    sinks.log_event(START_EVENT, {**facts, GOES_BACK: goes_back})
    if origin is not None and is_fork(config, origin):
        sinks.log_event("forked", {"from": str(origin.run_dir), "step": origin.version})
    return recorded


def _log_failure(
    error: StreamError, session: RunSession, sinks: SinkGroup, config: RunConfig
) -> StreamError:
    """Log why a run failed; return the error with crashed processes and the kept checkpoint."""
    crashes = session.crash_watch.find_new_crashes()
    failure = _add_kept_checkpoint(_add_crashes_to_message(error, crashes), config)
    with contextlib.suppress(DiskError):  # a full disk may have caused the failure
        for crash in crashes:
            sinks.log_event("crashed", asdict(crash))
        sinks.log_event("failed", {"error": str(failure)})
    return failure


def _add_crashes_to_message(error: StreamError, crashes: Sequence[CrashRecord]) -> StreamError:
    if not crashes:
        return error
    descriptions = [f"{c.actor} crashed: {c.reason}, stacks in {c.stacks}" for c in crashes]
    return type(error)(f"{error}; {'; '.join(descriptions)}")


def _add_kept_checkpoint(error: StreamError, config: RunConfig) -> StreamError:
    """Add the newest checkpoint and the resume command to the error of a full disk."""
    is_disk_error = isinstance(error, DiskError | JournalError | NoSpaceError)
    is_full = any(os.strerror(number) in str(error) for number in NO_SPACE)
    if not (is_disk_error and is_full) or "; kept: " in str(error):
        return error
    complete = list_checkpoints(config.run_dir / "checkpoints")
    kept = complete[-1].name if complete else "the beginning"
    if config.queue.journal.enabled:
        kept += " and the journals after it"
    text = f"kept: {kept}: make room, then --resume {config.run_dir}"
    return type(error)(f"{error}; {text}")


def _forward_reports(
    session: RunSession,
    sinks: SinkGroup,
    log: RolloutLog,
    claim: RunDirClaim,
    recorded: RecordedRows,
    summary: dict[str, str],
) -> RunResult:
    """Pass the driver's reports on until the run ends; the first Ctrl-C stops it in order.

    The recorded row and rollouts of a repeated step stand. The first new step replaces them from
    that step on. `summary` receives the ledger as of the end.
    """
    kept, has_new_step = set[int](), False

    def handle(report: DriverReport) -> None:
        nonlocal has_new_step
        if claim.run_lock is not None:
            claim.run_lock.verify_owner()
        match report:
            case StepReport(step, row, spans, is_repeated):
                if is_repeated and recorded.check_repeat(step, row):
                    kept.add(step)
                    sinks.show_repeated_step(step, row)
                else:
                    if not has_new_step:
                        has_new_step = True
                        forget_discarded(log.run_dir)
                        log.discard_steps_from(step)
                    sinks.log_step(step, row)
                sinks.write_spans(spans)
            case RolloutReport(step) if step in kept:
                pass
            case RolloutReport(step, groups):
                sinks.log_rollouts(step, groups)
                log.write_groups(step, groups)
            case EventReport(name, fields):
                sinks.log_event(name, fields)
            case WorkStatus() as status:
                sinks.show_status(status)

    try:
        with catch_first_interrupt() as stopping:
            return session.watch_actors(handle, stopping)
    finally:
        summary["ledger"] = session.format_ledger()


def _load_position(checkpoint: Checkpoint, config: RunConfig, prompts: PromptStream) -> None:
    """Set the prompt stream to the position of a checkpoint."""
    try:
        Ledger.from_state(checkpoint.state["ledger"])
        prompts.load_state_dict(checkpoint.state["prompts"])
        AdaptiveParams(config.algorithm.spec, config.algorithm_settings).load_state_dict(
            checkpoint.state["dials"]
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--resume {checkpoint.path}: state.json: {type(error).__name__}: {error}"
        ) from None


def _make_run_facts(config: RunConfig, resume: ResumePoint | None) -> RunInfo:
    spec = config.algorithm.spec
    return RunInfo(
        name=config.run.name,
        run_dir=config.run_dir,
        num_steps=config.run.steps,
        max_staleness=config.pipeline.max_staleness,
        resume_step=resume.version if resume else None,
        has_filter=config.filter.is_enabled,
        compares_rollouts=spec.min_group_size > 1 and not spec.reads_token_scores,
    )


def _make_summary(finish: RunResult, run_dir: Path) -> dict[str, str]:
    summary = {"outcome": "interrupted" if finish.is_interrupted else "finished"}
    if finish.checkpoint:
        summary["checkpoint"] = finish.checkpoint
        if (best := Path(finish.checkpoint).with_name("best")).is_symlink():
            summary["best"] = str(best.resolve())
    return summary | {"written": str(run_dir)}
