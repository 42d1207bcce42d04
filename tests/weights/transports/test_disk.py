"""Disk transport: directories that any process can follow and that are never half written."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights import WeightManifest
from streamrl.weights.buckets import TORCH_DTYPES, publish_version, unpack_tensors
from streamrl.weights.transports.disk import (
    DiskReader,
    DiskWriter,
    read_latest_version,
    read_manifest,
)


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(5, 3, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.tensor(version % 2 == 0),
        "d": torch.randn(40, generator=generator),
    }


def put(writer: DiskWriter, version: int) -> WeightManifest:
    return publish_version(
        tensors_of(version).items(), version=version, bucket_bytes=200, writer=writer
    )


def read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return unpack_tensors(manifest, DiskReader("policy").fetch_buckets(manifest))


def is_version(fetched: dict[str, torch.Tensor], version: int) -> bool:
    expected = tensors_of(version)
    return fetched.keys() == expected.keys() and all(
        torch.equal(fetched[n], expected[n]) for n in expected
    )


def test_a_process_outside_the_run_follows_the_directory(tmp_path: Path):
    assert read_latest_version(tmp_path) == -1
    writer = DiskWriter(tmp_path, keep_versions=2)
    manifests = [put(writer, version) for version in range(3)]
    assert read_latest_version(tmp_path) == 2
    fetched = read_manifest(tmp_path / "latest")
    assert fetched == manifests[2]
    put(writer, 3)
    assert is_version(read(fetched), 2)


def test_a_directory_can_be_moved(tmp_path: Path):
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
def test_round_trip_of_any_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[str, tuple[int, ...]]],
    bucket_bytes: int,
):
    tensors = {
        f"t{i}": torch.full(shape, i % 2).to(TORCH_DTYPES[dtype])
        for i, (dtype, shape) in enumerate(kinds)
    }
    writer = DiskWriter(tmp_path_factory.mktemp("weights"), keep_versions=1)
    manifest = publish_version(tensors.items(), version=1, bucket_bytes=bucket_bytes, writer=writer)
    fetched = read(manifest)
    assert fetched.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert fetched[name].dtype == tensor.dtype
        assert torch.equal(fetched[name].float(), tensor.float())


def test_only_the_newest_versions_are_kept(tmp_path: Path):
    writer = DiskWriter(tmp_path, keep_versions=2)
    manifests = [put(writer, version) for version in (1, 2, 5, 6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "v00000005", "v00000006"]
    with pytest.raises(WeightsError, match=r"policy version 1, bucket 0: cannot be read from .*v0"):
        read(manifests[0])
    with pytest.raises(WeightsError, match=r"v00000001 contains no version of the weights"):
        read_manifest(tmp_path / "v00000001")


def test_a_resumed_run_replaces_later_versions(tmp_path: Path):
    for version in (1, 2, 3, 4):
        put(DiskWriter(tmp_path, keep_versions=3), version)
    writer = DiskWriter(tmp_path, keep_versions=3)
    republished = publish_version([("a", torch.ones(3))], version=3, bucket_bytes=99, writer=writer)
    assert read(republished)["a"].tolist() == [1, 1, 1]
    assert read_latest_version(tmp_path) == 3
    assert not (tmp_path / "v00000004").exists()
    assert is_version(read(read_manifest(tmp_path / "v00000002")), 2)


def test_transformers_loads_a_version(tmp_path: Path):
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
    writer = DiskWriter(tmp_path / "weights", keep_versions=1, model_dir=tmp_path / "model")
    publish_version(trained.named_parameters(), version=3, bucket_bytes=5000, writer=writer)
    assert len(list((tmp_path / "weights" / "latest").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / "latest")
    for name, parameter in trained.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)
    index = json.loads(
        (tmp_path / "weights" / "latest" / "model.safetensors.index.json").read_text()
    )
    assert index["weight_map"].keys() == dict(trained.named_parameters()).keys()


def test_a_write_error_names_version_and_directory(tmp_path: Path):
    (tmp_path / "weights").write_text("not a directory")
    with pytest.raises(WeightsError, match=r"v00000001, bucket 0: cannot be written to .*weights"):
        put(DiskWriter(tmp_path / "weights", keep_versions=1), 1)


class Crash(BaseException):
    """Simulated end of the process: no file operation follows."""


class Files:
    """Counts the file operations under a directory and raises Crash at one of them.

    Python calls audit hooks before each operation. Hooks cannot be removed, so all tests share one.
    """

    EVENTS = frozenset(
        {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.copyfile"}
    )

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.num_remaining = 0
        sys.addaudithook(self._count_event)

    def _count_event(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.directory is None or event not in self.EVENTS:
            return
        if not any(str(self.directory) in str(argument) for argument in arguments[:2]):
            return
        self.num_remaining -= 1
        if self.num_remaining < 0:
            self.directory = None
            raise Crash

    @contextlib.contextmanager
    def crash_at(self, number: int, directory: Path) -> Iterator[None]:
        self.directory, self.num_remaining = directory, number
        try:
            yield
        finally:
            self.directory = None


FILES = Files()


def list_complete_versions(directory: Path) -> list[int]:
    """Return the versions a reader would find; assert that each is complete."""
    fetched = [read_manifest(path) for path in directory.glob("v*")]
    assert all(is_version(read(manifest), manifest.version) for manifest in fetched)
    return sorted(manifest.version for manifest in fetched)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_crash_at_any_file_operation_leaves_no_partial_version(tmp_path: Path, resumed: bool):
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
        assert published - 1 in list_complete_versions(directory)
        latest = read_latest_version(directory)
        assert latest in (3, published)
        if not resumed:
            assert is_version(read(read_manifest(directory / "latest")), latest)
        put(DiskWriter(directory, keep_versions=2), published)
        assert list_complete_versions(directory)[-1] == published == read_latest_version(directory)
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
        if not crashed:
            break
    assert 15 < number < 100
