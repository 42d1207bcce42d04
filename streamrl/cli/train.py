"""`streamrl train`: check everything, start the run, follow it, end it."""

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.actors.engine_factory import EngineFactory
from streamrl.actors.feed import EventReport, Report, StatusReport, StepReport
from streamrl.actors.fork_server import refusal, start_fork_server
from streamrl.actors.real_engines import RealEngines
from streamrl.algorithms.dials import Dials
from streamrl.buffer import Ledger
from streamrl.checkpoint import Checkpoint, ResumePoint, find_resume_point
from streamrl.cli.given import named_path
from streamrl.cli.interrupts import (
    graceful_interrupt,
    interrupt_on_signals,
    uninterrupted_end,
)
from streamrl.config import RunConfig, dump_config, load_config, to_dict
from streamrl.dataflow import CRITIC, POLICY, Kind
from streamrl.durable import write_whole
from streamrl.engines.reference_config import STATE_FILE
from streamrl.errors import ConfigError, DiskError, StreamError
from streamrl.slots import placed, sharing
from streamrl.telemetry import RunFacts
from streamrl.telemetry.fanout import Fanout, make_sinks
from streamrl.telemetry.rollout_log import RolloutLog
from streamrl.telemetry.sinks import METRICS_FILE, Fields
from streamrl.telemetry.wandb_sink import preload_wandb

if TYPE_CHECKING:
    from streamrl.actors.coordinator import Finish
    from streamrl.actors.session import Session
    from streamrl.data import PromptStream

INTERRUPTED = 130


KEPT_BY_TRAINERS = (
    *("backend", "world_size", "tensor_parallel", "zero_stage"),
    *("lora_rank", "lora_alpha", "lora_targets"),
)
"""Settings of a trainer that the state in a checkpoint is made for."""


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
        help="go on with a run directory (its newest checkpoint) or with one checkpoint of it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if arguments.resume is not None:
        config, resume = _resumed(arguments.resume, arguments.words)
    else:
        config, resume = _fresh(arguments.words), None
    finish = train(config, resume, RealEngines())
    return INTERRUPTED if finish.interrupted else 0


def train(config: RunConfig, resume: ResumePoint | None, engines: EngineFactory) -> "Finish":
    """Train from a config, or go on with a run; writes the run directory.

    Raises ConfigError before anything is written, and the StreamError that ended the run.
    """
    # Ray and torch take seconds to import, and who asks for help needs neither.
    from streamrl.actors.cluster import cluster, node_stores
    from streamrl.actors.session import Session
    from streamrl.preflight import hybrid_memory, prepare, shard_bytes, ways

    prepared = prepare(config)
    checkpoint = resume.checkpoint if resume else None
    if checkpoint is not None:
        # Refused here, other data or another order costs nothing.
        _load_position(checkpoint, prepared.prompts)
    if isinstance(engines, RealEngines):
        # Those who come from the command line have done so already, as the first thing of all.
        start_fork_server()
    # While Ray starts, this process has little else to do.
    preload_wandb(config.telemetry.wandb)
    with uninterrupted_end() as end:
        site = end.enter_context(cluster(config.placement, partial(ways, config, prepared)))
        there = placed(config, site.placed.mode)
        memory = hybrid_memory(there, on_gpu=site.on_gpu)
        room = shard_bytes(config, prepared, node_stores=node_stores())
        check_interrupted = interrupt_on_signals()
        log = end.enter_context(_run_directory(config, resume))
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
            memory_line = memory.line if memory else ""
            sinks.event("machine", site.machine)
            notes = (*prepared.notes, refusal(), site.placed.note, sharing(there), memory_line)
            for text in filter(None, notes):
                sinks.event("note", {"text": text})

            def status(text: str) -> None:
                check_interrupted()
                sinks.status(text)

            for text in session.start(checkpoint, status):
                sinks.event("corrupt", {"text": text})
            check_interrupted()
            finish = _follow(session, sinks, log)
        except StreamError as error:
            with contextlib.suppress(DiskError):  # the disk may be what failed
                sinks.event("failed", {"error": str(error)})
            summary |= {"written": str(config.run_dir)}
            raise
        except KeyboardInterrupt:
            summary |= {"outcome": "interrupted"}
            raise
        summary |= _summary(finish, config.run_dir)
    return finish


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


