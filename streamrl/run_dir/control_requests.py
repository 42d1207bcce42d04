"""Requests to a run that is under way: small files in its directory, each answered by another.

Whoever sees the directory can ask, from any machine and without Ray. A request appears whole under
its name; the run takes it by giving it another, and answers with a file. Who asked removes both.
"""

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.files.atomic_write import wrap_disk_errors, write_atomic
from streamrl.files.bounded_read import read_small_json, wrap_file_errors

REQUESTS_FOLDER = "requests"
TAKE_TIMEOUT_S = 15.0
"""A run that is under way takes a request within this time, s."""
PLACE_TIMEOUT_S = 60.0
"""A replica that is to join has this long until there is a process for it, s."""
LEAVE_TIMEOUT_S = 30.0
"""One that is to leave has this long to hand back what it holds, s."""
START_MARGIN_S = 120.0
"""What a start may take beside the engine's own, s."""
POLL_INTERVAL_S = 0.1
_REQUEST_SUFFIX, _TAKEN_SUFFIX, _ANSWER_SUFFIX = ".request.json", ".taken.json", ".answer.json"


@dataclass(frozen=True)
class ScaleRequest:
    """How many replicas of which roles a run is asked to have."""

    id: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class ScaleAnswer:
    """What came of a request, in lines; `is_done` is whether it was all that was asked for."""

    lines: Sequence[str]
    is_done: bool


class ScaleRequestInbox:
    """The run's end: the folder is there for as long as somebody answers. No method waits."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / REQUESTS_FOLDER

    def open(self) -> None:
        """From now on there is somebody to ask. What an earlier run left is removed."""
        self.close()
        with wrap_disk_errors(self._folder):
            self._folder.mkdir()

    def take_requests(self) -> list[ScaleRequest]:
        """The requests that have come, the earliest first. What is none is answered as such."""
        found = []
        for path in sorted(self._folder.glob(f"*{_REQUEST_SUFFIX}")):
            name = path.name.removesuffix(_REQUEST_SUFFIX)
            try:
                path.rename(self._folder / f"{name}{_TAKEN_SUFFIX}")
            except FileNotFoundError:
                continue  # it was taken back
            try:
                found.append(_read_request(name, self._folder / f"{name}{_TAKEN_SUFFIX}"))
            except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
                self.write_answer(name, ScaleAnswer([f"{path.name}: no request: {error}"], False))
        return found

    def write_answer(self, request: str, answer: ScaleAnswer) -> None:
        """Answer a request by its id. Nobody may be left to read it."""
        path = self._folder / f"{request}{_ANSWER_SUFFIX}"
        text = json.dumps({"lines": list(answer.lines), "is_done": answer.is_done})
        if self._folder.is_dir():
            with wrap_disk_errors(path):
                write_atomic(path, text)

    def close(self) -> None:
        """Nobody answers any more. The folder goes with all in it, which tells those who wait."""
        closed = self._folder.with_name(f".{REQUESTS_FOLDER}.closed")
        shutil.rmtree(closed, ignore_errors=True)
        # There may be none, and a disk may refuse: then those who ask give up by themselves.
        with contextlib.suppress(OSError):
            # Renamed first: who asks at this moment finds no folder to put a file into.
            self._folder.rename(closed)
        shutil.rmtree(closed, ignore_errors=True)


def request_scale(
    run_dir: Path,
    counts: Mapping[str, int],
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ScaleAnswer:
    """Ask the run for so many replicas and wait for its answer.

    Raises ConfigError if nobody takes the request within TAKEN_S, which takes it back, if the run
    ends over it, and if there is no answer within `timeout_s`.
    """
    folder = run_dir / REQUESTS_FOLDER
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{run_dir}: the run is not running, or still starting")
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
    asked, taken, answer = (
        folder / f"{name}{kind}" for kind in (_REQUEST_SUFFIX, _TAKEN_SUFFIX, _ANSWER_SUFFIX)
    )
    started = clock()
    try:
        write_atomic(asked, json.dumps({"counts": dict(counts)}))
        while not answer.exists():
            waited_s = clock() - started
            if waited_s > TAKE_TIMEOUT_S and _withdraw_request(asked):
                text = f"{run_dir}: no answer within {TAKE_TIMEOUT_S:g} s: the run is not running"
                raise ConfigError(text)
            if not any(path.exists() for path in (asked, taken, answer)):
                raise ConfigError(f"{run_dir}: the run ended before it answered")
            if waited_s > timeout_s:
                raise ConfigError(
                    f"{run_dir}: no answer within {timeout_s:g} s; what was asked for may still"
                    " come: see events.jsonl"
                )
            sleep(POLL_INTERVAL_S)
        with wrap_file_errors(answer):
            found = read_small_json(answer)
            if not isinstance(found, dict) or not isinstance(found.get("lines"), list):
                raise ValueError("no answer of a run")
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: the run has ended") from None
    finally:
        for path in (asked, taken, answer):
            path.unlink(missing_ok=True)
    return ScaleAnswer([str(line) for line in found["lines"]], found.get("is_done") is True)


def _withdraw_request(asked: Path) -> bool:
    """Whether a request is taken back: nobody has taken it so far."""
    try:
        asked.unlink()
    except FileNotFoundError:
        return False
    return True


def _read_request(name: str, path: Path) -> ScaleRequest:
    """Raises ValueError, LookupError, TypeError or AttributeError for what is no request."""
    counts = read_small_json(path)["counts"]
    for role, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{role}={count!r}: must be a whole number, 1 or more")
    return ScaleRequest(name, dict(counts))
