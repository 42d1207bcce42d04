"""Columns between processes: small ones inside messages, large ones in Ray's object store."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import ray
from msgspec.structs import replace

from streamrl.actors.transport.ray_calls import fetch_objects
from streamrl.buffer.codec import (
    LARGE_BLOB_BYTES,
    Blob,
    count_blob_bytes,
    join_pieces,
    split_pieces,
)
from streamrl.buffer.wire_types import ColumnCommit, LeaseGrant

INLINE_BYTES = LARGE_BLOB_BYTES
"""A blob up to this size lives with the shard and travels inside messages, a larger one in the
object store: the size up to which Ray itself does so. An object costs many copies of this size.
"""
OUT_OF_BAND_BYTES = 4 * 1024
"""What is larger than this goes beside the text of a message, without a copy before."""


@dataclass(frozen=True)
class ObjectStoreBlob:
    """A blob in the object store: a list of its pieces, in an object the shard owns."""

    object_ref: ray.ObjectRef


def is_large(blob: Blob) -> bool:
    """Whether a blob goes through the object store."""
    return count_blob_bytes(blob) > INLINE_BYTES


def store_blob(blob: Blob) -> Any:
    """A small blob as it is; a large one as an object owned by the calling actor."""
    if is_large(blob):
        return ObjectStoreBlob(ray.put(to_message(split_pieces(blob))))
    return to_message(join_pieces(blob))


def to_message(blob: Blob) -> Any:
    """A blob as messages take it along: arrays are moved without a copy, and bytes with one."""
    if isinstance(blob, tuple):
        return [to_message(piece) for piece in blob]
    return np.frombuffer(blob, np.uint8) if len(blob) > OUT_OF_BAND_BYTES else bytes(blob)


def from_message(blob: Any) -> Blob:
    """Inverse of `to_message`, at the other end."""
    if isinstance(blob, list):
        return tuple(map(memoryview, blob))
    return blob if isinstance(blob, bytes) else memoryview(blob)


async def resolve_blobs(groups: Sequence[Sequence[Any]]) -> list[tuple[Blob, ...]]:
    """Inverse of `store_blob`, on the reader's side: views of the object store, for each group."""
    stored = [
        blob.object_ref for blobs in groups for blob in blobs if isinstance(blob, ObjectStoreBlob)
    ]
    objects = iter(await fetch_objects(stored, "columns of groups") if stored else [])
    return [
        tuple([from_message(next(objects) if isinstance(b, ObjectStoreBlob) else b) for b in blobs])
        for blobs in groups
    ]


async def resolve_grants(grants: Sequence[LeaseGrant]) -> list[LeaseGrant]:
    """Leased groups with the blobs they name."""
    found = await resolve_blobs([(*grant.blobs, *grant.partial_rollouts) for grant in grants])
    return [_resolve_grant(grant, blobs) for grant, blobs in zip(grants, found, strict=True)]


def _resolve_grant(grant: LeaseGrant, blobs: Sequence[Any]) -> LeaseGrant:
    if all(map(is_, (*grant.blobs, *grant.partial_rollouts), blobs)):
        return grant
    count = len(grant.blobs)
    return replace(grant, blobs=tuple(blobs[:count]), partial_rollouts=tuple(blobs[count:]))


def pack_commits(commits: Sequence[ColumnCommit]) -> list[ColumnCommit]:
    """Commits as messages take them along."""
    return [_replace_blob(commit, to_message(commit.blob)) for commit in commits]


def unpack_commits(commits: Sequence[ColumnCommit]) -> list[ColumnCommit]:
    """Inverse of `pack_commits`, in the shard."""
    return [_replace_blob(commit, from_message(commit.blob)) for commit in commits]


def _replace_blob(commit: ColumnCommit, blob: Any) -> ColumnCommit:
    return commit if blob is commit.blob else replace(commit, blob=blob)
