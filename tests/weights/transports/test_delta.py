"""Delta transport: only changes travel, and the result is bit-exact."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights import WeightManifest
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.transports.delta import DeltaReader, DeltaWriter, decode_delta, encode_delta
from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from tests.weights.local_transport import LocalReader, LocalWriter

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


def put(
    writer: DeltaWriter, version: int, tensors: dict[str, torch.Tensor], bucket_bytes: int = 4096
) -> WeightManifest:
    return publish_version(
        tensors.items(), version=version, bucket_bytes=bucket_bytes, writer=writer
    )


def read(reader: DeltaReader, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack_tensors(manifest, reader.fetch_buckets(manifest))


def is_equal(fetched: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return fetched.keys() == expected.keys() and all(
        torch.equal(fetched[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in expected.items()
    )


def test_a_delta_is_a_bitmap_and_the_words_that_changed():
    old = np.array([1, 2, 3, 4, 5], np.float32)
    new = np.array([1, 2, 9, 4, 8], np.float32)
    delta = encode_delta(old.view(np.uint8), new.view(np.uint8), 4)
    assert delta[:4].tolist() == [0b00101000, 0, 0, 0]
    assert delta[4:].view(np.float32).tolist() == [9, 8]
    assert decode_delta(old.view(np.uint8), delta, 4).view(np.float32).tolist() == new.tolist()


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 200), st.floats(0, 1), st.integers(0, 999))
def test_decoding_inverts_encoding(word: int, num_words: int, share: float, seed: int):
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, word * num_words, np.uint8)
    flips = np.repeat(random.random(num_words) < share, word)
    new = np.where(flips, random.integers(0, 256, old.size, np.uint8), old)
    assert (decode_delta(old, encode_delta(old, new, word), word) == new).all()


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4), st.integers(0, 99))
def test_versions_arrive_bit_for_bit_for_any_change(kinds: list[torch.dtype], seed: int):
    random = torch.Generator().manual_seed(seed)
    writer, reader = DeltaWriter(LocalWriter()), DeltaReader(LocalReader())
    tensors = {
        f"t{i}": (100 * torch.randn(37, generator=random)).to(dtype)
        for i, dtype in enumerate(kinds)
    }
    for version in range(4):
        fetched = read(reader, put(writer, version, tensors, bucket_bytes=200))
        assert is_equal(fetched, tensors)
        for tensor in tensors.values():
            tensor[torch.rand(37, generator=random) < 0.2] += 1


def test_signed_zeros_and_nans_are_exact():
    writer, reader = DeltaWriter(LocalWriter()), DeltaReader(LocalReader())
    first = torch.tensor([0.0, float("nan"), 1.0] + [7.0] * 30)
    second = torch.tensor([-0.0, float("nan"), float("-inf")] + [7.0] * 30)
    read(reader, put(writer, 0, {"a": first}))
    assert is_equal(read(reader, put(writer, 1, {"a": second})), {"a": second})


def test_one_changed_element_costs_a_32nd_of_the_bucket():
    writer, reader = DeltaWriter(LocalWriter()), DeltaReader(LocalReader())
    weight = torch.zeros(1024)
    read(reader, put(writer, 0, {"a": weight}))
    assert reader.bytes_fetched == 4096
    weight[5] = 1
    read(reader, put(writer, 1, {"a": weight}))
    assert reader.bytes_fetched == 4096 + 1024 // 8 + 4


def test_a_reader_without_the_base_version_fetches_full_buckets():
    writer = DeltaWriter(LocalWriter())
    early, late, skips = (DeltaReader(LocalReader()) for _ in range(3))
    weight = torch.zeros(1024)
    for version in range(4):
        weight[version] = 1
        manifest = put(writer, version, {"a": weight})
        assert is_equal(read(early, manifest), {"a": weight})
        if version in (0, 2, 3):
            assert is_equal(read(skips, manifest), {"a": weight})
    assert is_equal(read(late, manifest), {"a": weight})
    deltas = 1024 // 8 + 4
    assert early.bytes_fetched == 4096 + 3 * deltas
    assert skips.bytes_fetched == 2 * 4096 + deltas
    assert late.bytes_fetched == 4096


def test_full_buckets_travel_if_all_words_or_the_layout_changed():
    writer, reader = DeltaWriter(LocalWriter()), DeltaReader(LocalReader())
    layouts = [{"a": torch.zeros(64)}, {"a": torch.ones(64)}, {"a": torch.ones(32, 2)}]
    for version, tensors in enumerate(layouts):
        manifest = put(writer, version, tensors)
        assert manifest.handles[0].delta_handle is None
        assert is_equal(read(reader, manifest), tensors)


def test_a_failed_version_is_not_a_base():
    writer, reader = DeltaWriter(LocalWriter()), DeltaReader(LocalReader())
    weight = torch.zeros(1024)
    read(reader, put(writer, 0, {"a": weight}))
    weight[1] = 1
    duplicates = [("a", weight), ("a", weight)]
    with pytest.raises(WeightsError, match="duplicate tensor"):
        publish_version(duplicates, version=1, bucket_bytes=4096, writer=writer)
    weight[2] = 1
    manifest = put(writer, 2, {"a": weight})
    assert manifest.handles[0].base_version == 0
    assert is_equal(read(reader, manifest), {"a": weight})


def test_fetched_arrays_do_not_change_later():
    writer, reader = DeltaWriter(LocalWriter()), DeltaReader(LocalReader())
    weight = torch.zeros(1024)
    (old,) = reader.fetch_buckets(put(writer, 0, {"a": weight}))
    weight[0] = 1
    (new,) = reader.fetch_buckets(put(writer, 1, {"a": weight}))
    assert not old.any()
    assert not new.flags.writeable


def test_shared_memory_can_carry_deltas():
    writer = DeltaWriter(SharedMemoryWriter("delta", LocalWriter(), keep_versions=1))
    reader = DeltaReader(SharedMemoryReader("policy", LocalReader()))
    weights = {f"t{i}": torch.randn(300) for i in range(5)}
    try:
        for version in range(5):
            weights[f"t{version}"][version] = 1.0
            assert is_equal(read(reader, put(writer, version, weights, 2048)), weights)
    finally:
        writer.close()


@pytest.mark.parametrize("num_bytes", [100, 131, 132, 136])
def test_a_delta_that_does_not_fit_is_an_error(num_bytes: int):
    class Cutting(LocalReader):
        def fetch_buckets(self, manifest: WeightManifest) -> list[Array]:
            return [np.resize(array, num_bytes) for array in super().fetch_buckets(manifest)]

    writer, carrier = DeltaWriter(LocalWriter()), LocalReader()
    reader = DeltaReader(carrier)
    weight = torch.zeros(1024)
    read(reader, put(writer, 0, {"a": weight}))
    weight[:2] = 1
    carrier.__class__ = Cutting
    manifest = put(writer, 1, {"a": weight})
    if num_bytes == 136:
        assert is_equal(read(reader, manifest), {"a": weight})
    else:
        with pytest.raises(WeightsError, match="version 1, bucket 0"):
            read(reader, manifest)


def test_a_republished_version_travels_in_full():
    writer, reader = DeltaWriter(LocalWriter()), DeltaReader(LocalReader())
    tensors = {"a": torch.arange(1000.0)}
    put(writer, 0, tensors)
    # The first copy was damaged, so a reader that has it must not use it as a base.
    damaged = put(writer, 1, tensors)
    reader.fetch_buckets(
        replace(damaged, handles=tuple(replace(h, delta_handle=None) for h in damaged.handles))
    )
    reader._last_buckets = [array.copy() for array in reader._last_buckets]
    reader._last_buckets[0][5] ^= 1
    republished = put(writer, 1, tensors)
    assert all(handle.delta_handle is None for handle in republished.handles)
    assert is_equal(read(reader, republished), tensors)
    assert put(writer, 2, tensors).handles[0].base_version == 1
