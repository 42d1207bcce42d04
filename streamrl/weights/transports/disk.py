"""Weights on disk: a directory per version, which transformers and other engines can load.

    v00000012/model-00001-of-00003.safetensors ...   a file per bucket
              model.safetensors.index.json           which tensor is in which of them
              manifest.json                          version, slots and checksums
              config.json, tokenizer ...             as in the model directory, if one is given
    latest -> v00000012

A directory has a name of its own, `.tmp-...`, until all in it is on the disk, and `latest` is
replaced by a rename: who follows it, in the run or not, never sees half a version.
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
from streamrl.files.atomic_write import move_whole
from streamrl.files.bounded_read import MIB, read_small
from streamrl.messages import Array
from streamrl.weights.manifest import Bucket, WeightManifest
from streamrl.weights.tensor_views import tensor_view

LATEST = "latest"
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 256 * MIB
INDEX = "model.safetensors.index.json"
PARTIAL = ".tmp-"
#: What of a model directory says how its weights are to be used.
DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class DiskHandle:
    """A bucket's place: the directory of its version, and its number there, from 0."""

    directory: str
    bucket: int


def version_name(version: int) -> str:
    """The name of a version's directory."""
    return f"v{version:08d}"


def file_name(bucket: int, num_buckets: int) -> str:
    """The name transformers knows a part of a model by."""
    return f"model-{bucket + 1:05d}-of-{num_buckets:05d}.safetensors"


@dataclass(frozen=True)
class _Contents:
    """What manifest.json says. Handles are not in it: a directory may be moved."""

    version: int
    buckets: tuple[Bucket, ...]


