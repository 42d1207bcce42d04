"""Only what has changed travels, and what comes out is the same to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.messages import Array
from streamrl.weights import WeightManifest
from streamrl.weights.pack import publish_version
from streamrl.weights.transports.delta import DeltaReader, DeltaWriter, decode_delta, encode_delta
from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from streamrl.weights.unpack import unpack_tensors
from tests.weights.local_outlet import LocalInlet, LocalOutlet

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


def put(
    outlet: DeltaWriter, version: int, tensors: dict[str, torch.Tensor], bucket_bytes: int = 4096
) -> WeightManifest:
    return publish_version(
        tensors.items(), version=version, bucket_bytes=bucket_bytes, writer=outlet
    )


def read(inlet: DeltaReader, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack_tensors(manifest, inlet.fetch_buckets(manifest))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in wanted.items()
    )


def test_a_delta_is_a_bitmap_and_the_words_that_changed() -> None:
    old = np.array([1, 2, 3, 4, 5], np.float32)
    new = np.array([1, 2, 9, 4, 8], np.float32)
    delta = encode_delta(old.view(np.uint8), new.view(np.uint8), 4)
    assert delta[:4].tolist() == [0b00101000, 0, 0, 0]
    assert delta[4:].view(np.float32).tolist() == [9, 8]
    assert decode_delta(old.view(np.uint8), delta, 4).view(np.float32).tolist() == new.tolist()


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 200), st.floats(0, 1), st.integers(0, 999))
def test_what_is_decoded_is_what_was_encoded(
    word: int, num_words: int, share: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, word * num_words, np.uint8)
    flips = np.repeat(random.random(num_words) < share, word)
    new = np.where(flips, random.integers(0, 256, old.size, np.uint8), old)
    assert (decode_delta(old, encode_delta(old, new, word), word) == new).all()


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4), st.integers(0, 99))
def test_versions_arrive_bit_for_bit_whatever_changes(kinds: list[torch.dtype], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    outlet, inlet = DeltaWriter(LocalOutlet()), DeltaReader(LocalInlet())
    tensors = {
        f"t{i}": (100 * torch.randn(37, generator=random)).to(dtype)
        for i, dtype in enumerate(kinds)
    }
    for version in range(4):
        found = read(inlet, put(outlet, version, tensors, bucket_bytes=200))
        assert same(found, tensors)
        for tensor in tensors.values():
            tensor[torch.rand(37, generator=random) < 0.2] += 1


def test_zeros_of_either_sign_and_nans_are_kept() -> None:
    outlet, inlet = DeltaWriter(LocalOutlet()), DeltaReader(LocalInlet())
    first = torch.tensor([0.0, float("nan"), 1.0] + [7.0] * 30)
    second = torch.tensor([-0.0, float("nan"), float("-inf")] + [7.0] * 30)
    read(inlet, put(outlet, 0, {"a": first}))
    assert same(read(inlet, put(outlet, 1, {"a": second})), {"a": second})


def test_one_changed_element_costs_a_32nd_of_the_bucket() -> None:
    outlet, inlet = DeltaWriter(LocalOutlet()), DeltaReader(LocalInlet())
    weight = torch.zeros(1024)
    read(inlet, put(outlet, 0, {"a": weight}))
    assert inlet.bytes_fetched == 4096
    weight[5] = 1
    read(inlet, put(outlet, 1, {"a": weight}))
    assert inlet.bytes_fetched == 4096 + 1024 // 8 + 4


def test_who_lacks_the_version_before_takes_the_whole_one() -> None:
    outlet = DeltaWriter(LocalOutlet())
    early, late, skips = (DeltaReader(LocalInlet()) for _ in range(3))
    weight = torch.zeros(1024)
    for version in range(4):
        weight[version] = 1
        manifest = put(outlet, version, {"a": weight})
        assert same(read(early, manifest), {"a": weight})
        if version in (0, 2, 3):
            assert same(read(skips, manifest), {"a": weight})
    assert same(read(late, manifest), {"a": weight})
    deltas = 1024 // 8 + 4
    assert early.bytes_fetched == 4096 + 3 * deltas
    assert skips.bytes_fetched == 2 * 4096 + deltas
    assert late.bytes_fetched == 4096


def test_all_changed_and_another_layout_travel_whole() -> None:
    outlet, inlet = DeltaWriter(LocalOutlet()), DeltaReader(LocalInlet())
    layouts = [{"a": torch.zeros(64)}, {"a": torch.ones(64)}, {"a": torch.ones(32, 2)}]
    for version, tensors in enumerate(layouts):
        manifest = put(outlet, version, tensors)
        assert manifest.handles[0].delta_handle is None
        assert same(read(inlet, manifest), tensors)


def test_a_version_that_failed_half_way_is_no_base() -> None:
    outlet, inlet = DeltaWriter(LocalOutlet()), DeltaReader(LocalInlet())
    weight = torch.zeros(1024)
    read(inlet, put(outlet, 0, {"a": weight}))
    weight[1] = 1
    twice = [("a", weight), ("a", weight)]
    with pytest.raises(WeightsError, match="duplicate tensor"):
        publish_version(twice, version=1, bucket_bytes=4096, writer=outlet)
    weight[2] = 1
    manifest = put(outlet, 2, {"a": weight})
    assert manifest.handles[0].base == 0
    assert same(read(inlet, manifest), {"a": weight})


def test_what_was_read_stays_as_it_is() -> None:
    outlet, inlet = DeltaWriter(LocalOutlet()), DeltaReader(LocalInlet())
    weight = torch.zeros(1024)
    (old,) = inlet.fetch_buckets(put(outlet, 0, {"a": weight}))
    weight[0] = 1
    (new,) = inlet.fetch_buckets(put(outlet, 1, {"a": weight}))
    assert not old.any()
    assert not new.flags.writeable


def test_shared_memory_can_carry_deltas() -> None:
    outlet = DeltaWriter(SharedMemoryWriter("delta", LocalOutlet(), keep_versions=1))
    inlet = DeltaReader(SharedMemoryReader("policy", LocalInlet()))
    weights = {f"t{i}": torch.randn(300) for i in range(5)}
    try:
        for version in range(5):
            weights[f"t{version}"][version] = 1.0
            assert same(read(inlet, put(outlet, version, weights, 2048)), weights)
    finally:
        outlet.close()


@pytest.mark.parametrize("num_bytes", [100, 131, 132, 136])
def test_a_delta_that_does_not_fit_is_an_error(num_bytes: int) -> None:
    class Cutting(LocalInlet):
        def fetch_buckets(self, manifest: WeightManifest) -> list[Array]:
            return [np.resize(array, num_bytes) for array in super().fetch_buckets(manifest)]

    outlet, carrier = DeltaWriter(LocalOutlet()), LocalInlet()
    inlet = DeltaReader(carrier)
    weight = torch.zeros(1024)
    read(inlet, put(outlet, 0, {"a": weight}))
    weight[:2] = 1
    carrier.__class__ = Cutting
    manifest = put(outlet, 1, {"a": weight})
    if num_bytes == 136:
        assert same(read(inlet, manifest), {"a": weight})
    else:
        with pytest.raises(WeightsError, match="version 1, bucket 0"):
            read(inlet, manifest)


def test_a_version_that_comes_once_more_comes_whole() -> None:
    outlet, inlet = DeltaWriter(LocalOutlet()), DeltaReader(LocalInlet())
    tensors = {"a": torch.arange(1000.0)}
    put(outlet, 0, tensors)
    # What came was damaged, and whoever has it would go on from that.
    damaged = put(outlet, 1, tensors)
    inlet.fetch_buckets(
        replace(damaged, handles=tuple(replace(h, delta=None) for h in damaged.handles))
    )
    inlet._last_buckets = [array.copy() for array in inlet._last_buckets]
    inlet._last_buckets[0][5] ^= 1
    again = put(outlet, 1, tensors)
    assert all(handle.delta_handle is None for handle in again.handles)
    assert same(read(inlet, again), tensors)
    assert put(outlet, 2, tensors).handles[0].base == 1
