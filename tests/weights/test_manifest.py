import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.weights import TensorMetadata, TensorSlot, WeightBucket, WeightManifest, plan_buckets
from streamrl.weights.manifest import ALIGNMENT_BYTES
from streamrl.weights.tensor_views import TORCH_DTYPES, view_tensor

SPECS = st.lists(
    st.builds(
        TensorMetadata,
        name=st.uuids().map(str),
        dtype=st.sampled_from(sorted(TORCH_DTYPES)),
        shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    ),
    max_size=30,
)


def test_tensors_are_packed_at_multiples_of_64_bytes() -> None:
    specs = [TensorMetadata("a", "float32", (5,)), TensorMetadata("b", "bfloat16", (3, 2))]
    assert plan_buckets(specs, max_bytes=100) == (
        (
            TensorSlot("a", "float32", (5,), offset=0, num_bytes=20),
            TensorSlot("b", "bfloat16", (3, 2), offset=64, num_bytes=12),
        ),
    )


def test_a_tensor_that_does_not_fit_starts_a_new_bucket() -> None:
    specs = [TensorMetadata(name, "uint8", (40,)) for name in "abc"]
    buckets = plan_buckets(specs, max_bytes=104)
    assert [[slot.name for slot in slots] for slots in buckets] == [["a", "b"], ["c"]]


def test_a_tensor_larger_than_a_bucket_gets_its_own_bucket() -> None:
    sizes = {"a": 10, "big": 1000, "b": 10}
    specs = [TensorMetadata(name, "uint8", (size,)) for name, size in sizes.items()]
    buckets = plan_buckets(specs, max_bytes=128)
    assert [[slot.name for slot in slots] for slots in buckets] == [["a"], ["big"], ["b"]]


@given(SPECS, st.integers(1, 2000))
def test_every_tensor_has_exactly_one_slot_and_slots_do_not_overlap(
    specs: list[TensorMetadata], max_bytes: int
) -> None:
    buckets = plan_buckets(specs, max_bytes=max_bytes)
    slots = [slot for bucket in buckets for slot in bucket]
    assert [TensorMetadata(s.name, s.dtype, s.shape) for s in slots] == specs
    for bucket in buckets:
        assert bucket[-1].end <= max_bytes or len(bucket) == 1
        assert all(slot.offset % ALIGNMENT_BYTES == 0 for slot in bucket)
        assert all(a.end <= b.offset for a, b in pairwise(bucket))


def test_a_tensor_view_shares_memory_even_with_a_read_only_array() -> None:
    data = np.zeros(128, np.uint8)
    data[64:68] = np.frombuffer(np.float32(2.5).tobytes(), np.uint8)
    data.flags.writeable = False
    view = view_tensor(data, TensorSlot("a", "float32", (), offset=64, num_bytes=4))
    assert view.item() == 2.5
    assert view.data_ptr() == data.ctypes.data + 64


def test_manifest_bytes_are_the_sum_over_its_buckets() -> None:
    manifest = WeightManifest(
        3, (WeightBucket((), 10, "x"), WeightBucket((), 5, "y")), ("h0", "h1")
    )
    assert manifest.num_bytes == 15
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_every_bucket_needs_a_handle() -> None:
    with pytest.raises(ValueError, match="1 handles for 2 buckets"):
        WeightManifest(3, (WeightBucket((), 10, "x"), WeightBucket((), 5, "y")), ("h0",))


def test_tensor_sizes_match_torch() -> None:
    for name, dtype in TORCH_DTYPES.items():
        assert TensorMetadata("a", name, (2, 3)).num_bytes == torch.empty(2, 3, dtype=dtype).nbytes
