"""Transport within a process: an object store whose handles are the arrays."""

from typing import Any

import numpy as np
import torch

from streamrl.weights import WeightBucket
from streamrl.weights.manifest import BucketMemory
from streamrl.weights.transport import TransportWriter
from streamrl.weights.transports.object_store import ObjectStoreReader, ObjectStoreWriter


class LocalWriter(ObjectStoreWriter):
    """Puts buckets into the store of this process."""

    def __init__(self) -> None:
        super().__init__(np.copy)


class LocalDeviceWriter(TransportWriter):
    """Keeps buckets as tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 7, dtype=torch.uint8, device=self._device)

    def commit_bucket(self, bucket: WeightBucket, data: BucketMemory) -> Any:
        return data


class LocalReader(ObjectStoreReader):
    """Fetches buckets from the store of this process."""

    def __init__(self) -> None:
        super().__init__("policy", lambda handles, subject, timeout_s: handles)
