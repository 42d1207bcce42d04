"""`streamrl report`: a run's bottleneck and possible fixes, a page of charts, or an audit.

The command writes no files but that of --html. The run may still be active or have been killed; a
torn last record is ignored.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from streamrl.buffer.run_log import LedgerAudit, audit_run_log, read_history
from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output.output_files import check_html_file, write_output_file
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_jsonl
from streamrl.files.printable_text import format_quantity
from streamrl.planner.calibration import advice
from streamrl.planner.calibration.run_trace import load_run_trace
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.telemetry.page.page import RunPage
from streamrl.telemetry.page.run_record import RunReader
from streamrl.telemetry.progress import show_progress
from streamrl.telemetry.sinks import EVENTS_FILE

LogEntry = Mapping[str, Any]
MAX_SHOWN_UIDS = 20
"""Limit for the text report; --json lists every uid."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "streamrl report RUN [--json]\n"
        "       streamrl report RUN [RUN ...] --html FILE\n"
        "       streamrl report --ledger RUN [--uid UID] [--json]"
    )
    parser.add_argument(
        "run_dirs",
        type=parse_path,
        nargs="*",
        metavar="RUN",
        help="run directory; report its bottleneck",
    )
    parser.add_argument(
        "--html",
        type=parse_path,
        metavar="FILE",
        help="write a page of charts, which needs neither network nor server; several runs overlay",
    )
    parser.add_argument(
        "--ledger",
        type=parse_path,
        metavar="RUN",
        help="audit the run log of a run directory: the state of every admitted prompt",
    )
    parser.add_argument(
        "--uid",
        type=parse_nonempty,
        metavar="UID",
        help="history of one prompt, epoch:index:attempt, and of its other attempts; requires"
        " --ledger",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return exit code 1 if `--ledger` finds a ledger out of balance."""
    _check_options(arguments)
    if arguments.html is not None:
        return _write_page(arguments)
    if arguments.run_dirs:
        return _print_run_report(arguments)
    run_dir: Path = arguments.ledger
    with show_progress(f"reading {run_dir}"):
        audit = audit_run_log(_read_run_log(run_dir))
    events = []
    if arguments.uid is not None:
        if arguments.uid not in audit.admitted:
            raise ConfigError(
                f"--uid {arguments.uid}: not in the run log. Give epoch:index:attempt of one of its"
                f" {len(audit.admitted)} groups"
            )
        recorded = read_jsonl(run_dir / EVENTS_FILE)
        events = trace_uid(arguments.uid, _read_run_log(run_dir), recorded)
    if arguments.json:
        ledger = to_json(audit)
        print(json.dumps(ledger if arguments.uid is None else {**ledger, "history": events}))
    elif arguments.uid is None:
        print("\n".join(describe_ledger(run_dir, audit)))
    else:
        print("\n".join(map(_format_entry, events)))
    return 1 if audit.problems else 0


def _check_options(arguments: argparse.Namespace) -> None:
    if bool(arguments.run_dirs) == (arguments.ledger is not None):
        raise ConfigError(
            "report: name a RUN to find its bottleneck, or --ledger RUN to audit its run log"
        )
    if arguments.html is not None and (arguments.ledger or arguments.json):
        raise ConfigError("report: --html needs RUN, and no other option")
    if len(arguments.run_dirs) > 1 and arguments.html is None:
        raise ConfigError(f"report: {len(arguments.run_dirs)} runs: several need --html FILE")
    if arguments.uid is not None and arguments.ledger is None:
        raise ConfigError("report: --uid needs --ledger RUN")


def _write_page(arguments: argparse.Namespace) -> int:
    path: Path = arguments.html
    check_html_file(path)
    for run_dir in arguments.run_dirs:
        check_run_dir(run_dir)
    page = RunPage([RunReader(path) for path in arguments.run_dirs], advice.BottleneckText())
    with show_progress(f"drawing {path}"):
        write_output_file("--html", path, page.render())
    runs = f"{len(arguments.run_dirs)} runs" if len(arguments.run_dirs) > 1 else "the run"
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, of {runs}")
    return 0


def _print_run_report(arguments: argparse.Namespace) -> int:
    with show_progress(f"reading {arguments.run_dirs[0]}"):
        measured = load_run_trace(arguments.run_dirs[0])
    if arguments.json:
        print(json.dumps(advice.report_to_json(measured)))
    else:
        print("\n".join(advice.describe_run(measured)))
    return 0


def trace_uid(uid: str, entries: Iterable[LogEntry], events: Iterable[LogEntry]) -> list[LogEntry]:
    """Return run log entries and events that name a uid, or another attempt of its prompt, by time.

    Each returned entry has a `uid` and a `source`: the run log or events.jsonl.
    """
    prompt, history = uid.rpartition(":")[0] + ":", []
    for source, records in ((RUN_LOG_FOLDER, entries), (EVENTS_FILE, events)):
        for record in records:
            facts = {key: value for key, value in record.items() if key not in ("uid", "uids")}
            several = record.get("uids", ())
            # A stall event lists several uids in one field.
            named = several.split() if isinstance(several, str) else several
            for name in (*named, record.get("uid", "")):
                if name.startswith(prompt):
                    history.append({"source": source, **facts, "uid": name})
    return sorted(history, key=lambda entry: float(entry["time"]))


def to_json(audit: LedgerAudit) -> dict[str, Any]:
    counts = audit.counts
    return {
        "ledger": {**vars(counts), "drops": dict(counts.drops)},
        "epochs": audit.counts_by_epoch,
        "trained": audit.trained,
        "in_flight": audit.in_flight,
        "problems": audit.problems,
        "steps": audit.num_steps,
        "starts": audit.num_starts,
    }


def describe_ledger(run_dir: Path, audit: LedgerAudit) -> list[str]:
    """Format the audit of a run's ledger: counts by outcome, drops, epochs, problems."""
    counts, problems = audit.counts, audit.problems
    balance = f"{counts}{', which does not balance' if problems else ''}"
    last = f", the last entry at {_format_time(audit.last_time)}" if audit.last_time else ""
    drops = ", ".join(f"{cause} {count}" for cause, count in counts.drops)
    steps = format_quantity(audit.num_steps, "step")
    lines = [
        f"{run_dir}: {steps}, {format_quantity(audit.num_starts, 'start')}{last}",
        f"ledger      {balance}",
        f"drops       {drops or 'none'}",
    ]
    for epoch, parts in audit.counts_by_epoch.items():
        trained, in_flight = parts["trained"], parts["in_flight"]
        lines.append(
            f"epoch {epoch:<6}{format_quantity(trained, 'prompt')} trained, {in_flight} in flight"
        )
    if audit.in_flight:
        lines.append(f"in flight   {' '.join(_truncate_list(audit.in_flight))}")
    once = f"{format_quantity(counts.trained, 'uid')}, each exactly once"
    lines.append(f"trained     {'not each uid exactly once:' if problems else once}")
    return [*lines, *(f"problem     {problem}" for problem in _truncate_list(problems))]


def _truncate_list(items: Sequence[str]) -> list[str]:
    suffix = [f"and {len(items) - MAX_SHOWN_UIDS} more"] if len(items) > MAX_SHOWN_UIDS else []
    return [*items[:MAX_SHOWN_UIDS], *suffix]


def _format_entry(entry: LogEntry) -> str:
    hidden = ("source", "time", "uid")
    facts = ", ".join(f"{key}={value}" for key, value in entry.items() if key not in hidden)
    return f"{_format_time(entry['time'])}  {entry['uid']}  {facts}"


def _format_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).isoformat(sep=" ", timespec="milliseconds")


def _read_run_log(run_dir: Path) -> Iterator[LogEntry]:
    check_run_dir(run_dir)
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    if not os.path.isdir(folder):
        raise ConfigError(
            f"--ledger {run_dir}: no log in journal/{RUN_LOG_FOLDER}/: either the run has not"
            " started streaming, or queue.journal.enabled=false"
        )
    return read_history(folder)
