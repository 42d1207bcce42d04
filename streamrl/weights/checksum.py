"""Checksums of buckets: a thread hashes written bytes while the caller copies the next ones.

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
"""Memory bandwidth is the limit beyond this number."""


class RunningChecksum(AbstractContextManager["RunningChecksum"]):
    """Checksum of a bucket that is being filled front to back; use in a `with` block.

    The end of the block stops the hashing thread. Bytes reported to `hash_written` must not change
    until `finish_bucket` returns.
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
        """Hash new bytes in another thread; the first `end` bytes of the bucket are final now.

        `data`: memory of the bucket, uint8. Less than HASH_CHUNK_BYTES of new bytes wait for the
        next call.
        """
        # If the previous piece is still being hashed, this one is hashed with the next call.
        if end - self._num_hashed >= HASH_CHUNK_BYTES and (
            self._pending_hash is None or self._pending_hash.done()
        ):
            self._pending_hash = self._executor.submit(
                self._update_digest, data[self._num_hashed : end]
            )
            self._num_hashed = end

    def finish_bucket(self, data: Array) -> str:
        """Return the hex checksum of the complete bucket `data`, and reset for the next bucket."""
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
    """Return the hex checksum of each array, hashed by several threads if the arrays are large."""
    num_threads = min(len(arrays), os.cpu_count() or 1, MAX_HASH_THREADS)
    if num_threads <= 1 or sum(array.nbytes for array in arrays) < HASH_CHUNK_BYTES:
        return [compute_checksum(array) for array in arrays]
    with ThreadPoolExecutor(num_threads, "checksum") as threads:
        return list(threads.map(compute_checksum, arrays))
