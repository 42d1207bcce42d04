"""Copies in shared memory: one for equal bytes of a node's processes, none that nobody uses."""

import errno
import gc
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from streamrl.errors import ConfigError
from streamrl.weights.shared_copies import SharedCopy
from streamrl.weights.transports.shared_memory import remove_stale_segments
from tests import forked

pytestmark = pytest.mark.xdist_group("ranks")

NUM_BYTES = 3 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a directory in real shared memory."""
    name = subprocess.run(
        ["mktemp", "-d", "/dev/shm/test-XXXXXX"], capture_output=True, text=True, check=True
    )
    path = Path(name.stdout.strip())
    yield path
    subprocess.run(["rm", "-r", str(path)], check=True)


def share(folder: Path, seed: int = 0) -> SharedCopy:
    data = np.random.default_rng(seed).integers(256, size=NUM_BYTES, dtype=np.uint8)
    copy = SharedCopy(data, "scorer.offload=true: layer", folder)
    assert np.array_equal(copy.memory, data)
    return copy


def measure(folder: Path) -> int:
    """Return the bytes of memory that the files of a directory take."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def share_and_wait(pipe: Connection, folder: Path) -> None:
    copy = share(folder)
    pipe.send(int(copy.memory.sum()))
    pipe.recv()


def test_processes_with_equal_bytes_hold_one_copy_until_the_last_is_gone(folder: Path):
    children = [forked.start(share_and_wait, folder) for _ in range(4)]  # all at once
    sums = {pipe.recv() for _, pipe in children}
    own = share(folder)
    assert sums == {int(own.memory.sum())}
    assert measure(folder) == NUM_BYTES
    other = share(folder, seed=1)
    assert measure(folder) == 2 * NUM_BYTES
    for child, _ in children:
        child.kill()
        child.join()
    del other
    gc.collect()
    remove_stale_segments(folder)
    assert measure(folder) == NUM_BYTES, "in use by this process"
    del own
    gc.collect()
    assert measure(folder) == 0


def test_copies_of_killed_processes_are_removed(folder: Path):
    child, pipe = forked.start(share_and_wait, folder)
    pipe.recv()
    remove_stale_segments(folder)
    assert measure(folder) == NUM_BYTES
    child.kill()
    child.join()
    assert measure(folder) == NUM_BYTES
    remove_stale_segments(folder)
    assert list(folder.iterdir()) == []


def test_a_full_shared_memory_is_one_line_that_names_the_setting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    line = rf"^scorer.offload=true: layer: {folder} has no room for 3.1 MB more \(No space left.*$"
    with pytest.raises(ConfigError, match=line):
        share(folder)
    assert list(folder.iterdir()) == []
