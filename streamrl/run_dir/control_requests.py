"""Control requests to a running run: files in the run directory, answered by other files.

Any process with access to the directory can send a request, without Ray:

    client: write  <id>.request.json          run: rename to <id>.taken.json
    run:    write  <id>.answer.json           client: read the answer, remove all three
"""

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from streamrl.errors import ConfigError
from streamrl.files.atomic_write import wrap_disk_errors, write_atomic
from streamrl.files.bounded_read import read_small_json, wrap_file_errors

REQUESTS_FOLDER = "requests"
TAKE_TIMEOUT_S = 15.0
"""Longest time until a live run takes a request."""
PLACE_TIMEOUT_S = 60.0
"""Timeout for Ray to place a joining replica."""
LEAVE_TIMEOUT_S = 30.0
"""Timeout for a leaving replica to return its groups."""
START_MARGIN_S = 120.0
"""Time for a joining replica to start, beyond the timeout of its engine."""
POLL_INTERVAL_S = 0.1
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
_REQUEST_SUFFIX, _TAKEN_SUFFIX, _ANSWER_SUFFIX = ".request.json", ".taken.json", ".answer.json"


@dataclass(frozen=True)
class ScaleRequest:
    """Request to change the numbers of replicas, by role."""

    id: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class ScaleAnswer:
    """Answer to a scale request: lines for the user.

    is_done: whether all requested replicas joined or left.
    """

    lines: Sequence[str]
    is_done: bool


class ScaleRequestInbox:
    """Folder in the run directory that receives scale requests; the run's side. No method blocks.

    The folder exists as long as the run answers requests.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / REQUESTS_FOLDER

    def open(self) -> None:
        """Create the folder for requests, and remove the requests to an earlier run."""
        self.close()
        with wrap_disk_errors(self._folder):
            self._folder.mkdir()

    def take_requests(self) -> list[ScaleRequest]:
        """Take all new scale requests, oldest first; answer invalid requests with their error."""
        requests = []
        for path in sorted(self._folder.glob(f"*{_REQUEST_SUFFIX}")):
            name = path.name.removesuffix(_REQUEST_SUFFIX)
            try:
                path.rename(self._folder / f"{name}{_TAKEN_SUFFIX}")
            except FileNotFoundError:
                continue  # withdrawn by the client
            try:
                requests.append(_read_request(name, self._folder / f"{name}{_TAKEN_SUFFIX}"))
            except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
                self.write_answer(
                    name, ScaleAnswer([f"{path.name}: invalid request: {error}"], False)
                )
        return requests

    def write_answer(self, request: str, answer: ScaleAnswer) -> None:
        """Write the answer to a scale request, by its id. The client may be gone."""
        path = self._folder / f"{request}{_ANSWER_SUFFIX}"
        text = json.dumps(vars(answer))
        if self._folder.is_dir():
            with wrap_disk_errors(path):
                write_atomic(path, text)

    def close(self) -> None:
        """Remove the folder, by which waiting clients know that the run has ended."""
        closed = self._folder.with_name(f".{REQUESTS_FOLDER}.closed")
        shutil.rmtree(closed, ignore_errors=True)
        # The folder may be missing or the disk may fail; clients then run into their timeout.
        with contextlib.suppress(OSError):
            # Rename before removing: a client that writes now fails instead of waiting.
            self._folder.rename(closed)
        shutil.rmtree(closed, ignore_errors=True)


def request_scale(run_dir: Path, counts: Mapping[str, int], *, timeout_s: float) -> ScaleAnswer:
    """Ask a running run to change the numbers of replicas by role, and wait for the answer.

    Raises ConfigError if the run does not take the request within TAKE_TIMEOUT_S (the request is
    then withdrawn), ends meanwhile, or does not answer within `timeout_s`.
    """
    folder = run_dir / REQUESTS_FOLDER
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{run_dir}: the run is not running, or still starting")
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
    request_path, taken_path, answer_path = (
        folder / f"{name}{kind}" for kind in (_REQUEST_SUFFIX, _TAKEN_SUFFIX, _ANSWER_SUFFIX)
    )
    started = time.monotonic()
    try:
        write_atomic(request_path, json.dumps({"counts": dict(counts)}))
        while not answer_path.exists():
            waited_s = time.monotonic() - started
            if waited_s > TAKE_TIMEOUT_S and _withdraw_request(request_path):
                text = f"{run_dir}: no answer within {TAKE_TIMEOUT_S:g} s: the run is not running"
                raise ConfigError(text)
            if not any(path.exists() for path in (request_path, taken_path, answer_path)):
                raise ConfigError(f"{run_dir}: the run ended before it answered")
            if waited_s > timeout_s:
                raise ConfigError(
                    f"{run_dir}: no answer within {timeout_s:g} s; the change may still"
                    " happen: see events.jsonl"
                )
            time.sleep(POLL_INTERVAL_S)
        with wrap_file_errors(answer_path):
            return msgspec.convert(read_small_json(answer_path), ScaleAnswer)
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: the run has ended") from None
    finally:
        for path in (request_path, taken_path, answer_path):
            path.unlink(missing_ok=True)


def _withdraw_request(request_path: Path) -> bool:
    """Remove a request; return False if the run has taken it already."""
    try:
        request_path.unlink()
    except FileNotFoundError:
        return False
    return True


def _read_request(name: str, path: Path) -> ScaleRequest:
    counts = msgspec.convert(read_small_json(path)["counts"], dict[str, PositiveCount])
    return ScaleRequest(name, counts)
