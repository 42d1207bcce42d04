"""From named tensors through buckets and back."""

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import ConfigError, WeightsError
from streamrl.messages import Array
from streamrl.weights import WeightBucket, WeightManifest, WeightsConfig
from streamrl.weights.pack import pack_buckets, publish_version
from streamrl.weights.tensor_views import TORCH_DTYPES
from streamrl.weights.unpack import unpack_tensors
from tests.weights.local_outlet import LocalOutlet

FLOATS = ("float32", "bfloat16", "float16", "float64")


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "embed": torch.randn(7, 5, generator=generator),
        "norm": torch.randn(5, generator=generator).bfloat16(),
        "scale": torch.tensor(2.0),
        "head": torch.randn(5, 7, generator=generator).t(),
    }


def sent(
    tensors: dict[str, torch.Tensor], *, bucket_bytes: int = 200
) -> tuple[WeightManifest, list[Array]]:
    """The tensors as version 4, and the buckets as they would come: read-only copies."""
    manifest = publish_version(
        tensors.items(), version=4, bucket_bytes=bucket_bytes, writer=LocalOutlet()
    )
    arrays = list(manifest.handles)
    for array in arrays:
        array.flags.writeable = False
    return manifest, arrays


def test_what_is_unpacked_is_what_was_published() -> None:
    tensors = some_tensors()
    manifest, arrays = sent(tensors)
    found = unpack_tensors(manifest, arrays)
    assert len(manifest.buckets) == 3
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TORCH_DTYPES)),
            st.lists(st.integers(1, 5), max_size=3).map(tuple),
        ),
        max_size=12,
    ),
    st.integers(1, 600),
)
def test_any_tensors_survive_any_bucket_size(
    kinds: list[tuple[str, tuple[int, ...]]], bucket_bytes: int
) -> None:
    tensors = {
        f"t{i}": torch.full(shape, i % 2).to(TORCH_DTYPES[dtype])
        for i, (dtype, shape) in enumerate(kinds)
    }
    manifest, arrays = sent(tensors, bucket_bytes=bucket_bytes)
    found = unpack_tensors(manifest, arrays)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


def test_unpacking_copies_nothing() -> None:
    manifest, arrays = sent(some_tensors(), bucket_bytes=10_000)
    (array,) = arrays
    first = array.ctypes.data
    for tensor in unpack_tensors(manifest, arrays).values():
        assert first <= tensor.data_ptr() < first + array.nbytes


def test_packing_holds_one_bucket_at_a_time() -> None:
    alive: list[weakref.ref[Array]] = []
    most = 0

    class Counting(LocalOutlet):
        def commit_bucket(self, bucket: WeightBucket, data: Array) -> int:
            nonlocal most
            alive.append(weakref.ref(data))
            most = max(most, sum(ref() is not None for ref in alive))
            return len(alive)

    tensors = ((f"t{i}", torch.ones(64)) for i in range(10))
    manifest = publish_version(tensors, version=1, bucket_bytes=256, writer=Counting())
    assert manifest.handles == tuple(range(1, 11))
    assert most == 1


def test_each_tensor_is_read_before_the_next_is_asked_for() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        shared = torch.zeros(4)
        for i in range(5):
            shared.fill_(i)
            yield f"t{i}", shared

    manifest = publish_version(gathered(), version=1, bucket_bytes=300, writer=LocalOutlet())
    found = unpack_tensors(manifest, manifest.handles)
    assert [found[f"t{i}"].tolist() for i in range(5)] == [[i] * 4 for i in range(5)]


def test_parameters_that_need_a_gradient_can_be_published() -> None:
    module = torch.nn.Linear(3, 2)
    manifest = publish_version(
        module.named_parameters(), version=1, bucket_bytes=300, writer=LocalOutlet()
    )
    found = unpack_tensors(manifest, manifest.handles)
    assert torch.equal(found["weight"], module.weight)
    assert not found["weight"].requires_grad


def test_nothing_packs_into_nothing() -> None:
    assert list(pack_buckets((), version=1, bucket_bytes=100)) == []


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "version 9: duplicate tensor a"),
        (
            [("a", torch.ones(0))],
            r"version 9: a has no elements, shape \(0,\): was the parameter gathered",
        ),
        ([("a", torch.ones(2, dtype=torch.complex64))], "version 9: a has dtype complex64"),
    ],
)
def test_tensors_that_cannot_be_published_are_named(
    tensors: list[tuple[str, torch.Tensor]], fault: str
) -> None:
    with pytest.raises(WeightsError, match=fault):
        list(pack_buckets(tensors, version=9, bucket_bytes=100))


@pytest.mark.parametrize("name", FLOATS)
def test_one_flipped_bit_is_found(name: str) -> None:
    manifest, arrays = sent({"a": torch.ones(100, dtype=TORCH_DTYPES[name]), "b": torch.ones(60)})
    arrays[1] = arrays[1].copy()
    arrays[1][17] ^= 4
    with pytest.raises(WeightsError, match=r"version 4, bucket 1 of 2: checksum is \w+, expected"):
        unpack_tensors(manifest, arrays)


def test_a_missing_and_an_extra_bucket_are_found() -> None:
    manifest, arrays = sent(some_tensors())
    with pytest.raises(WeightsError, match="version 4: received 2 buckets, expected 3"):
        unpack_tensors(manifest, arrays[:-1])
    with pytest.raises(WeightsError, match="version 4: received 4 buckets, expected 3"):
        unpack_tensors(manifest, [*arrays, arrays[0]])


def test_swapped_and_cut_buckets_are_found() -> None:
    manifest, arrays = sent(some_tensors())
    with pytest.raises(WeightsError, match="version 4, bucket 0 of 3: checksum"):
        unpack_tensors(manifest, arrays[::-1])
    with pytest.raises(
        WeightsError, match=r"bucket 2 of 3: is uint8\[139\], expected uint8\[140\]"
    ):
        unpack_tensors(manifest, [*arrays[:2], arrays[2][:-1]])
    with pytest.raises(WeightsError, match="bucket 2 of 3: is int8"):
        unpack_tensors(manifest, [*arrays[:2], arrays[2].view(np.int8)])


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"bucket_mb": 0}, "weights.bucket_mb=0: must be at least 1"),
        ({"keep_versions": 0}, "weights.keep_versions=0: must be at least 1"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        WeightsConfig(**settings)  # type: ignore[arg-type]


def test_a_bucket_of_64_mb_has_67108864_bytes() -> None:
    assert WeightsConfig().bucket_bytes == 67_108_864
