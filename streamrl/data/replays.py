"""Replay of groups with right and wrong rollouts: a bounded store, and the draws from it.

The queue's shards keep the columns of the groups that the store lists. A replay is a group of its
own in ledger and queue, with a uid from `make_replay_uid`, that takes the columns of the kept one.
The store at a version depends on the training steps before it alone, and a draw on seed, version
and number of the admission. So at staleness 0 a resume draws the same.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from streamrl.files.typed_settings import above, at_least
from streamrl.messages import GroupInfo, find_replayed_uid, make_replay_uid


@dataclass
class ReplayConfig:
    """Replay of trained groups that have right and wrong rollouts.

    frac: share of the admissions that are such groups instead of new prompts.
    size: most groups that are kept for it, the latest.
    max_age: largest lag of a replayed token's version behind the step that trains it; above
        pipeline.max_staleness, which does not bound replays.
    """

    frac: Annotated[float, above(0, 0.9)] = 0.25
    size: Annotated[int, at_least(1)] = 64
    max_age: Annotated[int, at_least(1)] = 16


class ReplayStore:
    """The kept groups by uid, oldest step first: step that trained them, and their oldest version.

    max_lead: versions between the admission of a group and the last step that may train it.
    """

    def __init__(self, config: ReplayConfig, *, seed: int, max_lead: int) -> None:
        self._config, self._seed, self._max_lead = config, seed, max_lead
        self._groups: dict[str, tuple[int, int]] = {}

    def record_step(self, version: int, infos: Mapping[str, GroupInfo]) -> None:
        """Keep the groups of a training step that have right and wrong rollouts, by uid."""
        # The order within a step is that of arrival.
        for uid, info in sorted(infos.items()):
            rate = info.pass_rate
            if rate is not None and 0 < rate < 1 and find_replayed_uid(uid) is None:
                self._groups[uid] = version, info.min_version
        self._groups = dict([*self._groups.items()][-self._config.size :])

    def draw_uid(self, version: int, slot: int, busy: Collection[str | None]) -> str | None:
        """Return the uid of a replay for an admission, or None if that is to be a new prompt.

        `version` is that of the admission, `slot` its number in the run. Groups that are `busy`,
        because a replay of them is in flight, are not replayed, nor those with a token that could
        become older than `max_age`.
        """
        digest = hashlib.blake2b(f"replay {self._seed} {version} {slot}".encode(), digest_size=16)
        chance, pick = (int.from_bytes(part) for part in (digest.digest()[:8], digest.digest()[8:]))
        if chance >= self._config.frac * 2.0**64:
            return None
        oldest = version + self._max_lead - self._config.max_age
        uids = [
            uid
            for uid, (step, min_version) in self._groups.items()
            if step < version and min_version >= oldest and uid not in busy
        ]
        return make_replay_uid(uids[pick % len(uids)], slot) if uids else None

    def list_kept(self, waiting: Collection[str]) -> list[str]:
        """Return the groups that shards must keep: the store's, and those of waiting replays."""
        sources = (find_replayed_uid(uid) for uid in waiting)
        return sorted({*self._groups, *(uid for uid in sources if uid is not None)})

    def state_dict(self) -> list[Any]:
        return [[uid, *facts] for uid, facts in self._groups.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        self._groups = {uid: (step, min_version) for uid, step, min_version in state}
