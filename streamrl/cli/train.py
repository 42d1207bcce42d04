"""`streamrl train`: check everything, start the run, follow it, end it."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.actors.coordination.driver_events import EventReport, Report, StatusReport, StepReport
from streamrl.actors.engine_factory import RealEngines
from streamrl.actors.launch.fork_server import refusal, start_fork_server
from streamrl.actors.protocols import EngineFactory
from streamrl.algorithms.adaptive_params import Dials
from streamrl.buffer import Ledger
from streamrl.cli.arguments.arg_types import named_path
from streamrl.cli.run_setup.resume import Claim, begin_run, claim_run, is_fork, resume_run
from streamrl.cli.run_setup.run_directory import run_directory
from streamrl.cli.run_setup.signals import (
    graceful_interrupt,
    interrupt_on_signals,
    uninterrupted_end,
)
from streamrl.config import RunConfig, load_config, to_dict
from streamrl.config.role_counts import placed, sharing
from streamrl.errors import ConfigError, DiskError, JournalError, NoSpaceError, StreamError
from streamrl.files.atomic_write import NO_SPACE
from streamrl.run_dir.checkpoint import (
    Checkpoint,
    QueueLayout,
    ResumePoint,
    list_checkpoints,
)
from streamrl.telemetry import RunFacts
from streamrl.telemetry.rollout_log import RolloutLog
from streamrl.telemetry.sink_group import Fanout, make_sinks
from streamrl.telemetry.sinks import Fields
from streamrl.telemetry.wandb_sink import preload_wandb

if TYPE_CHECKING:
    from streamrl.actors.coordinator import Finish
    from streamrl.actors.launch.driver import Session
    from streamrl.config.preflight import Prepared
    from streamrl.data import PromptStream
    from streamrl.run_dir.crash_stacks import Crash

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl train`."""
    parser.usage = "streamrl train CONFIG [key=value ...] | --resume RUN [key=value ...]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG|key=value",
        help="a YAML file, then settings that override it, e.g. trainer.lr=1e-4",
    )
    parser.add_argument(
        "--resume",
        type=named_path,
        metavar="RUN",
        help="go on with a run directory (its newest checkpoint) or with one checkpoint of it;"
        " with run.name=NEW as a new run, which leaves that one as it is",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    claim = Claim()
    try:
        if arguments.resume is not None:
            config, resume = resume_run(arguments.resume, arguments.words, claim)
        else:
            config, resume = begin_run(arguments.words, claim), None
        finish = train(config, resume, RealEngines(), claim)
    finally:
        claim.release()
    return INTERRUPTED if finish.interrupted else 0


def train(
    config: RunConfig,
    resume: ResumePoint | None,
    engines: EngineFactory,
    claim: Claim | None = None,
) -> "Finish":
    """Train from a config, go on with a run, or fork one; writes the run directory.

    Of a run directory that is there, `claim` has the lock. Raises ConfigError before anything is
    written, and the StreamError that ended the run.
    """
    # Ray and torch take seconds to import, and who asks for help needs neither.
    from streamrl.actors.launch.driver import Session
    from streamrl.actors.launch.ray_cluster import cluster, node_stores
    from streamrl.config.preflight import hybrid_memory, shard_bytes, ways

    origin = resume
    prepared, layout = _prepare(config, resume)
    if isinstance(engines, RealEngines):
        # Those who come from the command line have done so already, as the first thing of all.
        start_fork_server()
    # While Ray starts, this process has little else to do.
    preload_wandb(config.telemetry.wandb)
    with uninterrupted_end() as end:
        claim = claim_run(config, origin, claim or Claim())
        end.callback(claim.release)
        site = end.enter_context(cluster(config.placement, partial(ways, config, prepared)))
        there = placed(config, site.placed.mode)
        memory = hybrid_memory(there, on_gpu=site.on_gpu)
        room = shard_bytes(config, prepared, node_stores=node_stores())
        check_interrupted = interrupt_on_signals()
        log, resume = end.enter_context(run_directory(config, origin, layout, claim))
        sinks = make_sinks(config.telemetry, _facts(config, resume))
        sinks.start(to_dict(config))
        summary = {"outcome": "failed"}
        end.enter_context(_closing(sinks, summary))
        session = Session(
            there,
            prepared,
            on_gpu=site.on_gpu,
            shard_bytes=room,
            memory=memory,
            engines=engines,
        )
        end.callback(session.close)
        try:
            sinks.event("machine", site.machine)
            notes = (*prepared.notes, refusal(), site.placed.note, sharing(there))
            for text in filter(None, (*notes, memory.line if memory else "")):
                sinks.event("note", {"text": text})
            if origin is not None and is_fork(config, origin):
                sinks.event("forked", {"from": str(origin.run_dir), "step": origin.version})

            def status(text: str) -> None:
                check_interrupted()
                sinks.status(text)

            for text in session.start(resume.checkpoint if resume else None, status):
                sinks.event("corrupt", {"text": text})
            check_interrupted()
            finish = _follow(session, sinks, log, claim)
        except StreamError as error:
            crashes = session.crashes.look()
            failure = _with_kept(_with_crashes(error, crashes), config)
            with contextlib.suppress(DiskError):  # the disk may be what failed
                for crash in crashes:
                    sinks.event("crashed", asdict(crash))
                sinks.event("failed", {"error": str(failure)})
            summary |= {"written": str(config.run_dir)}
            raise failure from error.__cause__
        except KeyboardInterrupt:
            summary |= {"outcome": "interrupted"}
            raise
        summary |= _summary(finish, config.run_dir)
    return finish


def _prepare(config: RunConfig, resume: ResumePoint | None) -> tuple["Prepared", QueueLayout]:
    """Load and check all that the run reads, and the folders that its groups are in.

    Refused here, other data or a damaged file costs nothing: raises ConfigError.
    """
    from streamrl.config.preflight import prepare
    from streamrl.config.resume_checks import check_resume

    prepared = prepare(config)
    if resume is None:
        return prepared, QueueLayout(config.queue.shards)
    if resume.checkpoint is not None:
        _load_position(resume.checkpoint, config, prepared.prompts)
    layout = _layout_of(resume)
    check_resume(resume, layout, config, prepared.prompts)
    return prepared, layout


@contextlib.contextmanager
def _closing(sinks: Fanout, summary: Fields) -> Iterator[None]:
    """Close the sinks at the end; a disk that refuses does not hide why a run has failed."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(DiskError):
            sinks.close(summary)
        raise
    sinks.close(summary)


def _with_crashes(error: StreamError, crashes: Sequence["Crash"]) -> StreamError:
    """The error of a run of which processes were ended by a signal, with where their stacks are."""
    if not crashes:
        return error
    told = [f"{each.actor} crashed: {each.reason}, stacks in {each.stacks}" for each in crashes]
    return type(error)(f"{error}; {'; '.join(told)}")


def _with_kept(error: StreamError, config: RunConfig) -> StreamError:
    """The error of a disk without space, with what there is to go on from."""
    is_of_disk = isinstance(error, DiskError | JournalError | NoSpaceError)
    is_full = any(os.strerror(number) in str(error) for number in NO_SPACE)
    if not (is_of_disk and is_full) or "; kept: " in str(error):
        return error
    complete = list_checkpoints(config.run_dir / "checkpoints")
    kept = complete[-1].name if complete else "the beginning"
    if config.queue.journal.enabled:
        kept += " and the journals behind it"
    text = f"kept: {kept}: make room, then --resume {config.run_dir}"
    return type(error)(f"{error}; {text}")


def _follow(session: "Session", sinks: Fanout, log: RolloutLog, claim: Claim) -> "Finish":
    """Hand every report to the sinks until the run ends."""

    def handle(report: Report) -> None:
        if claim.own is not None:
            claim.own.check()
        match report:
            case StepReport(step, row, spans, samples):
                sinks.step(step, row)
                sinks.spans(spans)
                log.write(step, samples)
            case EventReport(name, fields):
                sinks.event(name, fields)
            case StatusReport(text):
                sinks.status(text)

    with graceful_interrupt() as stopping:
        return session.watch(handle, stopping)


def _layout_of(resume: ResumePoint) -> QueueLayout:
    """The folders of the shards of a run that goes on."""
    stored = load_config(resume.run_dir / "config.yaml", is_rehearsed=True)
    return resume.layout(shards=stored.queue.shards)


def _load_position(checkpoint: Checkpoint, config: RunConfig, prompts: "PromptStream") -> None:
    """Have prompts go on where a checkpoint is; raises ConfigError if it is of other prompts."""
    try:
        Ledger.from_state(checkpoint.state["ledger"])
        prompts.load_state_dict(checkpoint.state["prompts"])
        Dials(config.algorithm.row, config.settings).load_state_dict(checkpoint.state["dials"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--resume {checkpoint.path}: state.json: {type(error).__name__}: {error}"
        ) from None


def _facts(config: RunConfig, resume: ResumePoint | None) -> RunFacts:
    return RunFacts(
        name=config.run.name,
        run_dir=config.run_dir,
        num_steps=config.run.steps,
        max_staleness=config.pipeline.max_staleness,
        resume_step=resume.version if resume else None,
        has_filter=config.filter.is_on,
    )


def _summary(finish: "Finish", run_dir: Path) -> dict[str, str]:
    summary = {"outcome": "interrupted" if finish.interrupted else "finished"}
    if finish.checkpoint:
        summary["checkpoint"] = finish.checkpoint
    return summary | {"written": str(run_dir)}
