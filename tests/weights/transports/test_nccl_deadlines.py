"""Deadlines of broadcasts over NCCL, with a stand-in that does what NCCL does if a peer dies.

PyTorch's NCCL groups notice a dead peer late or never, and a wait has no deadline. A watchdog ends
the process at the group's timeout, and when it learns of a lost peer, unless
TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 while the group is made. It then asks all groups of the process
for a dump, which ends the process too, unless TORCH_NCCL_DUMP_ON_TIMEOUT is 0. An operation whose
peer is known to be lost counts as completed, and only a wait with a timeout raises its error.
"""

import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streamrl.weights.transports import collective
from streamrl.weights.transports.collective import CollectiveReader, CollectiveWriter
from tests import forked
from tests.weights.local_transport import LocalReader, LocalWriter, Versions, act_in_broadcast

pytestmark = pytest.mark.xdist_group("ranks")

TIMEOUT_S = 8.0
ENDED_BY_WATCHDOG = 134
ENDED_BY_MONITOR = 135
DYING_VERSION = 1
VERSIONS = Versions(*[1000] * 4, bucket_bytes=4000)


class StandInWork:
    """Operation that reports a lost peer only once the watchdog knows of it, if ever."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.is_known_lost = False

    def has_lost_peer(self) -> bool:
        return bool(self.work.is_completed() and not self.work.is_success())

    def is_completed(self) -> bool:
        return self.is_known_lost or bool(self.work.is_completed() and self.work.is_success())

    def wait(self, timeout: timedelta | None = None) -> None:
        while not self.is_completed():
            time.sleep(0.01)
        if timeout is not None:
            self.work.wait()


class StandInNccl:
    """Gloo group whose operations end only by success or `abort`, or if `reports_lost_peers`."""

    reports_lost_peers = False

    class Options(SimpleNamespace):
        """Options of the group; the default timeout is NCCL's."""

        def __init__(self) -> None:
            super().__init__(_timeout=timedelta(minutes=10), config=SimpleNamespace(blocking=1))

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        assert options.config.blocking == 0, "connecting to a dead rank would never return"
        assert int(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) < TIMEOUT_S + 12
        timeout = timedelta(seconds=TIMEOUT_S)
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._ends_process = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"
        self._dumps = os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") != "0"
        self._timeout_s = options._timeout.total_seconds()
        self._is_aborted = False

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> StandInWork:
        work = StandInWork(self._group.broadcast(tensors, options))
        threading.Thread(target=self._watch, args=(work,), daemon=True).start()
        return work

    def abort(self) -> None:
        self._is_aborted = True

    def _watch(self, work: StandInWork) -> None:
        end_s = time.monotonic() + self._timeout_s
        while not work.is_completed() and not self._is_aborted:
            if self._ends_process and (work.has_lost_peer() or time.monotonic() > end_s):
                os._exit(ENDED_BY_WATCHDOG)
            if self.reports_lost_peers and work.has_lost_peer():
                if self._dumps:
                    os._exit(ENDED_BY_MONITOR)
                work.is_known_lost = True
            time.sleep(0.01)


def use_stand_in() -> None:
    """Make the groups of this process as on GPUs."""
    vars(dist)["ProcessGroupNCCL"] = StandInNccl
    collective.make_gloo_group = collective.make_nccl_group


def publish_versions(pipe: Connection, *, reports_lost_peers: bool) -> None:
    """Publish to the reader `a`, and without it after a failure; send each manifest and failure."""
    use_stand_in()
    StandInNccl.reports_lost_peers = reports_lost_peers
    writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", timeout_s=TIMEOUT_S)
    pipe.send("ready")
    for version in range(DYING_VERSION + 2):
        writer.set_readers({"a": ()} if version <= DYING_VERSION else {})
        pipe.send(VERSIONS.publish(writer, version))
        writer._wait_for_send()
        pipe.send(writer.send_failure)
    writer.close()


def read_versions(pipe: Connection) -> None:
    """Fetch versions as reader `a`; die in the middle of DYING_VERSION."""
    use_stand_in()
    reader = CollectiveReader("a", LocalReader(), timeout_s=TIMEOUT_S)
    pipe.send("ready")
    while True:
        manifest = pipe.recv()
        dies_at = 3 if manifest.version == DYING_VERSION else 0
        with act_in_broadcast(dies_at, lambda: os._exit(1)):
            assert VERSIONS.fetch(reader, manifest)
        pipe.send(reader.fallback_reason)


def start(target: Any, **arguments: Any) -> tuple[Any, Connection]:
    process, pipe = forked.start(target, **arguments)
    assert receive(pipe) == "ready"
    return process, pipe


def receive(pipe: Connection) -> Any:
    assert pipe.poll(60)
    return pipe.recv()


@pytest.mark.parametrize("reports_lost_peers", [False, True])
def test_a_reader_that_dies_in_a_broadcast_does_not_end_the_publisher(reports_lost_peers):
    publisher, published = start(publish_versions, reports_lost_peers=reports_lost_peers)
    reader, fetched = start(read_versions)
    try:
        for version in range(DYING_VERSION + 1):
            fetched.send(receive(published))
            failure = receive(published)
            if version < DYING_VERSION:
                assert failure is None and receive(fetched) is None
        assert failure.startswith("weights version 1 was not sent to a: ")
        assert failure.endswith("timed out during a broadcast") != reports_lost_peers
        manifest = receive(published)
        assert manifest.version == DYING_VERSION + 1 and receive(published) is None
        publisher.join(30)
        assert publisher.exitcode == 0
    finally:
        publisher.kill()
        reader.kill()
