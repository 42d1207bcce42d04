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
from streamrl.weights.manifest import checksum

PIECE_BYTES = 4 << 20
"""What is handed to another thread at once: to hand it over costs as much as hashing 0.5 MB."""

MOST_THREADS = 4
"""Memory, not the processor, is the limit beyond these."""


class RunningChecksum(AbstractContextManager["RunningChecksum"]):
    """The checksum of a bucket that is being laid, front to back; its thread ends with the block.

    What was said to be laid must stay as it is until `finish`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checksum")
        self._running: Future[None] | None = None
        self._digest = xxhash.xxh3_64()
        self._hashed = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()

    def laid(self, data: Array, end: int) -> None:
        """The first `end` bytes of the bucket, uint8, are what they will be."""
        if end - self._hashed >= PIECE_BYTES and (self._running is None or self._running.done()):
            self._running = self._thread.submit(self._update, data[self._hashed : end])
            self._hashed = end

    def finish(self, data: Array) -> str:
        """`checksum` of the whole bucket, and the next one begins."""
        if self._running is not None:
            self._running.result()
        self._update(data[self._hashed :])
        found = self._digest.hexdigest()
        self._digest.reset()
        self._hashed = 0
        self._running = None
        return found

    def _update(self, piece: Array) -> None:
        self._digest.update(piece.data)


def checksums(arrays: Sequence[Array]) -> list[str]:
    """`checksum` of each, by as many threads as help."""
    num_threads = min(len(arrays), os.cpu_count() or 1, MOST_THREADS)
    if num_threads <= 1 or sum(array.nbytes for array in arrays) < PIECE_BYTES:
        return [checksum(array) for array in arrays]
    with ThreadPoolExecutor(num_threads, "checksum") as threads:
        return list(threads.map(checksum, arrays))