def _follow(session: "Session", sinks: Fanout, log: RolloutLog) -> "Finish":
    """Hand every report to the sinks until the run ends."""

    def handle(report: Report) -> None:
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


def _fresh(words: Sequence[str]) -> RunConfig:
    """The config of a new run from the words of the command line."""
    if not words or "=" in words[0]:
        raise ConfigError("train: name a config file first, or --resume a run")
    config = load_config(Path(words[0]), words[1:])
    if config.run_dir.exists() and not config.run.overwrite:
        raise ConfigError(
            f"run directory {config.run_dir} exists: --resume it, name another (run.name=...),"
            " or replace it (run.overwrite=true)"
        )
    if config.run_dir.exists():
        _check_replaceable(config)
    return config


def _check_replaceable(config: RunConfig) -> None:
    """Refuse to replace what is no run, or a run that the new one reads from."""
    folder = config.run_dir
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run.overwrite=true: {folder} is no run directory; left alone")
    inputs = {"model.path": config.model.path, "data.pretrain": config.data.pretrain}
    inputs |= {f"data.train[{i}]": file.path for i, file in enumerate(config.data.train_files)}
    inputs |= {f"data.eval[{i}]": file.path for i, file in enumerate(config.data.eval_files)}
    inputs |= {"critic.path": config.critic.path, "algorithm.path": config.algorithm.path}
    inputs |= {"filter.path": config.filter.options.get("path", "")}
    for section, entries in (("rewards", config.rewards), ("costs", config.costs)):
        for i, entry in enumerate(entries):
            inputs[f"{section}[{i}].path"] = str(entry.options.get("path", ""))
    for key, path in inputs.items():
        if path and folder.resolve() in Path(path).resolve().parents:
            raise ConfigError(f"{key}={path}: lies in the run that run.overwrite=true replaces")


def _resumed(path: Path, words: Sequence[str]) -> tuple[RunConfig, ResumePoint]:
    """Config of a run that is to go on, and where it does."""
    if words and "=" not in words[0]:
        raise ConfigError(f"--resume goes on with the run's own config; {words[0]} is one too many")
    resume = find_resume_point(path)
    checkpoint, folder = resume.checkpoint, resume.run_dir
    config = load_config(folder / "config.yaml", words)
    _check_same_run(load_config(folder / "config.yaml", is_rehearsed=True), config)
    if checkpoint is not None:
        _check_parts(checkpoint, [call.role for call in config.dataflow.of_kind(Kind.TRAIN)])
        _check_reference(checkpoint, config.reference.every)
    # The directory may have been moved since.
    config = replace(config, run=replace(config.run, name=folder.name, dir=str(folder.parent)))
    if resume.version >= config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps}: the checkpoint is at step {resume.version};"
            " give a larger run.steps to go on"
        )
    return config, resume


def _check_parts(checkpoint: Checkpoint, roles: Sequence[str]) -> None:
    """Raise ConfigError unless there are a model and a trainer's state of each role."""
    for part in (part for role in roles for part in checkpoint.dirs(role)):
        if not part.is_dir() or not any(part.iterdir()):
            place = part.relative_to(checkpoint.path)
            raise ConfigError(f"--resume {checkpoint.path}: {place}/ is missing or empty")


def _check_reference(checkpoint: Checkpoint, every: int) -> None:
    """Raise ConfigError unless the run goes on with a moving reference just if one was saved."""
    was_saved = (checkpoint.dirs(POLICY)[1] / STATE_FILE).is_file()
    if was_saved and not every:
        raise ConfigError(
            f"reference.every={every}: the reference of {checkpoint.path} has moved; a resumed run"
            " goes on with it"
        )
    if every and not was_saved:
        raise ConfigError(
            f"reference.every={every}: {checkpoint.path} has no reference that moves; a resumed"
            " run keeps its 0"
        )


