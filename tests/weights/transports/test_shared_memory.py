"""Shared memory transport: buckets are read where they were written."""

import errno
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights import WeightManifest
from streamrl.weights.buckets import TORCH_DTYPES, publish_version, unpack_tensors
from streamrl.weights.transports.shared_memory import (
    SharedMemoryReader,
    SharedMemoryWriter,
    remove_stale_segments,
)
from tests import forked
from tests.weights.local_transport import LocalReader, LocalWriter

pytestmark = pytest.mark.xdist_group("ranks")

BUCKET_BYTES = 300


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


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"t{i}": torch.randn(20 * i + 1, generator=generator) for i in range(5)}


def put(writer: SharedMemoryWriter, version: int) -> WeightManifest:
    return publish_version(
        tensors_of(version).items(), version=version, bucket_bytes=BUCKET_BYTES, writer=writer
    )


def read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack_tensors(
        manifest, SharedMemoryReader("policy", LocalReader()).fetch_buckets(manifest)
    )


def is_version(fetched: dict[str, torch.Tensor], version: int) -> bool:
    expected = tensors_of(version)
    return fetched.keys() == expected.keys() and all(
        torch.equal(fetched[n], expected[n]) for n in expected
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".owner")}


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), st.integers(1, 90)),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 400),
)
def test_bucket_layouts_may_change_between_versions(
    layouts: list[list[tuple[str, int]]], bucket_bytes: int
):
    writer = SharedMemoryWriter("property", LocalWriter(), keep_versions=1)
    try:
        for version, layout in enumerate(layouts):
            raw = np.random.default_rng(version)
            tensors = {
                f"t{i}": torch.from_numpy(raw.integers(0, 2, size)).to(TORCH_DTYPES[dtype])
                for i, (dtype, size) in enumerate(layout)
            }
            manifest = publish_version(
                tensors.items(), version=version, bucket_bytes=bucket_bytes, writer=writer
            )
            fetched = read(manifest)
            assert fetched.keys() == tensors.keys()
            assert all(torch.equal(fetched[n].float(), tensors[n].float()) for n in tensors)
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
    assert is_version(old, 0)
    assert len(files(folder)) == 3 * num_buckets
    del old
    gc.collect()
    put(writer, 5)
    assert len(files(folder)) == 2 * num_buckets


def test_only_kept_versions_can_be_read(folder: Path):
    writer = make_writer(folder, keep_versions=2)
    manifests = [put(writer, version) for version in range(5)]
    for version in (3, 4):
        assert is_version(read(manifests[version]), version)
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
    broken = [*tensors_of(2).items(), ("t0", torch.ones(1))]
    for _ in range(3):
        with pytest.raises(WeightsError, match="duplicate tensor t0"):
            publish_version(broken, version=2, bucket_bytes=BUCKET_BYTES, writer=writer)
        assert is_version(read(with_memory), 1)
    assert is_version(read(put(writer, 3)), 3)
    assert len(files(folder)) == 2 * len(with_memory.buckets)


