"""Buckets that are read where they were laid."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights import WeightManifest, publish, unpack
from streamrl.weights.manifest import DTYPES
from streamrl.weights.segments import clear_up
from streamrl.weights.shared_memory import SharedMemoryInlet, SharedMemoryOutlet

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
def outlet(folder: Path) -> Iterator[SharedMemoryOutlet]:
    made = SharedMemoryOutlet("run", keep_versions=1, directory=folder)
    yield made
    made.close()


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"t{i}": torch.randn(20 * i + 1, generator=generator) for i in range(5)}


def put(outlet: SharedMemoryOutlet, version: int) -> WeightManifest:
    return publish(
        tensors_of(version).items(), version=version, bucket_bytes=BUCKET_BYTES, outlet=outlet
    )


def read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack(manifest, SharedMemoryInlet("policy").fetch(manifest))


def is_version(found: dict[str, torch.Tensor], version: int) -> bool:
    wanted = tensors_of(version)
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".owner")}


def test_every_version_is_read_as_it_was_published(outlet: SharedMemoryOutlet) -> None:
    for version in range(6):
        assert is_version(read(put(outlet, version)), version)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(1, 90)), min_size=1, max_size=6
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 400),
)
def test_layouts_may_change_from_version_to_version(
    layouts: list[list[tuple[str, int]]], bucket_bytes: int
) -> None:
    outlet = SharedMemoryOutlet("property", keep_versions=1)
    try:
        for version, layout in enumerate(layouts):
            raw = np.random.default_rng(version)
            tensors = {
                f"t{i}": torch.from_numpy(raw.integers(0, 2, size)).to(DTYPES[dtype])
                for i, (dtype, size) in enumerate(layout)
            }
            manifest = publish(
                tensors.items(), version=version, bucket_bytes=bucket_bytes, outlet=outlet
            )
            found = read(manifest)
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[n].float(), tensors[n].float()) for n in tensors)
    finally:
        outlet.close()


def test_memory_of_old_versions_is_laid_anew(outlet: SharedMemoryOutlet, folder: Path) -> None:
    first = [handle.path for handle in put(outlet, 0).handles]
    put(outlet, 1)
    assert [handle.path for handle in put(outlet, 2).handles] == first
    put(outlet, 3)
    assert len(files(folder)) == 2 * len(first)


def test_a_version_that_is_read_stays_as_it_is(outlet: SharedMemoryOutlet, folder: Path) -> None:
    old = read(put(outlet, 0))
    for version in range(1, 5):
        put(outlet, version)
    assert is_version(old, 0)
    num_files = len(files(folder))
    del old
    gc.collect()
    put(outlet, 5)
    assert len(files(folder)) == num_files


def test_the_versions_that_are_kept_can_be_read_and_others_are_gone(folder: Path) -> None:
    outlet = SharedMemoryOutlet("run", keep_versions=2, directory=folder)
    manifests = [put(outlet, version) for version in range(5)]
    for version in (3, 4):
        assert is_version(read(manifests[version]), version)
    with pytest.raises(WeightsError, match=r"policy version 1, bucket 0: gone, .* holds version 4"):
        read(manifests[1])
    outlet.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(WeightsError, match=r"policy version 4, bucket 0: gone, .*No such file"):
        read(manifests[4])


def test_a_version_that_is_being_laid_anew_is_gone(outlet: SharedMemoryOutlet) -> None:
    first = put(outlet, 0)
    put(outlet, 1)
    outlet.begin(2)
    outlet.room(BUCKET_BYTES)
    with pytest.raises(WeightsError, match=r"version 0, bucket 0: gone, .* is being laid anew"):
        read(first)


def test_a_version_that_failed_half_way_leaves_nothing(
    outlet: SharedMemoryOutlet, folder: Path
) -> None:
    put(outlet, 0)
    good = put(outlet, 1)
    broken = [*tensors_of(2).items(), ("t0", torch.ones(1))]
    for _ in range(3):
        with pytest.raises(WeightsError, match="tensor t0 comes twice"):
            publish(broken, version=2, bucket_bytes=BUCKET_BYTES, outlet=outlet)
        assert is_version(read(good), 1)
    assert is_version(read(put(outlet, 3)), 3)
    assert len(files(folder)) == 2 * len(good.buckets)


def test_readers_cannot_write(outlet: SharedMemoryOutlet) -> None:
    (array, *_) = SharedMemoryInlet("policy").fetch(put(outlet, 0))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_where_there_is_no_room_it_is_said_how_much_is_missing(
    outlet: SharedMemoryOutlet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    put(outlet, 0)
    before = files(folder)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        WeightsError, match=r"version 1, bucket 0: needs 0.0 MB in .*MB are free \(No space left"
    ):
        put(outlet, 1)
    assert files(folder) == before


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
def test_a_full_file_system_is_an_error_and_not_the_end_of_the_process() -> None:
    found = small_mount(
        "import torch; from pathlib import Path\n"
        "from streamrl.weights import publish\n"
        "from streamrl.weights.shared_memory import SharedMemoryOutlet\n"
        'outlet = SharedMemoryOutlet("run", keep_versions=9, directory=Path("/mnt"))\n'
        "for version in range(9):\n"
        '    tensors = [("a", torch.ones(60_000)), ("b", torch.ones(60_000))]\n'
        "    publish(tensors, version=version, bucket_bytes=1 << 20, outlet=outlet)\n"
    )
    assert "version 2, bucket 0: needs 0.5 MB in /mnt, where 0.1 MB are free" in found.stderr
    assert found.returncode == 1


def in_child(work: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(there, *arguments))
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
    outlet: SharedMemoryOutlet, folder: Path
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
    outlet = SharedMemoryOutlet("run", keep_versions=1, directory=folder)
    pipe.send(put(outlet, 0))
    pipe.recv()


def test_the_next_publisher_clears_up_after_one_that_was_killed(folder: Path) -> None:
    child, pipe = in_child(publish_and_wait, folder)
    manifest = pipe.recv()
    assert f"run-{child.pid}" in manifest.handles[0].path
    assert clear_up(folder) == []
    found = read(manifest)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert files(folder)
    outlet = SharedMemoryOutlet("next", keep_versions=1, directory=folder)
    assert files(folder) == set()
    assert is_version(found, 0)
    outlet.close()
