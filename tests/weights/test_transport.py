"""Every transport of the table: both ends, made from the settings of a run."""

import numpy as np
import pytest
import torch

from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.config import TRANSPORT_MODULES
from streamrl.weights.transport import ClusterAccess, TransportSpec

LOCAL = ClusterAccess(np.copy, lambda handles, subject, timeout_s: handles, lambda: "127.0.0.1")


@pytest.mark.parametrize("name", TRANSPORT_MODULES)
def test_a_version_travels_by_every_transport(name: str):
    spec = TransportSpec(name, "", "travel", 2, LOCAL, max_bytes={"critic": 1 << 20})
    writer, reader = spec.make_writer("critic"), spec.make_reader("critic", "critic-0")
    try:
        for version in range(3):
            tensors = {"a": torch.arange(100.0) + version, "b": torch.ones(7, 3)}
            manifest = publish_version(
                tensors.items(), version=version, bucket_bytes=256, writer=writer
            )
            fetched = unpack_tensors(manifest, reader.fetch_buckets(manifest))
            assert all(torch.equal(fetched[key], tensor) for key, tensor in tensors.items())
            assert reader.fallback_reason is None
        assert reader.bytes_fetched > 0
    finally:
        reader.close()
        writer.close()
        spec.clean_up()
