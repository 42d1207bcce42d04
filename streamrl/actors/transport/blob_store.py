"""Transport of columns between processes: small blobs in messages, large ones in Ray's objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import ray
from msgspec.structs import replace

from streamrl.actors.transport.ray_calls import fetch_objects
from streamrl.buffer.encoding import (
    LARGE_BLOB_BYTES,
    Blob,
    ColumnBlobs,
    LeaseGrant,
    count_blob_bytes,
    from_message,
    join_pieces,
    split_pieces,
    to_message,
)

INLINE_BYTES = LARGE_BLOB_BYTES
"""Largest blob that a shard stores itself and sends inside messages. Ray inlines objects up to the
same size, because an object costs as much as many copies of this many bytes.
"""


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


def list_blobs(item: Any) -> tuple[Any, ...]:
    """Return the blobs that an item of a shard's reply holds; () if it holds none."""
    if isinstance(item, LeaseGrant):
        return (*item.blobs, *item.partial_rollouts)
    return item if isinstance(item, ColumnBlobs) else ()


def has_stored_blobs(reply: Any) -> bool:
    """Return whether a shard's reply holds references to objects in Ray's store."""
    return isinstance(reply, list) and any(
        isinstance(blob, ObjectStoreBlob) for item in reply for blob in list_blobs(item)
    )


async def resolve_reply_blobs(reply: Any) -> Any:
    """Return a shard's reply with its large blobs fetched from Ray's object store."""
    if not (isinstance(reply, list) and any(map(list_blobs, reply))):
        return reply
    resolved = await resolve_blobs([list_blobs(item) for item in reply])
    return [_replace_blobs(item, blobs) for item, blobs in zip(reply, resolved, strict=True)]


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


def _replace_blobs(item: Any, blobs: tuple[Blob, ...]) -> Any:
    """Return an item of a reply with these blobs in place of its stored ones."""
    if not isinstance(item, LeaseGrant):
        return blobs
    if all(map(is_, list_blobs(item), blobs)):
        return item
    count = len(item.blobs)
    return replace(item, blobs=blobs[:count], partial_rollouts=blobs[count:])