def _check_same_run(stored: RunConfig, config: RunConfig) -> None:
    """Refuse overrides under which the saved state would mean something else."""
    for section, role in (("trainer", POLICY), ("critic.trainer", CRITIC)):
        was, wanted = (vars(one.trainer_of(role)) for one in (stored, config))
        for name in KEPT_BY_TRAINERS:
            if wanted[name] != was[name]:
                raise ConfigError(
                    f"{section}.{name}={wanted[name]}: a resumed run keeps its {was[name]}"
                )
    kept = {
        "pipeline.groups_per_step": lambda c: c.pipeline.groups_per_step,
        "critic.shared_coef": lambda c: c.critic.shared_coef,
        "critic.warmup_alone": lambda c: c.critic.warmup_alone,
        "algorithm.group_size": lambda c: c.algorithm.group_size,
        "algorithm.epochs": lambda c: c.algorithm.epochs,
        "algorithm.mini_batches": lambda c: c.algorithm.mini_batches,
        "queue.shards": lambda c: c.queue.shards,
        "queue.journal.enabled": lambda c: c.queue.journal.enabled,
    }
    for key, value in kept.items():
        if value(config) != value(stored):
            raise ConfigError(f"{key}={value(config)}: a resumed run keeps its {value(stored)}")
    began, begins = (Dials(one.algorithm.row, one.settings).values for one in (stored, config))
    for name in began.keys() & begins.keys():
        if begins[name] != began[name]:
            key = f"params.{name}" if name in stored.settings.params else name
            raise ConfigError(
                f"algorithm.{key}={begins[name]}: a resumed run goes on with what it had come to"
            )
    before, now = stored.pipeline.max_staleness, config.pipeline.max_staleness
    if now < before:
        raise ConfigError(
            f"pipeline.max_staleness={now}: a resumed run has prompts in flight for {before};"
            " it may only grow"
        )


def _load_position(checkpoint: Checkpoint, prompts: "PromptStream") -> None:
    """Have prompts go on where a checkpoint is; raises ConfigError if it is of other prompts."""
    try:
        Ledger.from_state(checkpoint.state["ledger"])
        prompts.load_state_dict(checkpoint.state["prompts"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--resume {checkpoint.path}: state.json: {type(error).__name__}: {error}"
        ) from None


@contextlib.contextmanager
def _run_directory(config: RunConfig, resume: ResumePoint | None) -> Iterator[RolloutLog]:
    """Make the directory of a new run, or cut a resumed one back to its checkpoint.

    A new run that is refused or interrupted before its first step leaves none behind, and one that
    does not get so far gives the directory back to the run it was to replace.
    """
    log, folder = RolloutLog(config.run_dir), config.run_dir
    replaced = folder.with_name(f".{folder.name}.replaced")
    _write_run_dir(config, resume, log, replaced)
    try:
        yield log
    except BaseException as error:
        metrics = folder / METRICS_FILE
        has_steps = metrics.exists() and metrics.stat().st_size
        is_refused = isinstance(error, ConfigError | KeyboardInterrupt)
        if resume is None and not has_steps and (is_refused or replaced.exists()):
            shutil.rmtree(folder)
            if replaced.exists():
                replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _write_run_dir(
    config: RunConfig, resume: ResumePoint | None, log: RolloutLog, replaced: Path
) -> None:
    try:
        if resume is None:
            if config.run_dir.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                config.run_dir.rename(replaced)
            config.run_dir.mkdir(parents=True)
        else:
            resume.discard_later()
            log.discard_after(resume.version)
        write_whole(config.run_dir / "config.yaml", dump_config(config))
    except OSError as error:
        raise ConfigError(f"run directory {config.run_dir}: {error.strerror or error}") from None


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
