"""`streamrl report`: what bounds a run and what would help; what its books say of every prompt.

Nothing is written. A run may be under way, or have been killed: a torn last record is left out.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from streamrl.buffer.books.ledger_audit import LedgerAudit, audit_run_log
from streamrl.buffer.books.run_log import read_history
from streamrl.calibration.advice import recommend_settings
from streamrl.calibration.prediction import PlannedRun
from streamrl.calibration.run_trace import describe_missing_run, load_run_trace
from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output import advice_report
from streamrl.errors import ConfigError
from streamrl.messages import parse_uid
from streamrl.placement import Cluster
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from streamrl.telemetry.sinks import EVENTS_FILE, read_jsonl

LogEntry = Mapping[str, Any]
MAX_SHOWN_UIDS = 20
"""Most uids that one part of the text names; --json has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl report`."""
    parser.usage = (
        "streamrl report RUN [--what-if [--cluster C]] [--json] | --ledger RUN [--uid UID] [--json]"
    )
    parser.add_argument(
        "run_dir",
        type=parse_path,
        nargs="?",
        metavar="RUN",
        help="a run directory: which stage bounds it",
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="simulate, for some seconds, what other settings would make of it",
    )
    parser.add_argument(
        "--cluster",
        type=parse_nonempty,
        help="what it was made on, as in 8xH100; not needed on one machine's CPU cores",
    )
    parser.add_argument(
        "--ledger",
        type=parse_path,
        metavar="RUN",
        help="the accounts of a run directory: where every admitted prompt is",
    )
    parser.add_argument(
        "--uid",
        type=parse_nonempty,
        help="the history of one prompt, epoch:index:attempt, and of its later attempts",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0; of books 1 if they do not balance."""
    _check_options(arguments)
    if arguments.run_dir is not None:
        return _print_run_report(arguments)
    run_dir: Path = arguments.ledger
    entries = list(_read_run_log(run_dir))
    account = audit_run_log(entries)
    events = []
    if arguments.uid is not None:
        _check_uid(arguments.uid, account)
        events = trace_uid(arguments.uid, entries, _read_events(run_dir))
    if arguments.json:
        found = to_json(account)
        print(json.dumps(found if arguments.uid is None else {**found, "history": events}))
    elif arguments.uid is None:
        print("\n".join(describe_ledger(run_dir, account, entries)))
    else:
        print("\n".join(map(_format_entry, events)))
    return 1 if account.problems else 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError unless the options belong together."""
    if (arguments.run_dir is None) == (arguments.ledger is None):
        raise ConfigError("report: name a RUN for what bounds it, or --ledger RUN for its books")
    if arguments.what_if and arguments.run_dir is None:
        raise ConfigError("report: --what-if goes with RUN")
    if arguments.cluster and not arguments.what_if:
        raise ConfigError("report: --cluster goes with RUN --what-if")
    if arguments.uid is not None and arguments.ledger is None:
        raise ConfigError("report: --uid goes with --ledger RUN")


def _print_run_report(arguments: argparse.Namespace) -> int:
    """Print what bounds the run, and what would help if that is asked for."""
    measured = load_run_trace(arguments.run_dir)
    cluster = None if arguments.cluster is None else Cluster.from_text(arguments.cluster)
    if arguments.what_if:
        # A cluster that the run does not fit is refused before anything is printed.
        PlannedRun.from_trace(measured, measured.config, cluster)
    if arguments.json:
        found = advice_report.run_to_json(measured)
        if arguments.what_if:
            found |= advice_report.advice_to_json(recommend_settings(measured, cluster))
        print(json.dumps(found))
        return 0
    print("\n".join(advice_report.describe_run(measured)), flush=True)
    if not arguments.what_if:
        print("what other settings would make of it: --what-if, which takes some seconds")
        return 0
    print("\n".join(advice_report.describe_advice(measured, recommend_settings(measured, cluster))))
    return 0


def trace_uid(uid: str, entries: Iterable[LogEntry], events: Iterable[LogEntry]) -> list[LogEntry]:
    """What concerns a uid or a later attempt of its prompt, in the order of time.

    Each names the uid it concerns and its `source`: the books, or events.jsonl. That the books were
    opened anew, by a resume, concerns what is in flight then and what is trained `surplus_uids`.
    """
    epoch, index, attempt = parse_uid(uid)

    def is_meant(other: str) -> bool:
        prefix, _, number = other.rpartition(":")
        return prefix == f"{epoch}:{index}" and int(number) >= attempt

    found = [*_select_log_entries(entries, is_meant), *_select_events(events, is_meant)]
    return sorted(found, key=lambda entry: float(entry["time"]))


def _select_log_entries(
    entries: Iterable[LogEntry], is_meant: Callable[[str], bool]
) -> Iterator[LogEntry]:
    in_flight: set[str] = set()
    trained: dict[str, int] = {}
    for entry in entries:
        kind, again = entry["kind"], set[str]()
        facts = {
            "source": RUN_LOG_FOLDER,
            **{k: v for k, v in entry.items() if k not in ("uid", "uids")},
        }
        if kind == "open":
            again = {uid for uid, version in trained.items() if version >= entry["version"]}
            meant = sorted(in_flight | again)
        else:
            meant = [u for u in entry.get("uids") or [entry["uid"]] if is_meant(u)]
            change = in_flight.update if kind == "admit" else in_flight.difference_update
            change(meant)
        if kind == "step":
            trained.update((uid, entry["version"]) for uid in meant)
        for uid in meant:
            yield {**facts, "uid": uid, **({"again": uid in again} if kind == "open" else {})}


def _select_events(
    events: Iterable[LogEntry], is_meant: Callable[[str], bool]
) -> Iterator[LogEntry]:
    for event in events:
        # A stall names the first few of its groups in one field.
        named = f"{event.get('uid', '')} {event.get('uids', '')}".split()
        facts = {k: v for k, v in event.items() if k not in ("event", "uid", "uids")}
        for uid in filter(is_meant, named):
            yield {"source": EVENTS_FILE, "kind": event["event"], **facts, "uid": uid}


def to_json(account: LedgerAudit) -> dict[str, Any]:
    """The account for scripts."""
    counts = account.counts
    return {
        "ledger": {**vars(counts), "drops": dict(counts.drops)},
        "epochs": account.counts_by_epoch,
        "trained": account.trained,
        "in_flight": account.in_flight,
        "problems": account.problems,
        "steps": account.num_steps,
        "starts": account.num_starts,
    }


def describe_ledger(run_dir: Path, account: LedgerAudit, entries: Sequence[LogEntry]) -> list[str]:
    """The lines a person reads."""
    counts, problems = account.counts, account.problems
    law = f"{counts}{', which does not add up' if problems else ''}"
    last = f", the last entry at {_format_time(entries[-1]['time'])}" if entries else ""
    drops = ", ".join(f"{cause} {count}" for cause, count in counts.drops)
    lines = [
        f"{run_dir}: {account.num_steps} steps, {account.num_starts} starts{last}",
        f"ledger      {law}",
        f"drops       {drops or 'none'}",
    ]
    for epoch, parts in account.counts_by_epoch.items():
        trained, in_flight = parts["trained"], parts["in_flight"]
        lines.append(f"epoch {epoch:<6}{trained} prompts trained, {in_flight} in flight")
    if account.in_flight:
        lines.append(f"in flight   {' '.join(_truncate_list(account.in_flight))}")
    once = f"{counts.trained} uids, each exactly once"
    lines.append(f"trained     {'not each uid exactly once:' if problems else once}")
    return [*lines, *(f"problem     {problem}" for problem in _truncate_list(problems))]


def _truncate_list(items: Sequence[str]) -> list[str]:
    more = [f"and {len(items) - MAX_SHOWN_UIDS} more"] if len(items) > MAX_SHOWN_UIDS else []
    return [*items[:MAX_SHOWN_UIDS], *more]


def _format_entry(entry: LogEntry) -> str:
    return f"{_format_time(entry['time'])}  {entry['uid']}  {_describe_entry(entry)}"


def _describe_entry(entry: LogEntry) -> str:
    """What an entry says, in words."""
    if entry["source"] == EVENTS_FILE:
        facts = (f"{k}={v}" for k, v in entry.items() if k not in ("source", "kind", "time", "uid"))
        return f"event {entry['kind']}: {', '.join(facts)}"
    match entry["kind"]:
        case "open":
            again = ", and its step is made again" if entry["again"] else ""
            return f"the run goes on from version {entry['version']}{again}"
        case "admit":
            return f"admitted at version {entry['version']}"
        case "step":
            return f"trained at version {entry['version']}: step {entry['version'] + 1}"
    how = "filtered" if entry["filtered"] else f"dropped ({entry['cause']})"
    return f"{how}: {entry['reason']}"


def _format_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).isoformat(sep=" ", timespec="milliseconds")


def _read_run_log(run_dir: Path) -> Iterator[LogEntry]:
    """Every entry of the books' log. Raises ConfigError if there is none."""
    if not os.path.isfile(run_dir / "config.yaml"):
        raise ConfigError(f"--ledger {run_dir}: no run: {describe_missing_run(run_dir)}")
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    if not os.path.isdir(folder):
        raise ConfigError(
            f"--ledger {run_dir}: no log in journal/{RUN_LOG_FOLDER}/: the run has not"
            f" begun to stream, or"
            " has queue.journal.enabled=false"
        )
    return read_history(folder)


def _read_events(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(run_dir / EVENTS_FILE)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_uid(uid: str, account: LedgerAudit) -> None:
    """Raise ConfigError, naming the nearest one, for a uid that the log does not have."""
    if uid in account.admitted:
        return
    nearest = min(
        account.admitted, key=lambda known: _compute_uid_distance(known, uid), default=None
    )
    hint = f"the nearest is {nearest}" if nearest else "it has none yet"
    raise ConfigError(f"--uid {uid}: not in the log, which has epoch:index:attempt; {hint}")


def _compute_uid_distance(known: str, uid: str) -> tuple[int, ...]:
    """How far a uid is from one that may be no uid at all: by epoch, then index, then attempt."""
    given = [int(part) for part in uid.split(":") if part.isdecimal()]
    return tuple(abs(a - b) for a, b in zip(parse_uid(known), given, strict=False))
