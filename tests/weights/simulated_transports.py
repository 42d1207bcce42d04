"""Transports of `weights.on_device` on the simulated GPU, with both ends in this process.

Only the work of NCCL is replaced: sending.
"""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from streamrl.distributed.devices import get_local_device
from streamrl.weights import buckets
from streamrl.weights.transport import TransportReader, TransportWriter
from streamrl.weights.transports import collective
from streamrl.weights.transports.collective import (
    PUBLISHER_RANK,
    CollectiveReader,
    CollectiveWriter,
)
from tests.simulated_gpu import SimulatedGpu
from tests.weights.local_transport import LocalReader, LocalWriter

TIMEOUT_S = 60.0
HEADER_BYTES = 16
"""Bytes of epoch and version, which a member of a broadcast compares on the host."""

TransportEnds = tuple[TransportWriter, TransportReader]


class FinishedWork:
    """Broadcast that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta) -> None:
        pass


class InProcessGroup:
    """Group of a publisher and a member, which are threads of this process."""

    def __init__(self, rank: int, sent: "queue.Queue[Tensor]") -> None:
        self._rank = rank
        self._sent = sent

    def broadcast(self, tensors: list[Tensor], options: Any) -> FinishedWork:
        (tensor,) = tensors
        assert tensor.device == get_local_device()
        if self._rank == PUBLISHER_RANK:
            self._sent.put(tensor.clone())
        else:
            tensor.copy_(self._sent.get(timeout=TIMEOUT_S))
        return FinishedWork()


@contextmanager
def make_host_ends() -> Iterator[TransportEnds]:
    """Yield writer and reader of a transport through host memory."""
    yield LocalWriter(), LocalReader()


@contextmanager
def make_collective_ends() -> Iterator[TransportEnds]:
    """Yield writer and reader of the collective transport."""
    sent = queue.Queue[Tensor]()
    send_version = CollectiveWriter._send_version

    def send_on_gpu(writer: CollectiveWriter, *arguments: Any) -> None:
        with SimulatedGpu():  # each thread has its own modes
            send_version(writer, *arguments)

    device = get_local_device()
    with (
        mock.patch.object(
            collective, "make_gloo_group", lambda store, rank, *_: InProcessGroup(rank, sent)
        ),
        mock.patch.object(CollectiveWriter, "_send_version", send_on_gpu),
        # Only a GPU's driver can pin memory.
        mock.patch.object(buckets, "allocate_pinned", lambda n: np.zeros(n, np.uint8)),
    ):
        writer = CollectiveWriter(
            LocalWriter(),
            host="127.0.0.1",
            timeout_s=TIMEOUT_S,
            device=device,
            on_device=True,
            always_copies=False,
        )
        reader = CollectiveReader(
            "a", LocalReader(), timeout_s=TIMEOUT_S, device=device, on_device=True
        )
        writer.set_readers(["a"])
        yield writer, reader
        reader.close()
        writer.close()
