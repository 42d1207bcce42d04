"""Follower's side of weight sync: verify the buckets of a version and view their tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.checksum import compute_checksums
from streamrl.weights.manifest import WeightBucket, WeightManifest
from streamrl.weights.tensor_views import view_tensor


def unpack_tensors(manifest: WeightManifest, arrays: Sequence[Array]) -> dict[str, torch.Tensor]:
    """Verify the buckets of a version, and return its tensors by name as views of the buckets.

    `arrays`: bytes of each bucket, uint8 [num_bytes]. The views are read-only if the arrays are,
    which torch cannot enforce: copy before writing. Raises WeightsError with version, bucket and
    reason if the number of buckets, a size or a checksum is wrong, or a bucket does not contain its
    tensors.
    """
    num_buckets = len(manifest.buckets)
    if len(arrays) != num_buckets:
        raise WeightsError(
            f"weights version {manifest.version}: received {len(arrays)} buckets,"
            f" expected {num_buckets}"
        )
    faults = [
        _find_size_fault(bucket, data)
        for bucket, data in zip(manifest.buckets, arrays, strict=True)
    ]
    if not any(faults):
        pairs = zip(manifest.buckets, compute_checksums(arrays), strict=True)
        faults = [_find_checksum_fault(bucket, checksum) for bucket, checksum in pairs]
    for index, fault in enumerate(faults):
        if fault:
            place = f"weights version {manifest.version}, bucket {index} of {num_buckets}"
            raise WeightsError(f"{place}: {fault}")
    return {
        slot.name: view_tensor(data, slot)
        for bucket, data in zip(manifest.buckets, arrays, strict=True)
        for slot in bucket.slots
    }


def _find_size_fault(bucket: WeightBucket, data: Array) -> str | None:
    """Return why a bucket's dtype, size or slots are wrong, or None."""
    if data.dtype != np.uint8 or data.shape != (bucket.num_bytes,):
        return f"is {data.dtype}{list(data.shape)}, expected uint8[{bucket.num_bytes}]"
    for slot in bucket.slots:
        if slot.end > bucket.num_bytes:
            return f"{slot.name} ends at byte {slot.end}, the bucket at {bucket.num_bytes}"
    return None


def _find_checksum_fault(bucket: WeightBucket, checksum: str) -> str | None:
    """Return why a bucket's checksum is wrong, or None."""
    if checksum == bucket.checksum:
        return None
    return f"checksum is {checksum}, expected {bucket.checksum}"
