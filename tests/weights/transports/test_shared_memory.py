"""Buckets that are read where they were laid."""

import errno
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights import WeightManifest
from streamrl.weights.pack import publish_version
from streamrl.weights.tensor_views import TORCH_DTYPES
from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from streamrl.weights.transports.shm_segments import remove_stale_segments
from streamrl.weights.unpack import unpack_tensors
from tests import forked
from tests.weights.local_outlet import LocalInlet, LocalOutlet

pytestmark = pytest.mark.xdist_group("ranks")

BUCKET_BYTES = 300


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in real shared memory."""
    name = subprocess.run(
        ["mktemp", "-d", "/dev/shm/test-XXXXXX"], capture_output=True, text=True, check=True
    )
    path = Path(name.stdout.strip())
    yield path
    subprocess.run(["rm", "-r", str(path)], check=True)


@pytest.fixture
def outlet(folder: Path) -> Iterator[SharedMemoryWriter]:
    made = SharedMemoryWriter("run", LocalOutlet(), keep_versions=1, directory=folder)
    yield made
    made.close()


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"t{i}": torch.randn(20 * i + 1, generator=generator) for i in range(5)}


def put(outlet: SharedMemoryWriter, version: int) -> WeightManifest:
    return publish_version(
        tensors_of(version).items(), version=version, bucket_bytes=BUCKET_BYTES, writer=outlet
    )


def read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack_tensors(
        manifest, SharedMemoryReader("policy", LocalInlet()).fetch_buckets(manifest)
    )


def is_version(found: dict[str, torch.Tensor], version: int) -> bool:
    wanted = tensors_of(version)
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".owner")}


def test_every_version_is_read_as_it_was_published(outlet: SharedMemoryWriter) -> None:
    for version in range(6):
        assert is_version(read(put(outlet, version)), version)


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
def test_layouts_may_change_from_version_to_version(
    layouts: list[list[tuple[str, int]]], bucket_bytes: int
) -> None:
    outlet = SharedMemoryWriter("property", LocalOutlet(), keep_versions=1)
    try:
        for version, layout in enumerate(layouts):
            raw = np.random.default_rng(version)
            tensors = {
                f"t{i}": torch.from_numpy(raw.integers(0, 2, size)).to(TORCH_DTYPES[dtype])
                for i, (dtype, size) in enumerate(layout)
            }
            manifest = publish_version(
                tensors.items(), version=version, bucket_bytes=bucket_bytes, writer=outlet
            )
            found = read(manifest)
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[n].float(), tensors[n].float()) for n in tensors)
    finally:
        outlet.close()


def test_memory_of_old_versions_is_laid_anew(outlet: SharedMemoryWriter, folder: Path) -> None:
    first = [handle.path for handle in put(outlet, 0).handles]
    put(outlet, 1)
    assert [handle.path for handle in put(outlet, 2).handles] == first
    put(outlet, 3)
    assert len(files(folder)) == 2 * len(first)


def test_a_version_that_is_read_stays_as_it_is(outlet: SharedMemoryWriter, folder: Path) -> None:
    old = read(put(outlet, 0))
    for version in range(1, 5):
        num_buckets = len(put(outlet, version).buckets)
    assert is_version(old, 0)
    assert len(files(folder)) == 3 * num_buckets
    del old
    gc.collect()
    put(outlet, 5)
    assert len(files(folder)) == 2 * num_buckets


def test_the_versions_that_are_kept_can_be_read_and_others_are_gone(folder: Path) -> None:
    outlet = SharedMemoryWriter("run", LocalOutlet(), keep_versions=2, directory=folder)
    manifests = [put(outlet, version) for version in range(5)]
    for version in (3, 4):
        assert is_version(read(manifests[version]), version)
    with pytest.raises(WeightsError, match=r"policy version 1, bucket 0: gone, .* holds version 4"):
        read(manifests[1])
    outlet.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(WeightsError, match=r"policy version 4, bucket 0: gone, .*No such file"):
        read(manifests[4])


def test_a_version_that_is_being_laid_anew_is_gone(outlet: SharedMemoryWriter) -> None:
    first = put(outlet, 0)
    put(outlet, 1)
    outlet.begin_version(2)
    outlet.allocate_buffer(BUCKET_BYTES)
    with pytest.raises(WeightsError, match=r"version 0, bucket 0: gone, .* is being overwritten"):
        read(first)


def test_a_version_that_failed_half_way_leaves_nothing(
    outlet: SharedMemoryWriter, folder: Path
) -> None:
    put(outlet, 0)
    good = put(outlet, 1)
    broken = [*tensors_of(2).items(), ("t0", torch.ones(1))]
    for _ in range(3):
        with pytest.raises(WeightsError, match="duplicate tensor t0"):
            publish_version(broken, version=2, bucket_bytes=BUCKET_BYTES, writer=outlet)
        assert is_version(read(good), 1)
    assert is_version(read(put(outlet, 3)), 3)
    assert len(files(folder)) == 2 * len(good.buckets)


def test_readers_cannot_write(outlet: SharedMemoryWriter) -> None:
    (array, *_) = SharedMemoryReader("policy", LocalInlet()).fetch_buckets(put(outlet, 0))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


class Room:
    """The system's memory, which is given to the requests of these numbers, from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *granted: int) -> None:
        self._real = os.posix_fallocate
        self._granted = granted
        self._requests = itertools.count()
        monkeypatch.setattr(os, "posix_fallocate", self._ask)

    def _ask(self, file: int, offset: int, num_bytes: int) -> None:
        if next(self._requests) not in self._granted:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._real(file, offset, num_bytes)


