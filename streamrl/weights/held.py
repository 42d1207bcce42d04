"""The version a follower holds."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.errors import WeightsError


@dataclass(frozen=True)
class Loaded:
    """What it took a model to go over to a version.

    pause_s: while nothing was computed, s. interrupted: rollouts that had begun, and go on.
    copied_bytes: of weights, also those that were cast or merged; the rest is used where it lies.
    """

    pause_s: float = 0.0
    interrupted: int = 0
    copied_bytes: int = 0


class HeldVersion:
    """The version one holder (a generator, a scorer) serves, and a place to wait for a newer one.

    Belongs to one event loop. -1 is no version at all. What is followed may stand still for some
    versions: `due` says which one there is at a version of the policy.
    """

    def __init__(
        self, holder: str, version: int = -1, *, due: Callable[[int], int] = lambda version: version
    ) -> None:
        self._due = due
        self.holder = holder
        self._version = version
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The version that is held now."""
        return self._version

    def advance(self, version: int) -> None:
        """From now on `version` is held. Raises WeightsError unless it is newer."""
        if version <= self._version:
            raise WeightsError(
                f"{self.holder} holds version {self._version}: cannot go to version {version}"
            )
        self._version = version
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def at_least(self, version: int) -> int:
        """Wait until what is due at `version`, or a newer one, is held, and say which one is.

        It has no deadline of its own, which would have to know how many steps a resumed run makes
        again before that version. Two others bound it: that of the trainer, which has to make the
        version, and those of whoever takes it up, with whom the process ends.
        """
        while self._version < self._due(version):
            await self._changed.wait()
        return self._version
