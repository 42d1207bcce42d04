"""Pinned memory, with CUDA's registration replaced by a record of what is pinned."""

import gc
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from streamrl.distributed import devices
from streamrl.engines.training.optimizer_offload import offload_to_host
from streamrl.messages import Array
from streamrl.weights import WeightManifest, pinned_memory
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.pinned_memory import allocate_pinned, copy_to_pinned
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
    monkeypatch.setattr(devices, "_get_gpu_module", lambda: SimpleNamespace(cudart=lambda: cuda))
    for module in (devices, shared_memory, pinned_memory):
        monkeypatch.setattr(module, "has_local_gpu", lambda: True)
    monkeypatch.setattr(pinned_memory, "FREE_BLOCKS", defaultdict(list))
    yield cuda
    gc.collect()
    kept = [size for (size, *_), blocks in pinned_memory.FREE_BLOCKS.items() for _ in blocks]
    assert sorted(cuda.pinned.values()) == sorted(kept), "only free blocks stay pinned"


def publish(writer: SharedMemoryWriter, version: int, elements: int = 1000) -> WeightManifest:
    tensors = {f"t{i}": torch.full((elements,), float(version + i)) for i in range(3)}
    return publish_version(
        tensors.items(), version=version, bucket_bytes=4 * elements, writer=writer
    )


@pytest.fixture
def ends(
    cuda: StandInCuda, tmp_path: Path
) -> Iterator[tuple[SharedMemoryWriter, SharedMemoryReader]]:
    writer = SharedMemoryWriter("pinned", LocalWriter(), keep_versions=1, directory=tmp_path)
    reader = SharedMemoryReader("policy", LocalReader())
    yield writer, reader
    reader.close()
    writer.close()


def test_both_ends_copy_from_pinned_memory_and_pin_each_segment_once(cuda: StandInCuda, ends):
    writer, reader = ends
    pins = []
    for version in range(8):
        manifest = publish(writer, version)
        buckets = reader.fetch_buckets(manifest)
        assert all(cuda.holds(data) and not data.flags.writeable for data in buckets)
        tensors = unpack_tensors(manifest, buckets)
        assert all(torch.all(tensors[f"t{i}"] == version + i) for i in range(3))
        del buckets, tensors
        pins.append(cuda.num_pins)
    assert pins[3:] == pins[3:4] * 5, "segments that are used again stay pinned"
    writer.begin_version(8)
    assert cuda.holds(writer.allocate_buffer(4000)), "the trainer writes to pinned memory"


def test_fetched_buckets_stay_pinned_and_locked_until_the_arrays_are_gone(cuda: StandInCuda, ends):
    writer, reader = ends
    manifest = publish(writer, 0)
    held = reader.fetch_buckets(manifest)[0]
    for version in range(1, 5):
        reader.fetch_buckets(publish(writer, version))
    writer.close()
    reader.close()
    gc.collect()
    assert np.all(held.view(np.float32) == 0), "a locked segment is not overwritten"
    assert sum(cuda.pinned.values()) == HEADER_BYTES + held.nbytes
    del held


def test_segments_that_the_publisher_removed_are_unpinned(cuda: StandInCuda, ends):
    writer, reader = ends
    for version, elements in enumerate((1000, 5000, 5000, 5000, 5000)):
        reader.fetch_buckets(publish(writer, version, elements))
    gc.collect()
    assert min(cuda.pinned.values()) >= 5 * 4000, "the small segments are gone"


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    cuda: StandInCuda, ends, monkeypatch: pytest.MonkeyPatch
):
    writer, reader = ends
    monkeypatch.setattr(devices, "GPU", "cpu")  # where the error is cleared
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda address, num_bytes, flags: 2)
    allocate_pinned(1_000).fill(1)
    assert allocate_pinned(0).shape == (0,)
    manifest = publish(writer, 3)
    tensors = unpack_tensors(manifest, reader.fetch_buckets(manifest))
    assert torch.all(tensors["t1"] == 4)


def test_pinned_memory_has_the_exact_size_and_serves_the_next_version(cuda: StandInCuda):
    sizes = [136_000_001, 5_000, 5_000, 1]
    for _ in range(3):
        version = [allocate_pinned(size) for size in sizes]
        assert all(map(cuda.holds, version))
        assert sorted(cuda.pinned.values()) == sorted(sizes), "no power of two, nothing twice"
        starts = sorted((data.ctypes.data, data.nbytes) for data in version)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(starts))
        del version


def test_no_rank_takes_memory_that_another_has_mapped(cuda: StandInCuda):
    addresses: dict[int, set[int]] = {0: set(), 1: set()}
    for _ in range(3):
        for rank, used in addresses.items():
            used.add(allocate_pinned(5_000, is_shared=True, rank=rank).ctypes.data)
            gc.collect()
    assert [len(used) for used in addresses.values()] == [1, 1]
    assert not addresses[0] & addresses[1]


def test_a_view_keeps_pinned_memory_from_other_arrays(cuda: StandInCuda):
    view = torch.from_dlpack(allocate_pinned(4_000)[1_000:])
    view.fill_(7)
    allocate_pinned(4_000).fill(0)
    assert cuda.num_pins == 2 and torch.all(view == 7)


@pytest.mark.parametrize("shape", [(3, 5), ()])
def test_a_pinned_copy_of_a_tensor_equals_it(cuda: StandInCuda, shape: tuple[int, ...]):
    tensor = torch.randn(shape).to(torch.bfloat16)
    copy = copy_to_pinned(tensor.T if len(shape) > 1 else tensor)
    assert torch.equal(copy.T if len(shape) > 1 else copy, tensor) and copy.is_contiguous()
    assert cuda.holds(copy.view(-1).view(torch.uint8).numpy())


def test_offloads_of_an_optimizer_take_its_exact_size_and_pin_it_once(cuda: StandInCuda):
    state = [torch.full((n,), float(n)) for n in (1_000, 70_000, 70_000)]
    storages = [tensor.untyped_storage() for tensor in state]
    for _ in range(3):
        copy_back = offload_to_host(storages)
        for storage in storages:
            storage.resize_(0)
        copy_back()
        assert all(torch.all(tensor == len(tensor)) for tensor in state)
        del copy_back
    assert list(cuda.pinned.values()) == [4_000, 280_000, 280_000]
