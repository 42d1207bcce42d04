"""Checksums beside the work: while one piece is laid, the piece before it is hashed.

XXH3 lets go of the interpreter's lock, so a second core does it and the hash is all but free.
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
"""What is handed to another thread at once: to hand it over costs as much as hashing 0.5 MB."""

MAX_HASH_THREADS = 4
"""Memory, not the processor, is the limit beyond these."""


class RunningChecksum(AbstractContextManager["RunningChecksum"]):
    """The checksum of a bucket that is being laid, front to back; its thread ends with the block.

    What was said to be laid must stay as it is until `finish`.
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
        """The first `end` bytes of the bucket, uint8, are what they will be."""
        if end - self._num_hashed >= HASH_CHUNK_BYTES and (
            self._pending_hash is None or self._pending_hash.done()
        ):
            self._pending_hash = self._executor.submit(
                self._update_digest, data[self._num_hashed : end]
            )
            self._num_hashed = end

    def finish_bucket(self, data: Array) -> str:
        """`checksum` of the whole bucket, and the next one begins."""
        if self._pending_hash is not None:
            self._pending_hash.result()
        self._update_digest(data[self._num_hashed :])
        found = self._digest.hexdigest()
        self._digest.reset()
        self._num_hashed = 0
        self._pending_hash = None
        return found

    def _update_digest(self, piece: Array) -> None:
        self._digest.update(piece.data)


def compute_checksums(arrays: Sequence[Array]) -> list[str]:
    """`checksum` of each, by as many threads as help."""
    num_threads = min(len(arrays), os.cpu_count() or 1, MAX_HASH_THREADS)
    if num_threads <= 1 or sum(array.nbytes for array in arrays) < HASH_CHUNK_BYTES:
        return [compute_checksum(array) for array in arrays]
    with ThreadPoolExecutor(num_threads, "checksum") as threads:
        return list(threads.map(compute_checksum, arrays))
