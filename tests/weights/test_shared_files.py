"""Tensors in files: which are mapped where they lie, and which are copied first."""

import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
import torch

from streamrl.messages import Array
from streamrl.weights import shared_files
from streamrl.weights.pinned_memory import allocate_pinned
from streamrl.weights.shared_copies import SHARED_MEMORY_DIR
from streamrl.weights.shared_files import OBJECT_STORE_PROCESS, TensorFileReader, share_tensors

NUM_BYTES = 3 * mmap.ALLOCATIONGRANULARITY


def map_file(path: Path) -> Array:
    """Map a new file, without a descriptor that stays open."""
    path.write_bytes(bytes(NUM_BYTES))
    return torch.from_file(str(path), shared=True, size=NUM_BYTES, dtype=torch.uint8).numpy()


@contextmanager
def make_segment() -> Iterator[Array]:
    path = SHARED_MEMORY_DIR / f"streamrl-test-{os.getpid()}"
    try:
        yield map_file(path)
    finally:
        path.unlink()


@contextmanager
def make_stored_object() -> Iterator[Array]:
    """Memory of a file that has no name any more, and that a process of Ray's name has open."""
    path = SHARED_MEMORY_DIR / f"streamrl-test-{os.getpid()}"
    data = map_file(path)
    with TemporaryDirectory() as folder, path.open("rb") as file:
        program = shutil.copy(shutil.which("sleep") or "sleep", f"{folder}/{OBJECT_STORE_PROCESS}")
        process = subprocess.Popen([program, "60"], pass_fds=[file.fileno()])
    path.unlink()
    yield data
    process.kill()
    process.wait()


@contextmanager
def make_receive_buffer() -> Iterator[Array]:
    yield allocate_pinned(NUM_BYTES, is_shared=True)


def test_open_files_are_listed_once_however_many_buffers_there_are(monkeypatch: pytest.MonkeyPatch):
    listing = mock.Mock(wraps=shared_files._list_open_files)
    monkeypatch.setattr(shared_files, "_list_open_files", listing)
    buffers = [allocate_pinned(NUM_BYTES, is_shared=True) for _ in range(5)]
    tensors = {str(i): torch.from_numpy(data) for i, data in enumerate(buffers)}
    with share_tensors(tensors) as files:
        assert len({file.path for file in files}) == len(buffers)
    listing.assert_called_once()


@contextmanager
def make_ordinary() -> Iterator[Array]:
    yield np.zeros(NUM_BYTES, np.uint8)


@pytest.mark.parametrize(
    ("make_memory", "is_copied"),
    [
        (make_segment, False),
        (make_stored_object, False),
        (make_receive_buffer, False),
        (make_ordinary, True),
    ],
)
def test_shared_memory_is_mapped_where_it_lies_and_other_memory_is_copied(
    make_memory: Callable[[], Iterator[Array]], is_copied: bool
):
    with make_memory() as data:  # type: ignore[attr-defined]
        values = torch.from_numpy(data)[4096:].view(torch.float32)
        values.copy_(torch.arange(len(values)))
        published = {"a": values[100:164].view(8, 8), "b": values[1000:], "tied": values[1000:]}
        with share_tensors(published) as files:
            mapped = TensorFileReader().map_tensors(files)
            assert {name: torch.equal(mapped[name], published[name]) for name in published} == (
                dict.fromkeys(published, True)
            )
            assert mapped["b"] is mapped["tied"]
            # The bytes are those of the mapped memory itself.
            values[100] = -1
            assert (mapped["a"][0, 0].item() == -1) is not is_copied
        assert {file.is_reused for file in files} == {
            make_memory in (make_segment, make_receive_buffer)
        }
