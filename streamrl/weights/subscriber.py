"""The follower's side: buckets in, tensors out, and the version that is held."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.hashing import checksums
from streamrl.weights.manifest import Bucket, WeightManifest, tensor_view


def unpack(manifest: WeightManifest, arrays: Sequence[Array]) -> dict[str, torch.Tensor]:
    """The tensors of a version as views of its buckets, uint8 [num_bytes] each; nothing is copied.

    The views are as read-only as the arrays are, though torch does not know it: copy before
    writing. Raises WeightsError naming version, bucket and what is wrong if a bucket is missing,
    is one too many, has another size or another checksum, or does not hold its tensors.
    """
    num_buckets = len(manifest.buckets)
    if len(arrays) != num_buckets:
        raise WeightsError(
            f"weights version {manifest.version}: {len(arrays)} buckets came, wanted {num_buckets}"
        )
    faults = [_misfit(bucket, data) for bucket, data in zip(manifest.buckets, arrays, strict=True)]
    if not any(faults):
        pairs = zip(manifest.buckets, checksums(arrays), strict=True)
        faults = [_mismatch(bucket, found) for bucket, found in pairs]
    for index, fault in enumerate(faults):
        if fault:
            place = f"weights version {manifest.version}, bucket {index} of {num_buckets}"
            raise WeightsError(f"{place}: {fault}")
    return {
        slot.name: tensor_view(data, slot)
        for bucket, data in zip(manifest.buckets, arrays, strict=True)
        for slot in bucket.slots
    }


def _misfit(bucket: Bucket, data: Array) -> str | None:
    """What is wrong with the size of a bucket, if anything."""
    if data.dtype != np.uint8 or data.shape != (bucket.num_bytes,):
        return f"is {data.dtype}{list(data.shape)}, wanted uint8[{bucket.num_bytes}]"
    for slot in bucket.slots:
        if slot.end > bucket.num_bytes:
            return f"{slot.name} ends at byte {slot.end}, the bucket at {bucket.num_bytes}"
    return None


def _mismatch(bucket: Bucket, found: str) -> str | None:
    """What is wrong with the bytes of a bucket, if anything, by their checksum."""
    return None if found == bucket.checksum else f"checksum is {found}, wanted {bucket.checksum}"


@dataclass(frozen=True)
class Loaded:
    """What it took a model to go over to a version.

    pause_s: while nothing was computed, s. interrupted: rollouts that had begun, and go on.
    copied_bytes: of weights, also those that were cast or merged; the rest is used where it lies.
    """

    pause_s: float = 0.0
    interrupted: int = 0
    copied_bytes: int = 0


class HeldVersion:
    """The version one holder (a generator, a scorer) serves, and a place to wait for a newer one.

    Belongs to one event loop. -1 is no version at all. What is followed may stand still for some
    versions: `due` says which one there is at a version of the policy.
    """

    def __init__(
        self, holder: str, version: int = -1, *, due: Callable[[int], int] = lambda version: version
    ) -> None:
        self._due = due
        self.holder = holder
        self._version = version
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The version that is held now."""
        return self._version

    def advance(self, version: int) -> None:
        """From now on `version` is held. Raises WeightsError unless it is newer."""
        if version <= self._version:
            raise WeightsError(
                f"{self.holder} holds version {self._version}: cannot go to version {version}"
            )
        self._version = version
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def at_least(self, version: int) -> int:
        """Wait until what is due at `version`, or a newer one, is held, and say which one is.

        It has no deadline of its own, which would have to know how many steps a resumed run makes
        again before that version. Two others bound it: that of the trainer, which has to make the
        version, and those of whoever takes it up, with whom the process ends.
        """
        while self._version < self._due(version):
            await self._changed.wait()
        return self._version
