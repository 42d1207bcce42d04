"""Checksums computed in parallel with copying: a thread hashes one piece while the next is written.

XXH3 releases the GIL, so hashing on a second core is nearly free.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType

import xxhash

from streamrl.messages import Array
from streamrl.weights.manifest import compute_checksum

HASH_CHUNK_BYTES = 4 << 20
"""Bytes hashed per task of the thread pool; submitting a task costs as much as hashing 0.5 MB."""

MAX_HASH_THREADS = 4
"""More threads do not help: memory bandwidth is the limit."""


class RunningChecksum(AbstractContextManager["RunningChecksum"]):
    """Checksum of a bucket that is being filled front to back; use in a `with` block.

    The block's end stops the hashing thread. Bytes reported to `hash_written` must not change until
    `finish_bucket` returns.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "checksum")
        self._pending_hash: Future[None] | None = None
        self._digest = xxhash.xxh3_64()
        self._num_hashed = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._executor.shutdown()

    def hash_written(self, data: Array, end: int) -> None:
        """Report that the first `end` bytes of the bucket (uint8) are final."""
        # If the previous piece is still being hashed, this one is hashed with the next call.
        if end - self._num_hashed >= HASH_CHUNK_BYTES and (
            self._pending_hash is None or self._pending_hash.done()
        ):
            self._pending_hash = self._executor.submit(
                self._update_digest, data[self._num_hashed : end]
            )
            self._num_hashed = end

    def finish_bucket(self, data: Array) -> str:
        """Return the checksum of the whole bucket and reset for the next bucket."""
        if self._pending_hash is not None:
            self._pending_hash.result()
        self._update_digest(data[self._num_hashed :])
        checksum = self._digest.hexdigest()
        self._digest.reset()
        self._num_hashed = 0
        self._pending_hash = None
        return checksum

    def _update_digest(self, piece: Array) -> None:
        self._digest.update(piece.data)


def compute_checksums(arrays: Sequence[Array]) -> list[str]:
    """Return the checksum of each array, hashed by several threads if the arrays are large."""
    num_threads = min(len(arrays), os.cpu_count() or 1, MAX_HASH_THREADS)
    if num_threads <= 1 or sum(array.nbytes for array in arrays) < HASH_CHUNK_BYTES:
        return [compute_checksum(array) for array in arrays]
    with ThreadPoolExecutor(num_threads, "checksum") as threads:
        return list(threads.map(compute_checksum, arrays))
