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
def test_a_bucket_hashed_in_pieces_has_the_checksum_of_the_whole(laid: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch, RunningChecksum() as running:
        patch.setattr(hashing, "HASH_CHUNK_BYTES", 100)
        for sizes in laid:
            data = random_bytes(sum(sizes))
            for end in np.cumsum(sizes, dtype=int).tolist():
                running.hash_written(data, end)
            assert running.finish_bucket(data) == compute_checksum(data)


@pytest.mark.parametrize("num_bytes", [10, hashing.HASH_CHUNK_BYTES])
def test_checksums_come_in_the_order_of_their_arrays(num_bytes: int) -> None:
    arrays = [random_bytes(num_bytes + i) for i in range(5)]
    assert compute_checksums(arrays) == [compute_checksum(array) for array in arrays]


def test_a_large_tensor_is_laid_whole() -> None:
    tensors = {
        "a": torch.randn(3, 1_000_001),
        "b": torch.randn(1_000_001, 3).t(),
        "c": torch.ones(1),
    }
    ((bucket, data),) = pack_buckets(tensors.items(), version=1, bucket_bytes=1 << 30)
    assert bucket.checksum == compute_checksum(data)
    for slot in bucket.slots:
        found = torch.from_numpy(data[slot.offset : slot.end]).view(torch.float32).view(slot.shape)
        assert torch.equal(found, tensors[slot.name])


def test_what_a_room_held_before_is_no_part_of_a_bucket() -> None:
    def packed(filled_with: int) -> list[tuple[str, bytes]]:
        rooms = pack_buckets(
            some_tensors().items(),
            version=1,
            bucket_bytes=200,
            allocate=lambda num_bytes: np.full(num_bytes, filled_with, np.uint8),
        )
        return [(bucket.checksum, data.tobytes()) for bucket, data in rooms]

    assert packed(0) == packed(255)
