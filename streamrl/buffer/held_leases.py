"""Leases that a client of the queue holds, by group."""

import math
from collections.abc import Iterable

from streamrl.messages import GroupLease


class HeldLeases:
    """Active leases of a client. The coordinator holds those of all groups that are ready to train.

    shortest_s: shortest duration of a lease granted since the client last held none; infinite for
    leases that never expire.
    """

    def __init__(self) -> None:
        self._by_uid: dict[str, dict[int, GroupLease]] = {}
        self.shortest_s = math.inf

    def __bool__(self) -> bool:
        return bool(self._by_uid)

    def __contains__(self, lease: GroupLease) -> bool:
        return lease.token in self._by_uid.get(lease.uid, ())

    def add_leases(self, leases: Iterable[GroupLease]) -> None:
        for lease in leases:
            self._by_uid.setdefault(lease.uid, {})[lease.token] = lease
            self.shortest_s = min(self.shortest_s, lease.expires_at - lease.granted_at)

    def remove_lease(self, lease: GroupLease) -> None:
        """Forget a lease, if the client holds it."""
        tokens = self._by_uid.get(lease.uid, {})
        tokens.pop(lease.token, None)
        if not tokens:
            self.remove_groups([lease.uid])

    def remove_groups(self, uids: Iterable[str]) -> None:
        """Forget all leases of groups."""
        for uid in uids:
            self._by_uid.pop(uid, None)
        if not self._by_uid:
            self.shortest_s = math.inf

    def list_leases(self) -> list[GroupLease]:
        return [lease for tokens in self._by_uid.values() for lease in tokens.values()]
