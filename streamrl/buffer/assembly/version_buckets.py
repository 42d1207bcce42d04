"""Groups in buckets of a version each, so that no query has to look at every group."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class VersionBuckets(Generic[T]):
    """Items by uid, ordered by ascending version, then by arrival.

    A run has a handful of versions in flight, whatever the number of groups.
    """

    def __init__(self) -> None:
        # An OrderedDict: a dict whose first items are deleted one by one is slow to iterate.
        self._buckets: dict[int, OrderedDict[str, T]] = {}
        self._versions: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, uid: str) -> bool:
        return uid in self._versions

    def add_item(self, uid: str, version: int, item: T) -> None:
        self._versions[uid] = version
        self._buckets.setdefault(version, OrderedDict())[uid] = item

    def pop_item(self, uid: str) -> T:
        version = self._versions.pop(uid)
        bucket = self._buckets[version]
        item = bucket.pop(uid)
        if not bucket:
            del self._buckets[version]
        return item

    def list_sizes(self) -> list[tuple[int, int]]:
        """Return (version, number of items) of every bucket, in ascending order."""
        return [(version, len(self._buckets[version])) for version in sorted(self._buckets)]

    def iter_bucket(self, version: int, count: int) -> Iterator[T]:
        """Yield the first `count` items of a version."""
        return islice(self._buckets[version].values(), count)

    def iter_before(self, version: int) -> Iterator[tuple[str, T]]:
        """Yield (uid, item) of all items with a version below `version`, in order."""
        for earlier in sorted(self._buckets):
            if earlier < version:
                yield from self._buckets[earlier].items()

    def list_uids(self) -> list[str]:
        return [uid for version in sorted(self._buckets) for uid in self._buckets[version]]
