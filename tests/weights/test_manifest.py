import pickle

import pytest

from streamrl.weights import WeightBucket, WeightManifest


def test_manifest_bytes_are_the_sum_over_its_buckets():
    manifest = WeightManifest(
        3, (WeightBucket((), 10, "x"), WeightBucket((), 5, "y")), ("h0", "h1")
    )
    assert manifest.num_bytes == 15
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_every_bucket_needs_a_handle():
    with pytest.raises(ValueError, match="1 handles for 2 buckets"):
        WeightManifest(3, (WeightBucket((), 10, "x"), WeightBucket((), 5, "y")), ("h0",))
