"""The follower's side: buckets in, tensors out, and the version that is held."""

from collections.abc import Sequence

import numpy as np
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights.checksum import compute_checksums
from streamrl.weights.manifest import WeightBucket, WeightManifest
from streamrl.weights.tensor_views import view_tensor


def unpack_tensors(manifest: WeightManifest, arrays: Sequence[Array]) -> dict[str, torch.Tensor]:
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
    faults = [
        _find_size_fault(bucket, data)
        for bucket, data in zip(manifest.buckets, arrays, strict=True)
    ]
    if not any(faults):
        pairs = zip(manifest.buckets, compute_checksums(arrays), strict=True)
        faults = [_find_checksum_fault(bucket, found) for bucket, found in pairs]
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
    """What is wrong with the size of a bucket, if anything."""
    if data.dtype != np.uint8 or data.shape != (bucket.num_bytes,):
        return f"is {data.dtype}{list(data.shape)}, wanted uint8[{bucket.num_bytes}]"
    for slot in bucket.slots:
        if slot.end > bucket.num_bytes:
            return f"{slot.name} ends at byte {slot.end}, the bucket at {bucket.num_bytes}"
    return None


def _find_checksum_fault(bucket: WeightBucket, found: str) -> str | None:
    """What is wrong with the bytes of a bucket, if anything, by their checksum."""
    return None if found == bucket.checksum else f"checksum is {found}, wanted {bucket.checksum}"
