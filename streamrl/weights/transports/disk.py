"""Disk transport: a directory per version, which transformers and other engines can load.

    v00000012/model-00001-of-00003.safetensors ...   a file per bucket
              model.safetensors.index.json           file of each tensor
              manifest.json                          version, slots and checksums
              config.json, tokenizer ...             copied from the model directory, if given
    latest -> v00000012

A directory is named `.tmp-...` until all its files are on disk, and a rename replaces `latest`:
followers inside and outside the run never see half a version.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from streamrl.errors import WeightsError
from streamrl.files.atomic_write import sync_and_rename
from streamrl.files.bounded_read import MIB, read_small_text
from streamrl.messages import Array
from streamrl.weights.buckets import view_tensor
from streamrl.weights.manifest import BucketMemory, WeightBucket, WeightManifest
from streamrl.weights.transport import Transport, TransportReader, TransportSpec, TransportWriter

LATEST_LINK = "latest"
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 256 * MIB
INDEX_FILE = "model.safetensors.index.json"
PARTIAL_PREFIX = ".tmp-"
#: Config and tokenizer files of a model directory.
MODEL_FILE_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class DiskHandle:
    """Handle of a bucket: directory of its version, and its index in the version, from 0."""

    directory: str
    bucket: int


def format_version_name(version: int) -> str:
    return f"v{version:08d}"


def format_bucket_name(bucket: int, num_buckets: int) -> str:
    """Return the file name of bucket `bucket` (from 0), as transformers names a model's shards."""
    return f"model-{bucket + 1:05d}-of-{num_buckets:05d}.safetensors"


@dataclass(frozen=True)
class _ManifestFile:
    """Contents of manifest.json: a WeightManifest without handles.

    Handles contain the directory's path; `read_manifest` makes them anew, because the directory may
    have moved.
    """

    version: int
    buckets: tuple[WeightBucket, ...]


class DiskWriter(TransportWriter):
    """Publisher's end of the disk transport, the only writer of `directory`.

    Keeps the newest `keep_versions`. Config and tokenizer are copied from `model_dir`. Raises
    WeightsError, naming the version, if a file cannot be written.
    """

    def __init__(
        self, directory: Path, *, keep_versions: int, model_dir: Path | None = None
    ) -> None:
        self._directory = directory.absolute()
        self._keep_versions = keep_versions
        self._model_dir = model_dir
        self._partial_dir = self._directory / PARTIAL_PREFIX
        self._version_dir = self._directory
        self._num_committed = 0
        self._staging_buffer = np.empty(0, np.uint8)

    def begin_version(self, version: int) -> None:
        """Create the version's temporary directory, and remove those of interrupted publishes."""
        self._version_dir = self._directory / format_version_name(version)
        self._partial_dir = self._directory / f"{PARTIAL_PREFIX}{format_version_name(version)}"
        self._num_committed = 0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for leftover in self._directory.glob(f"{PARTIAL_PREFIX}*"):
                _remove_path(leftover)
            self._partial_dir.mkdir()
        except OSError as error:
            raise self._make_write_error(error) from error

    def allocate_buffer(self, num_bytes: int) -> Array:
        """Return the same staging memory for every bucket; `commit_bucket` writes it to disk."""
        if self._staging_buffer.nbytes < num_bytes:
            self._staging_buffer = np.zeros(num_bytes, np.uint8)
        return self._staging_buffer[:num_bytes]

    def commit_bucket(self, bucket: WeightBucket, data: BucketMemory) -> DiskHandle:
        """Write the bucket's file under a temporary name.

        The final name needs the number of buckets.
        """
        index = self._num_committed
        tensors = {slot.name: view_tensor(data, slot) for slot in bucket.slots}
        try:
            save_file(
                tensors, self._partial_dir / _format_partial_name(index), metadata={"format": "pt"}
            )
        except (OSError, SafetensorError) as error:
            raise self._make_write_error(error) from error
        self._num_committed += 1
        return DiskHandle(str(self._version_dir), index)

    def commit_version(self, manifest: WeightManifest) -> None:
        """Rename the version's temporary directory, point `latest` to it, and remove old versions.

        Removes higher versions too: a run that resumed before them publishes them again.
        """
        try:
            self._write_metadata(manifest)
            if self._version_dir.exists():  # published before the run was resumed
                self._version_dir.rename(
                    self._directory / f"{PARTIAL_PREFIX}old-{self._version_dir.name}"
                )
            sync_and_rename(self._partial_dir, self._version_dir)
            link = self._directory / f"{PARTIAL_PREFIX}{LATEST_LINK}"
            link.symlink_to(self._version_dir.name)
            link.replace(self._directory / LATEST_LINK)
            self._prune_versions(manifest.version)
        except OSError as error:
            raise self._make_write_error(error) from error

    def close(self) -> None:
        """Remove the files of an unfinished version; committed versions stay."""
        self._staging_buffer = np.empty(0, np.uint8)
        if self._partial_dir.name != PARTIAL_PREFIX and self._partial_dir.exists():
            _remove_path(self._partial_dir)

    def _write_metadata(self, manifest: WeightManifest) -> None:
        """Rename the bucket files, and add the index, the manifest and the model's config files."""
        num_buckets = len(manifest.buckets)
        weight_map: dict[str, str] = {}
        for index, bucket in enumerate(manifest.buckets):
            name = format_bucket_name(index, num_buckets)
            (self._partial_dir / _format_partial_name(index)).rename(self._partial_dir / name)
            weight_map |= {slot.name: name for slot in bucket.slots}
        total_bytes = sum(slot.num_bytes for bucket in manifest.buckets for slot in bucket.slots)
        index_file = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (self._partial_dir / INDEX_FILE).write_text(
            json.dumps(index_file, indent=1), encoding="utf-8"
        )
        if self._model_dir is not None:
            for pattern in MODEL_FILE_PATTERNS:
                for path in self._model_dir.glob(pattern):
                    if path.name not in (INDEX_FILE, MANIFEST_FILE):
                        shutil.copy(path, self._partial_dir / path.name)
        contents = _ManifestFile(manifest.version, manifest.buckets)
        (self._partial_dir / MANIFEST_FILE).write_bytes(msgspec.json.encode(contents))

    def _prune_versions(self, version: int) -> None:
        """Remove all versions above `version`, and all but the newest `keep_versions` up to it."""
        versions = sorted(_list_versions(self._directory))
        older = [number for number in versions if number <= version]
        for number in {*older[: -self._keep_versions], *(set(versions) - set(older))}:
            path = self._directory / format_version_name(number)
            # Rename first, so that readers never see a half-deleted version.
            path.rename(self._directory / f"{PARTIAL_PREFIX}gone-{path.name}")
        for leftover in self._directory.glob(f"{PARTIAL_PREFIX}*"):
            _remove_path(leftover)

    def _make_write_error(self, error: Exception) -> WeightsError:
        return WeightsError(
            f"weights {self._version_dir.name}, bucket {self._num_committed}: cannot be written to "
            f"{self._directory}: {error}"
        )


