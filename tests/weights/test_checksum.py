import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.weights import checksum as hashing
from streamrl.weights.checksum import RunningChecksum, compute_checksums
from streamrl.weights.manifest import compute_checksum
from streamrl.weights.pack import pack_buckets
from tests.weights.test_travel import some_tensors


def random_bytes(num_bytes: int) -> np.ndarray:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)


@given(st.lists(st.lists(st.integers(0, 300), max_size=8), min_size=1, max_size=4))
def test_hashing_in_pieces_gives_the_checksum_of_the_bucket(ends: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, RunningChecksum() as running:
        patch.setattr(hashing, "HASH_CHUNK_BYTES", 100)
        for sizes in ends:
            data = random_bytes(sum(sizes))
            for end in np.cumsum(sizes, dtype=int).tolist():
                running.hash_written(data, end)
            assert running.finish_bucket(data) == compute_checksum(data)


@pytest.mark.parametrize("num_bytes", [10, hashing.HASH_CHUNK_BYTES])
def test_checksums_keep_the_order_of_the_arrays(num_bytes: int) -> None:
    arrays = [random_bytes(num_bytes + i) for i in range(5)]
    assert compute_checksums(arrays) == [compute_checksum(array) for array in arrays]


def test_a_tensor_larger_than_a_hash_chunk_is_copied_completely() -> None:
    tensors = {
        "a": torch.randn(3, 1_000_001),
        "b": torch.randn(1_000_001, 3).t(),
        "c": torch.ones(1),
    }
    ((bucket, data),) = pack_buckets(tensors.items(), version=1, bucket_bytes=1 << 30)
    assert bucket.checksum == compute_checksum(data)
    for slot in bucket.slots:
        copy = torch.from_numpy(data[slot.offset : slot.end]).view(torch.float32).view(slot.shape)
        assert torch.equal(copy, tensors[slot.name])


def test_gaps_between_tensors_are_zeroed() -> None:
    def pack(filled_with: int) -> list[tuple[str, bytes]]:
        rooms = pack_buckets(
            some_tensors().items(),
            version=1,
            bucket_bytes=200,
            allocate=lambda num_bytes: np.full(num_bytes, filled_with, np.uint8),
        )
        return [(bucket.checksum, data.tobytes()) for bucket, data in rooms]

    assert pack(0) == pack(255)
