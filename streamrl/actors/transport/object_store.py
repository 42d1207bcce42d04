"""Columns between processes: small ones inside messages, large ones in Ray's object store."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import ray
from msgspec.structs import replace

from streamrl.actors.transport.ray_calls import fetch_objects
from streamrl.buffer.codec import LARGE_BYTES, Blob, join, pieces_of, size_of
from streamrl.buffer.wire_types import Commit, Grant

INLINE_BYTES = LARGE_BYTES
"""A blob up to this size lives with the shard and travels inside messages, a larger one in the
object store: the size up to which Ray itself does so. An object costs many copies of this size.
"""
BESIDE_BYTES = 4 * 1024
"""What is larger than this goes beside the text of a message, without a copy before."""


@dataclass(frozen=True)
class Stored:
    """A blob in the object store: a list of its pieces, in an object the shard owns."""

    reference: ray.ObjectRef


def is_large(blob: Blob) -> bool:
    """Whether a blob goes through the object store."""
    return size_of(blob) > INLINE_BYTES


def store_blob(blob: Blob) -> Any:
    """A small blob as it is; a large one as an object owned by the calling actor."""
    if is_large(blob):
        return Stored(ray.put(to_message(pieces_of(blob))))
    return to_message(join(blob))


def to_message(blob: Blob) -> Any:
    """A blob as messages take it along: arrays are moved without a copy, and bytes with one."""
    if isinstance(blob, tuple):
        return [to_message(piece) for piece in blob]
    return np.frombuffer(blob, np.uint8) if len(blob) > BESIDE_BYTES else bytes(blob)


def from_message(blob: Any) -> Blob:
    """Inverse of `to_message`, at the other end."""
    if isinstance(blob, list):
        return tuple(map(memoryview, blob))
    return blob if isinstance(blob, bytes) else memoryview(blob)


async def resolve_blobs(groups: Sequence[Sequence[Any]]) -> list[tuple[Blob, ...]]:
    """Inverse of `store_blob`, on the reader's side: views of the object store, for each group."""
    stored = [blob.reference for blobs in groups for blob in blobs if isinstance(blob, Stored)]
    objects = iter(await fetch_objects(stored, "columns of groups") if stored else [])
    return [
        tuple([from_message(next(objects) if isinstance(b, Stored) else b) for b in blobs])
        for blobs in groups
    ]


async def resolve_grants(grants: Sequence[Grant]) -> list[Grant]:
    """Leased groups with the blobs they name."""
    found = await resolve_blobs([(*grant.blobs, *grant.begun) for grant in grants])
    return [_resolved(grant, blobs) for grant, blobs in zip(grants, found, strict=True)]


def _resolved(grant: Grant, blobs: Sequence[Any]) -> Grant:
    if all(map(is_, (*grant.blobs, *grant.begun), blobs)):
        return grant
    count = len(grant.blobs)
    return replace(grant, blobs=tuple(blobs[:count]), begun=tuple(blobs[count:]))


def to_send(commits: Sequence[Commit]) -> list[Commit]:
    """Commits as messages take them along."""
    return [_with_blob(commit, to_message(commit.blob)) for commit in commits]


def received(commits: Sequence[Commit]) -> list[Commit]:
    """Inverse of `to_send`, in the shard."""
    return [_with_blob(commit, from_message(commit.blob)) for commit in commits]


def _with_blob(commit: Commit, blob: Any) -> Commit:
    return commit if blob is commit.blob else replace(commit, blob=blob)
