"""Shared memory transport: buckets are read where they were written."""

import errno
import gc
import itertools
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights import WeightManifest
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.transports import shared_memory
from streamrl.weights.transports.shared_memory import (
    SharedMemoryReader,
    SharedMemoryWriter,
    remove_stale_segments,
)
from tests import forked
from tests.weights.local_transport import LocalReader, LocalWriter, Versions

pytestmark = pytest.mark.xdist_group("ranks")

BUCKET_BYTES = 300
VERSIONS = Versions(*range(1, 100, 20), bucket_bytes=BUCKET_BYTES)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a directory in real shared memory."""
    name = subprocess.run(
        ["mktemp", "-d", "/dev/shm/test-XXXXXX"], capture_output=True, text=True, check=True
    )
    path = Path(name.stdout.strip())
    yield path
    subprocess.run(["rm", "-r", str(path)], check=True)


@pytest.fixture
def writer(folder: Path) -> Iterator[SharedMemoryWriter]:
    shm_writer = make_writer(folder)
    yield shm_writer
    shm_writer.close()


def make_writer(folder: Path, *, keep_versions: int = 1, **options: int) -> SharedMemoryWriter:
    return SharedMemoryWriter(
        "run",
        LocalWriter(),
        keep_versions=keep_versions,
        directory=folder,
        **options,
    )


def put(writer: SharedMemoryWriter, version: int) -> WeightManifest:
    return VERSIONS.publish(writer, version)


def read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack_tensors(manifest, make_reader().fetch_buckets(manifest))


def make_reader() -> SharedMemoryReader:
    return SharedMemoryReader("policy", LocalReader())


def is_readable(manifest: WeightManifest) -> bool:
    """Return whether a new reader gets exactly the version."""
    return VERSIONS.fetch(make_reader(), manifest)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".owner")}


SIZES = st.lists(st.integers(1, 90), min_size=1, max_size=6)


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 400))
def test_bucket_layouts_may_change_between_versions(layouts: list[list[int]], bucket_bytes: int):
    writer = SharedMemoryWriter("property", LocalWriter(), keep_versions=1)
    try:
        for version, sizes in enumerate(layouts):
            versions = Versions(*sizes, bucket_bytes=bucket_bytes)
            assert versions.fetch(make_reader(), versions.publish(writer, version))
    finally:
        writer.close()


def test_segments_of_old_versions_are_reused(writer: SharedMemoryWriter, folder: Path):
    first = [handle.path for handle in put(writer, 0).handles]
    put(writer, 1)
    assert [handle.path for handle in put(writer, 2).handles] == first
    put(writer, 3)
    assert len(files(folder)) == 2 * len(first)


def test_a_version_in_use_is_not_overwritten(writer: SharedMemoryWriter, folder: Path):
    old = read(put(writer, 0))
    for version in range(1, 5):
        num_buckets = len(put(writer, version).buckets)
    assert VERSIONS.are_equal(old, 0)
    assert len(files(folder)) == 3 * num_buckets
    del old
    gc.collect()
    put(writer, 5)
    assert len(files(folder)) == 2 * num_buckets


def test_only_kept_versions_can_be_read(folder: Path):
    writer = make_writer(folder, keep_versions=2)
    manifests = [put(writer, version) for version in range(5)]
    for version in (3, 4):
        assert is_readable(manifests[version])
    with pytest.raises(WeightsError, match=r"policy version 1, bucket 0: gone, .* holds version 4"):
        read(manifests[1])
    writer.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(WeightsError, match=r"policy version 4, bucket 0: gone, .*No such file"):
        read(manifests[4])


def test_a_segment_being_overwritten_cannot_be_mapped(folder: Path):
    writer = make_writer(folder)
    first = put(writer, 0)
    put(writer, 1)
    writer.begin_version(2)
    writer.allocate_buffer(BUCKET_BYTES)
    with pytest.raises(WeightsError, match=r"version 0, bucket 0: gone, .* is being overwritten"):
        read(first)
    writer.close()


def test_a_failed_version_leaves_no_segments(writer: SharedMemoryWriter, folder: Path):
    put(writer, 0)
    with_memory = put(writer, 1)
    broken = [*VERSIONS.make_tensors(2).items(), ("t0", torch.ones(1))]
    for _ in range(3):
        with pytest.raises(WeightsError, match="duplicate tensor t0"):
            publish_version(broken, version=2, bucket_bytes=BUCKET_BYTES, writer=writer)
        assert is_readable(with_memory)
    assert is_readable(put(writer, 3))
    assert len(files(folder)) == 2 * len(with_memory.buckets)


def limit_memory(patch: pytest.MonkeyPatch, *granted: int, error: int = errno.ENOSPC) -> None:
    """Grant memory only to the requests with these numbers, from 0."""
    fallocate, requests = os.posix_fallocate, itertools.count()

    def grant_or_refuse(file: int, offset: int, num_bytes: int) -> None:
        if next(requests) not in granted:
            raise OSError(error, os.strerror(error))
        fallocate(file, offset, num_bytes)

    patch.setattr(os, "posix_fallocate", grant_or_refuse)


@pytest.mark.parametrize("granted", [(), (0,), (1, 2)])
def test_buckets_without_memory_use_the_fallback_and_keep_their_order(
    writer: SharedMemoryWriter,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    granted: tuple[int, ...],
):
    limit_memory(monkeypatch, *granted)
    manifest = put(writer, 0)
    assert len(manifest.buckets) == 4
    assert len(files(folder)) == len(granted)
    reader = make_reader()
    assert VERSIONS.fetch(reader, manifest)
    assert reader.bytes_fetched == manifest.num_bytes
    assert reader.fallback_reason == (
        f"weights version 0: {4 - len(granted)} of 4 buckets did not fit in shared memory"
        " and used the fallback transport"
    )


def test_segments_take_at_most_max_bytes(folder: Path):
    reader = make_reader()
    measured = put(make_writer(folder), 0)
    page = os.sysconf("SC_PAGESIZE")
    limit = sum(bucket.num_bytes + page for bucket in measured.buckets)
    writer = make_writer(folder, max_bytes=limit)
    # For the third version, the segments of the first are reused, which is no longer kept.
    for version, fits in enumerate((True, False, True)):
        assert VERSIONS.fetch(reader, put(writer, version))
        assert fits or "4 of 4 buckets" in (reader.fallback_reason or "")
        assert (reader.fallback_reason is None) == fits
    writer.close()


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (errno.EPERM, "cannot be written to .*not permit"),
        # The fallback may lie in the same memory and would crash.
        (errno.ENOSPC, r"needs 0\.0 MB, but .* has 0\.0 MB free"),
    ],
)
def test_a_full_file_system_and_other_errors_of_allocation_are_raised(
    writer: SharedMemoryWriter, error: int, fault: str
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "measure_shared_memory", lambda directory: (100, 3))
        limit_memory(patch, error=error)
        for _ in range(2):
            with pytest.raises(WeightsError, match=f"version 0, bucket 0: {fault}"):
                put(writer, 0)
    assert is_readable(put(writer, 0))


def compare_repeatedly(pipe: Connection, manifest: WeightManifest) -> None:
    """Fetch a version, and compare it again at every message."""
    fetched = read(manifest)
    while True:
        pipe.send(VERSIONS.are_equal(fetched, manifest.version))
        pipe.recv()


def test_a_dead_reader_releases_its_segments(writer: SharedMemoryWriter, folder: Path):
    manifest = put(writer, 0)
    child, pipe = forked.start(compare_repeatedly, manifest)
    assert pipe.recv()
    put(writer, 1)
    put(writer, 2)
    pipe.send("again")
    assert pipe.recv()
    newest = put(writer, 3)
    child.kill()
    child.join()
    assert is_readable(newest)


def publish_and_wait(pipe: Connection, folder: Path) -> None:
    writer = make_writer(folder)
    pipe.send(put(writer, 0))
    pipe.recv()


def test_the_next_publisher_removes_the_files_of_a_killed_one(folder: Path):
    child, pipe = forked.start(publish_and_wait, folder)
    manifest = pipe.recv()
    assert f"run-{child.pid}" in manifest.handles[0].path
    assert remove_stale_segments(folder) == []
    fetched = read(manifest)
    child.kill()
    child.join()
    assert files(folder)
    writer = SharedMemoryWriter("next", LocalWriter(), keep_versions=1, directory=folder)
    assert files(folder) == set()
    assert VERSIONS.are_equal(fetched, 0)
    writer.close()
