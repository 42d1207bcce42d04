"""Control requests by files: torn, simultaneous, late, or without a run."""

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from streamrl.errors import ConfigError, DiskError
from streamrl.run_dir import control_requests
from streamrl.run_dir.control_requests import (
    REQUESTS_FOLDER,
    TAKE_TIMEOUT_S,
    ScaleAnswer,
    ScaleRequest,
    ScaleRequestInbox,
    request_scale,
)


class PollingClock:
    """Clock that advances in sleep; the run acts at every poll."""

    def __init__(self, run: Callable[[float], object]) -> None:
        self.now = 0.0
        self._run = run

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._run(self.now)


def send_request(run_dir: Path, run: Callable[[float], object], **counts: int) -> ScaleAnswer:
    clock = PollingClock(run)
    polled = SimpleNamespace(monotonic=clock, sleep=clock.sleep, time_ns=time.time_ns)
    with mock.patch.object(control_requests, "time", polled):
        return request_scale(run_dir, counts, timeout_s=100.0)


def open_inbox(run_dir: Path) -> ScaleRequestInbox:
    inbox = ScaleRequestInbox(run_dir)
    inbox.open()
    return inbox


def test_a_request_is_taken_once_answered_and_removed(tmp_path: Path):
    inbox = open_inbox(tmp_path)
    requests: list[ScaleRequest] = []

    def run(now: float) -> None:
        requests.extend(inbox.take_requests())
        if now > 50.0:
            inbox.write_answer(requests[0].id, ScaleAnswer(["generators: 2 -> 4"], True))

    assert send_request(tmp_path, run, generator=4) == ScaleAnswer(["generators: 2 -> 4"], True)
    assert [request.counts for request in requests] == [{"generator": 4}]
    assert list((tmp_path / REQUESTS_FOLDER).iterdir()) == []


def test_simultaneous_clients_get_their_own_answers(tmp_path: Path):
    inbox = open_inbox(tmp_path)
    inner: list[ScaleAnswer] = []

    def answer_all(now: float) -> None:
        for request in inbox.take_requests():
            inbox.write_answer(request.id, ScaleAnswer([str(request.counts["generator"])], True))

    def run(now: float) -> None:
        if not inner:
            inner.append(send_request(tmp_path, answer_all, generator=5))
        answer_all(now)

    outer = send_request(tmp_path, run, generator=4)
    assert (outer.lines, inner[0].lines) == (["4"], ["5"])


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "", '{"counts": {"gen', "[]", '{"count": 3}', '{"counts": {"generator": 0}}'],
)
def test_an_invalid_request_is_answered_as_invalid(tmp_path: Path, text: str):
    inbox = open_inbox(tmp_path)
    (tmp_path / REQUESTS_FOLDER / "1.request.json").write_text(text)
    assert inbox.take_requests() == []
    answer = json.loads((tmp_path / REQUESTS_FOLDER / "1.answer.json").read_text())
    assert not answer["is_done"] and "invalid request" in answer["lines"][0]


def test_a_disk_error_while_answering_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    inbox = open_inbox(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(DiskError, match=r"/1.answer.json cannot be written: No space left"):
            inbox.write_answer("1", ScaleAnswer([], True))
    inbox.close()
    assert list(tmp_path.iterdir()) == []


def test_a_request_without_a_live_run_fails(tmp_path: Path):
    with pytest.raises(ConfigError, match="the run is not running, or still starting"):
        send_request(tmp_path, lambda now: None, generator=2)
    inbox = open_inbox(tmp_path)
    times: list[float] = []
    with pytest.raises(ConfigError, match=f"no answer within {TAKE_TIMEOUT_S:g} s: the run is not"):
        send_request(tmp_path, times.append, generator=2)
    assert TAKE_TIMEOUT_S < times[-1] < TAKE_TIMEOUT_S + 1
    assert inbox.take_requests() == [], "the client withdrew the request"


def test_a_request_to_a_dead_run_does_not_reach_the_resumed_run(tmp_path: Path):
    dead = open_inbox(tmp_path)
    (tmp_path / REQUESTS_FOLDER / "1.request.json").write_text('{"counts": {"generator": 9}}')
    (tmp_path / REQUESTS_FOLDER / "0.request.json").write_text('{"counts": {"generator": 8}}')
    assert len(dead.take_requests()) == 2
    for name in ("2.request.json", "3.answer.json", ".4.request.json.partial"):
        (tmp_path / REQUESTS_FOLDER / name).write_text('{"counts": {"generator": 7}}')
    assert open_inbox(tmp_path).take_requests() == []
    assert list((tmp_path / REQUESTS_FOLDER).iterdir()) == []


@pytest.mark.parametrize("end", [ScaleRequestInbox.close, ScaleRequestInbox.open])
def test_waiting_clients_fail_when_the_run_ends_or_resumes(
    tmp_path: Path, end: Callable[[ScaleRequestInbox], None]
):
    inbox = open_inbox(tmp_path)
    times: list[float] = []

    def run(now: float) -> None:
        times.append(now)
        end(inbox)

    with pytest.raises(ConfigError, match="ended before it answered"):
        send_request(tmp_path, run, generator=2)
    assert len(times) == 1


def test_a_taken_request_without_an_answer_times_out(tmp_path: Path):
    inbox = open_inbox(tmp_path)
    with pytest.raises(ConfigError, match=r"no answer within 100 s; the change may"):
        send_request(tmp_path, lambda now: inbox.take_requests(), generator=2)
