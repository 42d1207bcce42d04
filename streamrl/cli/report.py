"""`streamrl report`: a run's bottleneck and possible fixes, a page of charts, or an audit.

The command writes no files but that of --html. The run may still be active or have been killed; a
torn last record is ignored.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from streamrl.buffer.run_log import LedgerAudit, audit_run_log, read_history
from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output.output_files import check_html_file, write_output_file
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import read_jsonl
from streamrl.messages import parse_uid
from streamrl.planner.calibration import advice
from streamrl.planner.calibration.run_trace import describe_missing_run, load_run_trace
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
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
        help="history of one prompt, epoch:index:attempt, and of its later attempts; requires"
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
        _check_uid(arguments.uid, audit)
        events = trace_uid(arguments.uid, _read_run_log(run_dir), _read_events(run_dir))
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
    """Return run log entries and events about a uid, or a later attempt of its prompt, by time.

    Each returned entry has a `uid` and a `source`: the run log or events.jsonl. A resume of the run
    (an entry of kind "open") is returned for each group in flight at that moment, and for each
    group whose training step is repeated (`again`).
    """
    epoch, index, attempt = parse_uid(uid)

    def matches(other: str) -> bool:
        prefix, _, number = other.rpartition(":")
        return prefix == f"{epoch}:{index}" and int(number) >= attempt

    matching = [*_select_log_entries(entries, matches), *_select_events(events, matches)]
    return sorted(matching, key=lambda entry: float(entry["time"]))


def _select_log_entries(
    entries: Iterable[LogEntry], matches: Callable[[str], bool]
) -> Iterator[LogEntry]:
    in_flight: set[str] = set()
    trained: dict[str, int] = {}
    for entry in entries:
        kind, repeated_uids = entry["kind"], set[str]()
        facts = {
            "source": RUN_LOG_FOLDER,
            **{k: v for k, v in entry.items() if k not in ("uid", "uids")},
        }
        if kind == "open":
            repeated_uids = {uid for uid, version in trained.items() if version >= entry["version"]}
            uids = sorted(in_flight | repeated_uids)
        else:
            uids = [u for u in entry.get("uids") or [entry["uid"]] if matches(u)]
            change = in_flight.update if kind == "admit" else in_flight.difference_update
            change(uids)
        if kind == "step":
            trained.update((uid, entry["version"]) for uid in uids)
        for uid in uids:
            yield {
                **facts,
                "uid": uid,
                **({"again": uid in repeated_uids} if kind == "open" else {}),
            }


def _select_events(
    events: Iterable[LogEntry], matches: Callable[[str], bool]
) -> Iterator[LogEntry]:
    for event in events:
        # A stall event lists several uids in one field.
        named = f"{event.get('uid', '')} {event.get('uids', '')}".split()
        facts = {k: v for k, v in event.items() if k not in ("event", "uid", "uids")}
        for uid in filter(matches, named):
            yield {"source": EVENTS_FILE, "kind": event["event"], **facts, "uid": uid}


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
    lines = [
        f"{run_dir}: {audit.num_steps} steps, {audit.num_starts} starts{last}",
        f"ledger      {balance}",
        f"drops       {drops or 'none'}",
    ]
    for epoch, parts in audit.counts_by_epoch.items():
        trained, in_flight = parts["trained"], parts["in_flight"]
        lines.append(f"epoch {epoch:<6}{trained} prompts trained, {in_flight} in flight")
    if audit.in_flight:
        lines.append(f"in flight   {' '.join(_truncate_list(audit.in_flight))}")
    once = f"{counts.trained} uids, each exactly once"
    lines.append(f"trained     {'not each uid exactly once:' if problems else once}")
    return [*lines, *(f"problem     {problem}" for problem in _truncate_list(problems))]


def _truncate_list(items: Sequence[str]) -> list[str]:
    suffix = [f"and {len(items) - MAX_SHOWN_UIDS} more"] if len(items) > MAX_SHOWN_UIDS else []
    return [*items[:MAX_SHOWN_UIDS], *suffix]


def _format_entry(entry: LogEntry) -> str:
    return f"{_format_time(entry['time'])}  {entry['uid']}  {_describe_entry(entry)}"


def _describe_entry(entry: LogEntry) -> str:
    if entry["source"] == EVENTS_FILE:
        facts = (f"{k}={v}" for k, v in entry.items() if k not in ("source", "kind", "time", "uid"))
        return f"event {entry['kind']}: {', '.join(facts)}"
    match entry["kind"]:
        case "open":
            again = ", and its step is repeated" if entry["again"] else ""
            return f"the run resumes from version {entry['version']}{again}"
        case "admit":
            return f"admitted at version {entry['version']}"
        case "step":
            return f"trained at version {entry['version']}: step {entry['version'] + 1}"
    outcome = "filtered" if entry["filtered"] else f"dropped ({entry['cause']})"
    return f"{outcome}: {entry['reason']}"


def _format_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).isoformat(sep=" ", timespec="milliseconds")


def _read_run_log(run_dir: Path) -> Iterator[LogEntry]:
    if not os.path.isfile(run_dir / "config.yaml"):
        raise ConfigError(f"--ledger {run_dir}: not a run: {describe_missing_run(run_dir)}")
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    if not os.path.isdir(folder):
        raise ConfigError(
            f"--ledger {run_dir}: no log in journal/{RUN_LOG_FOLDER}/: either the run has not"
            " started streaming, or queue.journal.enabled=false"
        )
    return read_history(folder)


def _read_events(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(run_dir / EVENTS_FILE)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_uid(uid: str, audit: LedgerAudit) -> None:
    if uid in audit.admitted:
        return
    nearest = min(audit.admitted, key=lambda other: _compute_uid_distance(other, uid), default=None)
    hint = f"the nearest is {nearest}" if nearest else "the log is still empty"
    raise ConfigError(f"--uid {uid}: not in the run log. Give epoch:index:attempt; {hint}")


def _compute_uid_distance(candidate: str, uid: str) -> tuple[int, ...]:
    """Return differences of epoch, index and attempt; fields missing in `uid` are left out."""
    numbers = [int(field) for field in uid.split(":") if field.isdecimal()]
    return tuple(abs(a - b) for a, b in zip(parse_uid(candidate), numbers, strict=False))
