"""Round trip of named tensors through buckets, their layout and their checksums."""

import math
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights import (
    WeightBucket,
    WeightManifest,
    buckets,
)
from streamrl.weights.buckets import (
    ALIGNMENT_BYTES,
    TORCH_DTYPES,
    pack_buckets,
    publish_version,
    unpack_tensors,
)
from tests.weights.local_transport import LocalWriter


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(7, 5, generator=generator),
        "norm": torch.randn(5, generator=generator).bfloat16(),
        "scale": torch.tensor(2.0),
        "head": torch.randn(5, 7, generator=generator).t(),
    }


def publish_and_receive(
    tensors: dict[str, torch.Tensor], *, bucket_bytes: int = 200
) -> tuple[WeightManifest, list[Array]]:
    """Return the tensors as version 4, and the buckets as received: read-only copies."""
    manifest = publish_version(
        tensors.items(), version=4, bucket_bytes=bucket_bytes, writer=LocalWriter()
    )
    arrays = list(manifest.handles)
    for array in arrays:
        array.flags.writeable = False
    return manifest, arrays


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TORCH_DTYPES)),
            st.lists(st.integers(1, 9), max_size=3).map(tuple),
        ),
        max_size=30,
    ),
    st.integers(1, 2000),
)
def test_round_trip_of_any_tensors_in_disjoint_aligned_slots(
    kinds: list[tuple[str, tuple[int, ...]]], bucket_bytes: int
):
    tensors = {}
    for i, (dtype, shape) in enumerate(kinds):
        values = (torch.arange(math.prod(shape)) % 7).to(TORCH_DTYPES[dtype])
        transposed = values.view(shape[::-1]).permute([*range(len(shape))][::-1])
        tensors[f"t{i}"] = transposed if i % 2 else transposed.contiguous()
    with pytest.MonkeyPatch.context() as patch:  # most tensors are larger than a chunk
        patch.setattr(buckets, "HASH_CHUNK_BYTES", 100)
        manifest, arrays = publish_and_receive(tensors, bucket_bytes=bucket_bytes)
        unpacked = unpack_tensors(manifest, arrays)
    slots = [slot for bucket in manifest.buckets for slot in bucket.slots]
    assert [(slot.name, (slot.dtype, slot.shape)) for slot in slots] == [
        *zip(tensors, kinds, strict=True)
    ]
    for bucket in manifest.buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.slots) == 1
        assert all(slot.offset % ALIGNMENT_BYTES == 0 for slot in bucket.slots)
        assert all(a.end <= b.offset for a, b in pairwise(bucket.slots))
    assert unpacked.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(unpacked[name].float(), tensor.float())


def test_unpacking_copies_nothing():
    manifest, arrays = publish_and_receive(some_tensors(), bucket_bytes=10_000)
    (array,) = arrays
    first = array.ctypes.data
    for tensor in unpack_tensors(manifest, arrays).values():
        assert first <= tensor.data_ptr() < first + array.nbytes


def test_packing_holds_a_single_bucket_at_a_time():
    alive: list[weakref.ref[Array]] = []
    max_buckets = 0

    class Counting(LocalWriter):
        def commit_bucket(self, bucket: WeightBucket, data: Array) -> int:
            nonlocal max_buckets
            alive.append(weakref.ref(data))
            max_buckets = max(max_buckets, sum(ref() is not None for ref in alive))
            return len(alive)

    tensors = ((f"t{i}", torch.ones(64)) for i in range(10))
    manifest = publish_version(tensors, version=1, bucket_bytes=256, writer=Counting())
    assert manifest.handles == tuple(range(1, 11))
    assert max_buckets == 1


def test_each_tensor_is_copied_before_the_next_is_requested():
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        shared = torch.zeros(4)
        for i in range(5):
            shared.fill_(i)
            yield f"t{i}", shared

    manifest = publish_version(gathered(), version=1, bucket_bytes=300, writer=LocalWriter())
    unpacked = unpack_tensors(manifest, manifest.handles)
    assert [unpacked[f"t{i}"].tolist() for i in range(5)] == [[i] * 4 for i in range(5)]


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "version 9: duplicate tensor a"),
        (
            [("a", torch.ones(0))],
            r"version 9: a has no elements, shape \(0,\): was the parameter gathered",
        ),
        (
            [("a", torch.ones(2, dtype=torch.complex64))],
            "version 9: a has unsupported dtype complex64",
        ),
    ],
)
def test_unsupported_tensors_are_refused_by_name(
    tensors: list[tuple[str, torch.Tensor]], fault: str
):
    with pytest.raises(WeightsError, match=fault):
        list(pack_buckets(tensors, version=9, bucket_bytes=100))


def flip_bit(arrays: list[Array]) -> list[Array]:
    first, damaged, *others = arrays
    damaged = damaged.copy()
    damaged[17] ^= 4
    return [first, damaged, *others]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (flip_bit, r"bucket 1 of 3: checksum is \w+, expected"),
        (lambda arrays: arrays[:-1], "received 2 buckets, expected 3"),
        (lambda arrays: [*arrays, arrays[0]], "received 4 buckets, expected 3"),
        (lambda arrays: arrays[::-1], "bucket 0 of 3: checksum"),
        (
            lambda arrays: [*arrays[:2], arrays[2][:-1]],
            r"bucket 2 of 3: is uint8\[139\], expected uint8\[140\]",
        ),
        (lambda arrays: [*arrays[:2], arrays[2].view(np.int8)], "bucket 2 of 3: is int8"),
    ],
)
def test_damaged_missing_and_swapped_buckets_are_detected(
    damage: Callable[[list[Array]], list[Array]], fault: str
):
    manifest, arrays = publish_and_receive(some_tensors())
    with pytest.raises(WeightsError, match=f"version 4.*{fault}"):
        unpack_tensors(manifest, damage(arrays))


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "packed"),
    [
        ({"a": 40, "b": 40, "c": 40}, 104, [["a", "b"], ["c"]]),
        ({"a": 10, "large": 1000, "b": 10}, 128, [["a"], ["large"], ["b"]]),
    ],
)
def test_a_tensor_that_does_not_fit_starts_a_new_bucket(
    sizes: dict[str, int], bucket_bytes: int, packed: list[list[str]]
):
    tensors = {name: torch.ones(size, dtype=torch.uint8) for name, size in sizes.items()}
    buckets_of = pack_buckets(tensors.items(), version=1, bucket_bytes=bucket_bytes)
    assert [[slot.name for slot in bucket.slots] for bucket, _ in buckets_of] == packed


def test_gaps_between_tensors_are_zeroed():
    def pack(filled_with: int) -> list[tuple[str, bytes]]:
        packed = pack_buckets(
            some_tensors().items(),
            version=1,
            bucket_bytes=200,
            allocate=lambda num_bytes: np.full(num_bytes, filled_with, np.uint8),
        )
        return [(bucket.checksum, bytes(data)) for bucket, data in packed]

    assert pack(0) == pack(255)
