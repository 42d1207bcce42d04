"""Transport of columns between processes: small blobs in messages, large ones in Ray's objects."""

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
"""Largest blob that a shard stores itself and sends inside messages. Ray inlines objects up to the
same size, because an object costs as much as many copies of this many bytes.
"""
OUT_OF_BAND_BYTES = 4 * 1024
"""Buffers above this size travel beside the pickle without a copy."""


@dataclass(frozen=True)
class ObjectStoreBlob:
    """Large blob as a reference to an object in Ray's store, which the shard owns.

    The object is a list of the blob's pieces.
    """

    object_ref: ray.ObjectRef


def is_large(blob: Blob) -> bool:
    """Return whether a blob is too large for messages and goes to Ray's object store."""
    return count_blob_bytes(blob) > INLINE_BYTES


def store_blob(blob: Blob) -> Any:
    """Return the form in which a shard keeps a blob: bytes, or an ObjectStoreBlob if large."""
    if is_large(blob):
        return ObjectStoreBlob(ray.put(to_message(split_pieces(blob))))
    return to_message(join_pieces(blob))


def to_message(blob: Blob) -> Any:
    """Return a blob in picklable form: bytes, or numpy views without a copy if large."""
    if isinstance(blob, tuple):
        return [to_message(piece) for piece in blob]
    return np.frombuffer(blob, np.uint8) if len(blob) > OUT_OF_BAND_BYTES else bytes(blob)


def from_message(blob: Any) -> Blob:
    """Invert `to_message`; views are not copied."""
    if isinstance(blob, list):
        return tuple(map(memoryview, blob))
    return blob if isinstance(blob, bytes) else memoryview(blob)


async def resolve_blobs(groups: Sequence[Sequence[Any]]) -> list[tuple[Blob, ...]]:
    """Fetch the large blobs of each group from Ray's object store, as views.

    groups: blobs of each group, as `store_blob` returns them. Small blobs are returned unchanged.
    """
    stored = [
        blob.object_ref for blobs in groups for blob in blobs if isinstance(blob, ObjectStoreBlob)
    ]
    objects = iter(await fetch_objects(stored, "columns of groups") if stored else [])
    return [
        tuple([from_message(next(objects) if isinstance(b, ObjectStoreBlob) else b) for b in blobs])
        for blobs in groups
    ]


async def resolve_grants(grants: Sequence[LeaseGrant]) -> list[LeaseGrant]:
    """Return leased groups with their large blobs fetched from Ray's object store."""
    blobs_by_grant = await resolve_blobs(
        [(*grant.blobs, *grant.partial_rollouts) for grant in grants]
    )
    return [
        _resolve_grant(grant, blobs) for grant, blobs in zip(grants, blobs_by_grant, strict=True)
    ]


def _resolve_grant(grant: LeaseGrant, blobs: Sequence[Any]) -> LeaseGrant:
    """Return a leased group with these blobs in place of its stored ones."""
    if all(map(is_, (*grant.blobs, *grant.partial_rollouts), blobs)):
        return grant
    count = len(grant.blobs)
    return replace(grant, blobs=tuple(blobs[:count]), partial_rollouts=tuple(blobs[count:]))


def pack_commits(commits: Sequence[ColumnCommit]) -> list[ColumnCommit]:
    """Return commits with their blobs in picklable form, to send them to a shard."""
    return [_replace_blob(commit, to_message(commit.blob)) for commit in commits]


def unpack_commits(commits: Sequence[ColumnCommit]) -> list[ColumnCommit]:
    """Invert `pack_commits` in the process of the shard."""
    return [_replace_blob(commit, from_message(commit.blob)) for commit in commits]


def _replace_blob(commit: ColumnCommit, blob: Any) -> ColumnCommit:
    return commit if blob is commit.blob else replace(commit, blob=blob)