class DiskOutlet:
    """The publisher's end, the only one for its `directory`. Keeps the newest `keep_versions`.

    `model_dir` is where config and tokenizer are copied from. Raises WeightsError, naming the
    version, if something cannot be written.
    """

    def __init__(
        self, directory: Path, *, keep_versions: int, model_dir: Path | None = None
    ) -> None:
        self._directory = directory.absolute()
        self._keep_versions = keep_versions
        self._model_dir = model_dir
        self._partial = self._directory / PARTIAL
        self._final = self._directory
        self._num_sealed = 0
        self._room = np.empty(0, np.uint8)

    def set_readers(self, names: Sequence[str]) -> None:
        """It does not matter who reads."""

    def begin(self, version: int) -> None:
        """Take away what was left half written, and open a directory."""
        self._final = self._directory / version_name(version)
        self._partial = self._directory / f"{PARTIAL}{version_name(version)}"
        self._num_sealed = 0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for left in self._directory.glob(f"{PARTIAL}*"):
                _remove(left)
            self._partial.mkdir()
        except OSError as error:
            raise self._failed(error) from error

    def room(self, num_bytes: int) -> Array:
        """The same memory for every bucket: it is written when it is sealed."""
        if self._room.nbytes < num_bytes:
            self._room = np.zeros(num_bytes, np.uint8)
        return self._room[:num_bytes]

    def seal(self, bucket: Bucket, data: Array) -> DiskHandle:
        """The file of the bucket; its name is not final as long as nobody knows how many come."""
        index = self._num_sealed
        tensors = {slot.name: tensor_view(data, slot) for slot in bucket.slots}
        try:
            save_file(tensors, self._partial / _sealed_name(index), metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise self._failed(error) from error
        self._num_sealed += 1
        return DiskHandle(str(self._final), index)

    def finish(self, manifest: WeightManifest) -> None:
        """The version gets its name, becomes the latest one, and others go.

        Those with a higher number too: a run that was resumed before them writes them anew.
        """
        try:
            self._describe(manifest)
            if self._final.exists():  # of a run that was resumed before it
                self._final.rename(self._directory / f"{PARTIAL}old-{self._final.name}")
            move_whole(self._partial, self._final)
            link = self._directory / f"{PARTIAL}{LATEST}"
            link.symlink_to(self._final.name)
            link.replace(self._directory / LATEST)
            self._prune(manifest.version)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Versions stay for those who follow them."""
        self._room = np.empty(0, np.uint8)
        if self._partial.name != PARTIAL and self._partial.exists():
            _remove(self._partial)

    def _describe(self, manifest: WeightManifest) -> None:
        """Write all that is not weights."""
        num_buckets = len(manifest.buckets)
        where: dict[str, str] = {}
        for index, bucket in enumerate(manifest.buckets):
            name = file_name(index, num_buckets)
            (self._partial / _sealed_name(index)).rename(self._partial / name)
            where |= {slot.name: name for slot in bucket.slots}
        total = sum(slot.num_bytes for bucket in manifest.buckets for slot in bucket.slots)
        index_file = {"metadata": {"total_size": total}, "weight_map": where}
        (self._partial / INDEX).write_text(json.dumps(index_file, indent=1), encoding="utf-8")
        if self._model_dir is not None:
            for pattern in DESCRIPTION:
                for path in self._model_dir.glob(pattern):
                    if path.name not in (INDEX, MANIFEST):
                        shutil.copy(path, self._partial / path.name)
        contents = _Contents(manifest.version, manifest.buckets)
        (self._partial / MANIFEST).write_bytes(msgspec.json.encode(contents))

    def _prune(self, version: int) -> None:
        found = sorted(_versions(self._directory))
        older = [number for number in found if number <= version]
        for number in {*older[: -self._keep_versions], *(set(found) - set(older))}:
            path = self._directory / version_name(number)
            # Renamed first, so that no reader takes what is left of it for a version.
            path.rename(self._directory / f"{PARTIAL}gone-{path.name}")
        for left in self._directory.glob(f"{PARTIAL}*"):
            _remove(left)

    def _failed(self, error: Exception) -> WeightsError:
        return WeightsError(
            f"weights {self._final.name}, bucket {self._num_sealed}: cannot be written to "
            f"{self._directory}: {error}"
        )


class DiskInlet:
    """A reader's end; needs nothing but the directories. `name` is whose weights they are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.bytes_fetched = 0
        self.failure: str | None = None

    def fetch(self, manifest: WeightManifest) -> Sequence[Array]:
        """The buckets as they were laid, made of the tensors in the files."""
        found = [self._read(manifest, index) for index in range(len(manifest.buckets))]
        self.bytes_fetched += manifest.num_bytes
        return found

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, manifest: WeightManifest, index: int) -> Array:
        bucket, handle = manifest.buckets[index], manifest.handles[index]
        path = Path(handle.directory) / file_name(handle.bucket, len(manifest.buckets))
        data = np.empty(bucket.num_bytes, np.uint8)
        end = 0
        try:
            with safe_open(path, framework="pt") as file:
                for slot in bucket.slots:
                    data[end : slot.offset] = 0
                    tensor_view(data, slot).copy_(file.get_tensor(slot.name))
                    end = slot.end
        except (OSError, SafetensorError, RuntimeError) as error:
            place = f"weights of {self._name} version {manifest.version}, bucket {index}"
            raise WeightsError(f"{place}: cannot be read from {path}: {error}") from error
        data.flags.writeable = False
        return data


def latest_version(directory: Path) -> int:
    """The newest whole version in a publisher's directory; -1 if there is none yet."""
    try:
        return int(os.readlink(directory / LATEST)[1:])
    except FileNotFoundError:
        return -1


def read_manifest(version_dir: Path) -> WeightManifest:
    """What a version's directory (or `latest`) holds, to be fetched by a DiskInlet.

    Raises WeightsError if it is none, or is gone.
    """
    # Not `latest`, which may be another one when the buckets are read.
    directory = version_dir.resolve()
    try:
        text = read_small(directory / MANIFEST, most_bytes=MOST_MANIFEST_BYTES)
        contents = msgspec.json.decode(text, type=_Contents)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise WeightsError(f"{directory} holds no version of the weights: {error}") from error
    handles = tuple(DiskHandle(str(directory), i) for i in range(len(contents.buckets)))
    return WeightManifest(contents.version, contents.buckets, handles)


def _sealed_name(bucket: int) -> str:
    return f"bucket-{bucket:05d}"


def _versions(directory: Path) -> list[int]:
    return [int(path.name[1:]) for path in directory.glob("v" + 8 * "[0-9]")]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
