"""Every transport of the table: both ends, made from the settings of a run."""

import numpy as np
import pytest

from streamrl.weights.config import TRANSPORT_MODULES
from streamrl.weights.transport import ClusterAccess, TransportSpec
from tests.weights.local_transport import Versions

LOCAL = ClusterAccess(np.copy, lambda handles, subject, timeout_s: handles, lambda: "127.0.0.1")


@pytest.mark.parametrize("name", TRANSPORT_MODULES)
def test_a_version_travels_by_every_transport(name: str):
    versions = Versions(100, 21, bucket_bytes=256)
    spec = TransportSpec(name, "", "travel", 2, LOCAL, max_bytes={"critic": 1 << 20})
    writer, reader = spec.make_writer("critic"), spec.make_reader("critic", "critic-0")
    try:
        for version in range(3):
            assert versions.fetch(reader, versions.publish(writer, version))
            assert reader.fallback_reason is None
        assert reader.bytes_fetched > 0
    finally:
        reader.close()
        writer.close()
        spec.clean_up()
