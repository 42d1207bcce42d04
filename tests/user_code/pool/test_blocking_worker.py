"""A worker process for callers without an event loop, in real processes."""

import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from streamrl.user_code.pool import pool as module
from streamrl.user_code.pool.pool import (
    BlockingWorker,
    WorkerCrashError,
    WorkerError,
)
from tests.descendants import descendants

TARGET = "tests.user_code.pool.handlers:serve"


@pytest.fixture
def worker() -> Iterator[BlockingWorker]:
    before, blocking = descendants(), BlockingWorker(TARGET, "", timeout_s=60.0)
    yield blocking
    blocking.close()
    assert not descendants() - before


def test_calls_of_several_threads_share_a_process(worker: BlockingWorker):
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(worker.call(("square", i))))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [i * i for i in range(8)]
    assert worker.call(("pid", None)) == worker.call(("pid", None)) != os.getpid()


def test_an_error_of_the_handler_keeps_the_process_and_an_exit_or_a_hang_replaces_it(
    worker: BlockingWorker,
):
    first = worker.call(("pid", None))
    with pytest.raises(WorkerError):
        worker.call(("square", "x"))
    assert worker.call(("pid", None)) == first
    with pytest.raises(WorkerCrashError, match="exited with code 7"):
        worker.call(("crash", None))
    second = worker.call(("pid", None))
    assert second != first
    assert worker.call(("square", 3)) == 9


def test_a_process_without_calls_ends_and_the_next_call_starts_another(
    worker: BlockingWorker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.05)
    first = worker.call(("pid", None))
    deadline = time.monotonic() + 30
    while psutil.pid_exists(first):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.call(("pid", None)) != first


def test_workers_hash_text_alike(worker: BlockingWorker):
    first = worker.call(("hash_text", "word"))
    worker.close()
    assert worker.call(("hash_text", "word")) == first
