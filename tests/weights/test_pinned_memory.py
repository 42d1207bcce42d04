"""Pinned memory, with CUDA's registration replaced by a record of what is pinned."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from streamrl.distributed import devices
from streamrl.messages import Array
from streamrl.weights import WeightManifest
from streamrl.weights.bucket_memory import copy_to_host
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.transports import shared_memory
from streamrl.weights.transports.shared_memory import (
    HEADER_BYTES,
    SharedMemoryReader,
    SharedMemoryWriter,
)
from tests.weights.local_transport import LocalReader, LocalWriter


class StandInCuda:
    """Records the pinned ranges by address; pinning a range twice is an error, as in CUDA."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.num_pins = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        self.num_pins += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    def holds(self, data: Array) -> bool:
        start, end = data.ctypes.data, data.ctypes.data + data.nbytes
        return any(a <= start and end <= a + n for a, n in self.pinned.items())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCuda]:
    cuda = StandInCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    for module in (devices, shared_memory):
        monkeypatch.setattr(module, "has_local_gpu", lambda: True)
    yield cuda
    gc.collect()
    assert not cuda.pinned


def publish(writer: SharedMemoryWriter, version: int, elements: int = 1000) -> WeightManifest:
    tensors = {f"t{i}": torch.full((elements,), float(version + i)) for i in range(3)}
    return publish_version(
        tensors.items(), version=version, bucket_bytes=4 * elements, writer=writer
    )


def test_both_ends_copy_from_pinned_memory_and_pin_each_segment_once(
    cuda: StandInCuda, tmp_path: Path
):
    writer = SharedMemoryWriter("pinned", LocalWriter(), keep_versions=1, directory=tmp_path)
    reader = SharedMemoryReader("policy", LocalReader())
    try:
        pins = []
        for version in range(8):
            manifest = publish(writer, version)
            buckets = list(map(copy_to_host, reader.fetch_buckets(manifest)))
            assert all(cuda.holds(data) and not data.flags.writeable for data in buckets)
            tensors = unpack_tensors(manifest, buckets)
            assert all(torch.all(tensors[f"t{i}"] == version + i) for i in range(3))
            del buckets, tensors
            pins.append(cuda.num_pins)
        assert pins[3:] == pins[3:4] * 5, "segments that are used again stay pinned"
        writer.begin_version(8)
        assert cuda.holds(copy_to_host(writer.allocate_buffer(4000))), (
            "the trainer writes to pinned memory"
        )
    finally:
        reader.close()
        writer.close()


def test_fetched_buckets_stay_pinned_and_locked_until_the_arrays_are_gone(
    cuda: StandInCuda, tmp_path: Path
):
    writer = SharedMemoryWriter("pinned", LocalWriter(), keep_versions=1, directory=tmp_path)
    reader = SharedMemoryReader("policy", LocalReader())
    manifest = publish(writer, 0)
    held = copy_to_host(reader.fetch_buckets(manifest)[0])
    for version in range(1, 5):
        reader.fetch_buckets(publish(writer, version))
    writer.close()
    reader.close()
    gc.collect()
    assert np.all(held.view(np.float32) == 0), "a locked segment is not overwritten"
    assert sum(cuda.pinned.values()) == HEADER_BYTES + held.nbytes
    del held


def test_segments_that_the_publisher_removed_are_unpinned(cuda: StandInCuda, tmp_path: Path):
    writer = SharedMemoryWriter("pinned", LocalWriter(), keep_versions=1, directory=tmp_path)
    reader = SharedMemoryReader("policy", LocalReader())
    for version, elements in enumerate((1000, 5000, 5000, 5000, 5000)):
        reader.fetch_buckets(publish(writer, version, elements))
    gc.collect()
    assert min(cuda.pinned.values()) >= 5 * 4000, "the small segments are gone"
    reader.close()
    writer.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    refusing = SimpleNamespace(cudaHostRegister=lambda address, num_bytes, flags: 2)
    gpu = SimpleNamespace(cudart=lambda: refusing)
    monkeypatch.setattr(devices, "_get_gpu_module", lambda: gpu)
    monkeypatch.setattr(devices, "GPU", "cpu")
    for module in (devices, shared_memory):
        monkeypatch.setattr(module, "has_local_gpu", lambda: True)
    writer = SharedMemoryWriter("pinned", LocalWriter(), keep_versions=1, directory=tmp_path)
    reader = SharedMemoryReader("policy", LocalReader())
    manifest = publish(writer, 3)
    tensors = unpack_tensors(manifest, reader.fetch_buckets(manifest))
    assert torch.all(tensors["t1"] == 4)
    reader.close()
    writer.close()
