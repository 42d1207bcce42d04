"""Versions in directories that anybody can follow, and that are never seen half written."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights import WeightManifest
from streamrl.weights.pack import publish_version
from streamrl.weights.tensor_views import TORCH_DTYPES
from streamrl.weights.transports.disk import DiskReader, DiskWriter, latest_version, read_manifest
from streamrl.weights.unpack import unpack_tensors


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(5, 3, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.tensor(version % 2 == 0),
        "d": torch.randn(40, generator=generator),
    }


def put(outlet: DiskWriter, version: int) -> WeightManifest:
    return publish_version(
        tensors_of(version).items(), version=version, bucket_bytes=200, writer=outlet
    )


def read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack_tensors(manifest, DiskReader("policy").fetch_buckets(manifest))


def is_version(found: dict[str, torch.Tensor], version: int) -> bool:
    wanted = tensors_of(version)
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_every_version_is_read_as_it_was_published(tmp_path: Path) -> None:
    outlet = DiskWriter(tmp_path / "weights", keep_versions=2)
    for version in range(4):
        manifest = put(outlet, version)
        assert len(manifest.buckets) == 2
        assert is_version(read(manifest), version)


def test_another_process_follows_by_the_directory_alone(tmp_path: Path) -> None:
    assert latest_version(tmp_path) == -1
    outlet = DiskWriter(tmp_path, keep_versions=2)
    manifests = [put(outlet, version) for version in range(3)]
    assert latest_version(tmp_path) == 2
    found = read_manifest(tmp_path / "latest")
    assert found == manifests[2]
    put(outlet, 3)
    assert is_version(read(found), 2)


def test_a_directory_can_be_moved(tmp_path: Path) -> None:
    put(DiskWriter(tmp_path / "here", keep_versions=1), 7)
    (tmp_path / "here").rename(tmp_path / "there")
    assert is_version(read(read_manifest(tmp_path / "there" / "v00000007")), 7)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TORCH_DTYPES)),
            st.lists(st.integers(1, 5), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 300),
)
def test_any_tensors_survive(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[str, tuple[int, ...]]],
    bucket_bytes: int,
) -> None:
    tensors = {
        f"t{i}": torch.full(shape, i % 2).to(TORCH_DTYPES[dtype])
        for i, (dtype, shape) in enumerate(kinds)
    }
    outlet = DiskWriter(tmp_path_factory.mktemp("weights"), keep_versions=1)
    manifest = publish_version(tensors.items(), version=1, bucket_bytes=bucket_bytes, writer=outlet)
    found = read(manifest)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


def test_the_newest_versions_are_kept(tmp_path: Path) -> None:
    outlet = DiskWriter(tmp_path, keep_versions=2)
    manifests = [put(outlet, version) for version in (1, 2, 5, 6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "v00000005", "v00000006"]
    with pytest.raises(WeightsError, match=r"policy version 1, bucket 0: cannot be read from .*v0"):
        read(manifests[0])
    with pytest.raises(WeightsError, match=r"v00000001 contains no version of the weights"):
        read_manifest(tmp_path / "v00000001")


def test_a_resumed_run_writes_its_versions_anew(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        put(DiskWriter(tmp_path, keep_versions=3), version)
    outlet = DiskWriter(tmp_path, keep_versions=3)
    again = publish_version([("a", torch.ones(3))], version=3, bucket_bytes=99, writer=outlet)
    assert read(again)["a"].tolist() == [1, 1, 1]
    assert latest_version(tmp_path) == 3
    assert not (tmp_path / "v00000004").exists()
    assert is_version(read(read_manifest(tmp_path / "v00000002")), 2)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    manifest = put(DiskWriter(tmp_path, keep_versions=1), 1)
    path = tmp_path / "v00000001" / "model-00002-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match=r"version 1, bucket 1 of 2: checksum"):
        read(manifest)
    path.write_bytes(raw[:-8])
    with pytest.raises(WeightsError, match="policy version 1, bucket 1: cannot be read"):
        read(manifest)


def test_transformers_loads_a_version(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    trained = Qwen2ForCausalLM(config)
    outlet = DiskWriter(tmp_path / "weights", keep_versions=1, model_dir=tmp_path / "model")
    publish_version(trained.named_parameters(), version=3, bucket_bytes=5000, writer=outlet)
    assert len(list((tmp_path / "weights" / "latest").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / "latest")
    for name, parameter in trained.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    index = json.loads(
        (tmp_path / "weights" / "latest" / "model.safetensors.index.json").read_text()
    )
    assert index["weight_map"].keys() == dict(trained.named_parameters()).keys()


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("not a directory")
    with pytest.raises(WeightsError, match=r"v00000001, bucket 0: cannot be written to .*weights"):
        put(DiskWriter(tmp_path / "weights", keep_versions=1), 1)


class Crash(BaseException):
    """The process ends here, as far as files go."""


class Files:
    """Counts the file operations under a directory, and crashes at one of them.

    Python tells audit hooks of each before it is done. A hook stays for good: one for all tests.
    """

    EVENTS = frozenset(
        {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.copyfile"}
    )

    def __init__(self) -> None:
        self.under: Path | None = None
        self.left = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.under is None or event not in self.EVENTS:
            return
        if not any(str(self.under) in str(argument) for argument in arguments[:2]):
            return
        self.left -= 1
        if self.left < 0:
            self.under = None
            raise Crash

    @contextlib.contextmanager
    def crash_at(self, number: int, under: Path) -> Iterator[None]:
        self.under, self.left = under, number
        try:
            yield
        finally:
            self.under = None


FILES = Files()


def whole_versions(directory: Path) -> list[int]:
    """The versions a reader would take, each of which must be whole."""
    found = [read_manifest(path) for path in directory.glob("v*")]
    assert all(is_version(read(manifest), manifest.version) for manifest in found)
    return sorted(manifest.version for manifest in found)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_crash_anywhere_leaves_no_half_version(tmp_path: Path, resumed: bool) -> None:
    published = 3 if resumed else 4
    for number in range(1000):
        directory = tmp_path / str(number)
        for version in (1, 2, 3):
            put(DiskWriter(directory, keep_versions=2), version)
        try:
            with FILES.crash_at(number, directory):
                put(DiskWriter(directory, keep_versions=2), published)
        except Crash:
            crashed = True
        else:
            crashed = False
        assert published - 1 in whole_versions(directory)
        latest = latest_version(directory)
        assert latest in (3, published)
        if not resumed:
            assert is_version(read(read_manifest(directory / "latest")), latest)
        put(DiskWriter(directory, keep_versions=2), published)
        assert whole_versions(directory)[-1] == published == latest_version(directory)
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
        if not crashed:
            break
    assert 15 < number < 100


def test_readers_are_given_arrays_they_cannot_write(tmp_path: Path) -> None:
    (array, _) = DiskReader("policy").fetch_buckets(put(DiskWriter(tmp_path, keep_versions=1), 1))
    assert array.dtype == np.uint8
    assert not array.flags.writeable
    assert os.listdir(tmp_path / "v00000001") != []