class DiskReader(TransportReader):
    """Reader's end of the disk transport; needs only the versions' directories.

    `name` names the model in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def fetch_buckets(self, manifest: WeightManifest) -> Sequence[Array]:
        """Rebuild the buckets of a version from the tensors in its files."""
        arrays = [self._read_bucket(manifest, index) for index in range(len(manifest.buckets))]
        self.bytes_fetched += manifest.num_bytes
        return arrays

    def _read_bucket(self, manifest: WeightManifest, index: int) -> Array:
        """Rebuild bucket `index` of the manifest from its file, read-only."""
        bucket, handle = manifest.buckets[index], manifest.handles[index]
        path = Path(handle.directory) / format_bucket_name(handle.bucket, len(manifest.buckets))
        data = np.empty(bucket.num_bytes, np.uint8)
        end = 0
        try:
            with safe_open(path, framework="pt") as file:
                for slot in bucket.slots:
                    data[end : slot.offset] = 0
                    view_tensor(data, slot).copy_(file.get_tensor(slot.name))
                    end = slot.end
        except (OSError, SafetensorError, RuntimeError) as error:
            location = f"weights of {self._name} version {manifest.version}, bucket {index}"
            raise WeightsError(f"{location}: cannot be read from {path}: {error}") from error
        data.flags.writeable = False
        return data


def read_latest_version(directory: Path) -> int:
    """Return the newest complete version in a publisher's directory; -1 if there is none."""
    try:
        return int(os.readlink(directory / LATEST_LINK)[1:])
    except FileNotFoundError:
        return -1


def read_manifest(version_dir: Path) -> WeightManifest:
    """Read the manifest in a version's directory (or `latest`); a DiskReader fetches its buckets.

    Raises WeightsError if the directory is gone or contains no version.
    """
    # Resolve the link now: `latest` may point elsewhere by the time the buckets are read.
    directory = version_dir.resolve()
    try:
        text = read_small_text(directory / MANIFEST_FILE, most_bytes=MAX_MANIFEST_BYTES)
        contents = msgspec.json.decode(text, type=_ManifestFile)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise WeightsError(f"{directory} contains no version of the weights: {error}") from error
    handles = tuple(DiskHandle(str(directory), i) for i in range(len(contents.buckets)))
    return WeightManifest(contents.version, contents.buckets, handles)


def _format_partial_name(bucket: int) -> str:
    return f"bucket-{bucket:05d}"


def _list_versions(directory: Path) -> list[int]:
    return [int(path.name[1:]) for path in directory.glob("v" + 8 * "[0-9]")]


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_writer(spec: TransportSpec, role: str, model_path: str) -> DiskWriter:
    model_dir = Path(model_path) if model_path else None
    directory = spec.run_dir / "weights" / role
    return DiskWriter(directory, keep_versions=spec.keep_versions, model_dir=model_dir)


TRANSPORT = Transport(make_writer, lambda spec, role, reader: DiskReader(role))
