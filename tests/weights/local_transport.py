"""Transport within a process: an object store whose handles are the arrays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from streamrl.distributed.devices import get_local_device
from streamrl.weights import WeightManifest
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.transport import TransportReader, TransportWriter
from streamrl.weights.transports import collective
from streamrl.weights.transports.object_store import ObjectStoreReader, ObjectStoreWriter


class LocalWriter(ObjectStoreWriter):
    """Puts buckets into the store of this process."""

    def __init__(self) -> None:
        super().__init__(np.copy)


class LocalReader(ObjectStoreReader):
    """Fetches buckets from the store of this process."""

    def __init__(self) -> None:
        super().__init__("policy", lambda handles, subject, timeout_s: handles)


class Versions:
    """Versions of a model with tensors of these sizes; values depend only on the version."""

    def __init__(self, *sizes: int, bucket_bytes: int) -> None:
        self._sizes, self._bucket_bytes = sizes, bucket_bytes

    def make_tensors(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            f"t{i}": torch.randn(size, generator=generator) for i, size in enumerate(self._sizes)
        }

    def publish(self, writer: TransportWriter, version: int) -> WeightManifest:
        tensors = self.make_tensors(version)
        on_device = ((name, tensor.to(get_local_device())) for name, tensor in tensors.items())
        return publish_version(
            on_device, version=version, bucket_bytes=self._bucket_bytes, writer=writer
        )

    def are_equal(self, tensors: dict[str, torch.Tensor], version: int) -> bool:
        expected = self.make_tensors(version)
        return tensors.keys() == expected.keys() and all(
            torch.equal(tensors[name], expected[name]) for name in expected
        )

    def fetch(self, reader: TransportReader, manifest: WeightManifest) -> bool:
        """Return whether the reader fetches exactly the tensors of the version."""
        tensors = unpack_tensors(manifest, reader.fetch_buckets(manifest))
        return self.are_equal(tensors, manifest.version)


@contextmanager
def act_in_broadcast(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Call a function before a reader takes part in this broadcast; number 1 is the header's."""
    broadcast = collective.BroadcastGroup.broadcast_tensor
    num_received = 0

    def act_and_broadcast(self: Any, *arguments: Any) -> None:
        nonlocal num_received
        if not self._is_publisher:
            num_received += 1
            if num_received == number:
                act()
        broadcast(self, *arguments)

    with mock.patch.object(collective.BroadcastGroup, "broadcast_tensor", act_and_broadcast):
        yield