def came_of(manifest: WeightManifest) -> tuple[SharedMemoryReader, bool]:
    """A reader that has fetched a version, and whether that was right."""
    inlet = SharedMemoryReader("policy", LocalInlet())
    return inlet, is_version(
        unpack_tensors(manifest, inlet.fetch_buckets(manifest)), manifest.version
    )


@pytest.mark.parametrize("granted", [(), (0,), (1, 2)])
def test_buckets_that_find_no_room_come_another_way_in_their_order(
    outlet: SharedMemoryWriter,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    granted: tuple[int, ...],
) -> None:
    Room(monkeypatch, *granted)
    manifest = put(outlet, 0)
    assert len(manifest.buckets) == 4
    assert len(files(folder)) == len(granted)
    inlet, right = came_of(manifest)
    assert right
    assert inlet.bytes_fetched == manifest.num_bytes
    assert inlet.fallback_reason == (
        f"weights version 0: {4 - len(granted)} of 4 buckets did not fit in /dev/shm"
        " and used the fallback transport"
    )


def test_the_next_version_tries_again(
    outlet: SharedMemoryWriter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Room(patch)
        lacking = put(outlet, 0)
    good = put(outlet, 1)
    inlet = SharedMemoryReader("policy", LocalInlet())
    inlet.fetch_buckets(lacking)
    assert inlet.fallback_reason is not None
    assert is_version(unpack_tensors(good, inlet.fetch_buckets(good)), 1)
    assert inlet.fallback_reason is None
    assert len(files(folder)) == len(good.buckets)


def test_room_that_goes_between_two_versions_costs_the_kept_one_nothing(
    outlet: SharedMemoryWriter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(outlet, 0)
    before = files(folder)
    Room(monkeypatch)
    assert came_of(put(outlet, 1))[1]
    assert files(folder) == before
    assert is_version(read(first), 0)


def test_its_files_take_no_more_than_it_was_given(folder: Path) -> None:
    some = put(SharedMemoryWriter("some", LocalOutlet(), keep_versions=1, directory=folder), 0)
    page = os.sysconf("SC_PAGESIZE")
    limit = sum(bucket.num_bytes + page for bucket in some.buckets)
    outlet = SharedMemoryWriter(
        "run", LocalOutlet(), keep_versions=1, max_bytes=limit, directory=folder
    )
    assert came_of(put(outlet, 0))[0].fallback_reason is None
    kept = came_of(put(outlet, 1))[0].fallback_reason
    assert kept is not None
    assert "4 of 4 buckets" in kept
    # The first is kept no longer; its memory is laid anew.
    assert came_of(put(outlet, 2))[0].fallback_reason is None
    outlet.close()


def test_what_is_no_lack_of_room_is_an_error(
    outlet: SharedMemoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        WeightsError, match=r"version 0, bucket 0: cannot be written to .*not permit"
    ):
        put(outlet, 0)


def small_mount(body: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a mount namespace of its own where /mnt is a tmpfs of 1 MB."""
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
def test_a_file_system_that_is_full_is_an_error_and_not_the_end_of_the_process() -> None:
    found = small_mount(
        "import torch; from pathlib import Path\n"
        "from streamrl.errors import WeightsError\n"
        "from streamrl.weights.pack import publish_version\n"
        "from streamrl.weights.transports.shared_memory import SharedMemoryReader\n"
        "from streamrl.weights.transports.shared_memory import SharedMemoryWriter\n"
        "from streamrl.weights.unpack import unpack_tensors\n"
        "from tests.weights.local_outlet import LocalInlet, LocalOutlet\n"
        "outlet = SharedMemoryWriter(\n"
        '    "run", LocalOutlet(), keep_versions=2, directory=Path("/mnt"))\n'
        'inlet = SharedMemoryReader("policy", LocalInlet())\n'
        'other = Path("/mnt/other")\n'
        "def put(version):\n"
        '    tensors = {"a": torch.full((30_000,), version), "b": torch.full((9_000,), version)}\n'
        "    manifest = publish_version(\n"
        "        tensors.items(), version=version, bucket_bytes=250_000, writer=outlet)\n"
        "    found = unpack_tensors(manifest, inlet.fetch_buckets(manifest))\n"
        "    assert all(torch.equal(found[name], tensors[name]) for name in tensors)\n"
        "    assert inlet.fallback_reason is None\n"
        "put(0)\n"
        "other.write_bytes(bytes(500_000))\n"
        "for _ in range(3):\n"
        "    try: put(1)\n"
        "    except WeightsError as error: print(error)\n"
        "other.unlink()\n"
        "for version in range(1, 6): put(version)\n"
    )
    assert found.returncode == 0, found.stderr
    told = found.stdout.splitlines()
    assert len(told) == 3
    assert all("version 1, bucket 0: needs 0.2 MB, and /mnt has" in line for line in told)


def in_child(work: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    here, there = forked.context().Pipe()
    child = forked.context().Process(target=work, args=(there, *arguments))
    child.start()
    there.close()
    return child, here


def hold(pipe: Connection, manifest: WeightManifest) -> None:
    """Read a version, say whether it is right, and again whenever asked."""
    found = read(manifest)
    while True:
        pipe.send(is_version(found, manifest.version))
        pipe.recv()


def test_a_reader_that_dies_lets_go_of_what_it_read(
    outlet: SharedMemoryWriter, folder: Path
) -> None:
    manifest = put(outlet, 0)
    child, pipe = in_child(hold, manifest)
    assert pipe.recv()
    put(outlet, 1)
    put(outlet, 2)
    pipe.send("again")
    assert pipe.recv()
    newest = put(outlet, 3)
    child.kill()
    child.join()
    assert is_version(read(newest), 3)


def publish_and_wait(pipe: Connection, folder: Path) -> None:
    outlet = SharedMemoryWriter("run", LocalOutlet(), keep_versions=1, directory=folder)
    pipe.send(put(outlet, 0))
    pipe.recv()


def test_the_next_publisher_clears_up_after_one_that_was_killed(folder: Path) -> None:
    child, pipe = in_child(publish_and_wait, folder)
    manifest = pipe.recv()
    assert f"run-{child.pid}" in manifest.handles[0].path
    assert remove_stale_segments(folder) == []
    found = read(manifest)
    child.kill()
    child.join()
    assert files(folder)
    outlet = SharedMemoryWriter("next", LocalOutlet(), keep_versions=1, directory=folder)
    assert files(folder) == set()
    assert is_version(found, 0)
    outlet.close()