class LimitedMemory:
    """Memory that is granted only to the requests with these numbers, from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *granted: int) -> None:
        self._real = os.posix_fallocate
        self._granted = granted
        self._requests = itertools.count()
        monkeypatch.setattr(os, "posix_fallocate", self._fallocate)

    def _fallocate(self, file: int, offset: int, num_bytes: int) -> None:
        if next(self._requests) not in self._granted:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._real(file, offset, num_bytes)


def fetch(manifest: WeightManifest) -> tuple[SharedMemoryReader, bool]:
    """Fetch a version; return the reader and whether the tensors are right."""
    reader = SharedMemoryReader("policy", LocalReader())
    return reader, is_version(
        unpack_tensors(manifest, reader.fetch_buckets(manifest)), manifest.version
    )


@pytest.mark.parametrize("granted", [(), (0,), (1, 2)])
def test_buckets_without_memory_use_the_fallback_and_keep_their_order(
    writer: SharedMemoryWriter,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    granted: tuple[int, ...],
):
    LimitedMemory(monkeypatch, *granted)
    manifest = put(writer, 0)
    assert len(manifest.buckets) == 4
    assert len(files(folder)) == len(granted)
    reader, is_right = fetch(manifest)
    assert is_right
    assert reader.bytes_fetched == manifest.num_bytes
    assert reader.fallback_reason == (
        f"weights version 0: {4 - len(granted)} of 4 buckets did not fit in shared memory"
        " and used the fallback transport"
    )


def test_segments_take_at_most_max_bytes(folder: Path):
    measured = put(make_writer(folder), 0)
    page = os.sysconf("SC_PAGESIZE")
    limit = sum(bucket.num_bytes + page for bucket in measured.buckets)
    writer = make_writer(folder, max_bytes=limit)
    assert fetch(put(writer, 0))[0].fallback_reason is None
    reason = fetch(put(writer, 1))[0].fallback_reason
    assert reason is not None
    assert "4 of 4 buckets" in reason
    # The first version is no longer kept; its segments are reused.
    assert fetch(put(writer, 2))[0].fallback_reason is None
    writer.close()


def test_other_allocation_errors_are_raised(
    writer: SharedMemoryWriter, monkeypatch: pytest.MonkeyPatch
):
    def refuse(file: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        WeightsError, match=r"version 0, bucket 0: cannot be written to .*not permit"
    ):
        put(writer, 0)


def small_mount(body: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in its own mount namespace, with a tmpfs of 1 MB at /mnt."""
    script = f"mount -t tmpfs -o size=1m none /mnt && exec {sys.executable} -c '{body}'"
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )


@pytest.mark.skipif(
    small_mount("").returncode != 0, reason="needs the right to mount a file system"
)
def test_a_full_file_system_raises_instead_of_killing_the_process():
    fetched = small_mount(
        "import torch; from pathlib import Path\n"
        "from streamrl.errors import WeightsError\n"
        "from streamrl.weights.buckets import publish_version\n"
        "from streamrl.weights.transports.shared_memory import SharedMemoryReader\n"
        "from streamrl.weights.transports.shared_memory import SharedMemoryWriter\n"
        "from streamrl.weights.buckets import unpack_tensors\n"
        "from tests.weights.local_transport import LocalReader, LocalWriter\n"
        "writer = SharedMemoryWriter(\n"
        '    "run", LocalWriter(), keep_versions=2, directory=Path("/mnt"))\n'
        'reader = SharedMemoryReader("policy", LocalReader())\n'
        'filler = Path("/mnt/filler")\n'
        "def put(version):\n"
        '    tensors = {"a": torch.full((30_000,), version), "b": torch.full((9_000,), version)}\n'
        "    manifest = publish_version(\n"
        "        tensors.items(), version=version, bucket_bytes=250_000, writer=writer)\n"
        "    received = unpack_tensors(manifest, reader.fetch_buckets(manifest))\n"
        "    assert all(torch.equal(received[name], tensors[name]) for name in tensors)\n"
        "    assert reader.fallback_reason is None\n"
        "put(0)\n"
        "filler.write_bytes(bytes(500_000))\n"
        "for _ in range(3):\n"
        "    try: put(1)\n"
        "    except WeightsError as error: print(error)\n"
        "filler.unlink()\n"
        "for version in range(1, 6): put(version)\n"
    )
    assert fetched.returncode == 0, fetched.stderr
    errors = fetched.stdout.splitlines()
    assert len(errors) == 3
    assert all("version 1, bucket 0: needs 0.2 MB, but /mnt has" in line for line in errors)


def compare_repeatedly(pipe: Connection, manifest: WeightManifest) -> None:
    """Fetch a version, and compare it again at every message."""
    fetched = read(manifest)
    while True:
        pipe.send(is_version(fetched, manifest.version))
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
    assert is_version(read(newest), 3)


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
    assert is_version(fetched, 0)
    writer.close()
