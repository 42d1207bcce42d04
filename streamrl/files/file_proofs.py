"""Proofs of durable files: size and hash, made by the process that wrote a file.

A process hashes its files as soon as they are closed, while the kernel still has their pages in
memory; whoever reads them checks the hash first. The hash is XXH3 (64 bits): it finds damage, not
forgery.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from streamrl.files.bounded_read import open_regular_file
from streamrl.files.typed_settings import describe_read_error

_MAX_THREADS = 8


class FileProof(NamedTuple):
    """Size of a file in bytes, and the XXH3 hash of its content in hex."""

    num_bytes: int
    digest: str


def compute_digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def prove_file(path: Path) -> FileProof:
    """Read a file and return its proof. Raises OSError."""
    with open_regular_file(path) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()  # type: ignore[arg-type]
        return FileProof(file.tell(), digest)


def prove_files(paths: Iterable[Path]) -> dict[Path, FileProof]:
    """Return the proofs of files, read by several threads. Raises OSError."""
    paths = list(paths)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(paths, pool.map(prove_file, paths), strict=True))


def list_files(folder: Path) -> list[Path]:
    """Return the files below a folder; hidden ones, which no reader opens, are left out."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))


def find_changed_file(folder: Path, proofs: Mapping[str, FileProof]) -> str:
    """Return which file below a folder differs from its proof, and how; "" if none does.

    proofs: by path relative to the folder; an empty digest stands for a size alone. A file without
    a proof differs too: readers take all files of a folder, such as a model's. Sizes are compared
    first, which reads nothing.
    """
    for name, proof in proofs.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != proof.num_bytes:
            return f"{name} has {size} bytes of {proof.num_bytes}"
    for path in list_files(folder):
        if str(path.relative_to(folder)) not in proofs:
            return f"{path.relative_to(folder)} was not written with the others: remove it"
    hashed = {folder / name: proof for name, proof in proofs.items() if proof.digest}
    try:
        found = prove_files(hashed)
    except OSError as error:
        return f"{error.filename}: {describe_read_error(error)}"
    for path, proof in hashed.items():
        if found[path] != proof:
            return f"{path.relative_to(folder)} has changed since it was written (hash)"
    return ""
