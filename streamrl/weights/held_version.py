"""The version a follower holds."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrl.errors import LogprobCheckError, WeightsError

MAX_NAMED_PARAMETERS = 3
"""Most parameters that an error names."""


@dataclass(frozen=True)
class LoadVerification:
    """Which of the published parameters a model holds, by their names in its files.

    num_compared: those that could be compared, 0 if none were. differing: those it holds other
    values of. warnings: what the engine itself says of weights that it did not load.
    """

    num_compared: int = 0
    differing_names: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def raise_on_difference(self, holder: str) -> None:
        """Raise ProbeError if parameters did not arrive in `holder`."""
        if self.differing_names:
            more = max(0, len(self.differing_names) - MAX_NAMED_PARAMETERS)
            first = ", ".join(
                self.differing_names[:MAX_NAMED_PARAMETERS]
            ) + f" and {more} more" * bool(more)
            said = f"; vLLM says: {'; '.join(self.warnings)}" if self.warnings else ""
            raise LogprobCheckError(
                f"{holder} holds other values than were published of {first}: a run would"
                f" learn from wrong figures{said}"
            )


@dataclass(frozen=True)
class WeightLoadStats:
    """What it took a model to go over to a version.

    pause_s: while nothing was computed, s. interrupted: rollouts that had begun, and go on.
    copied_bytes: of weights, also those that were cast or merged; the rest is used where it lies.
    arrival: whether all of it is there.
    """

    pause_s: float = 0.0
    num_interrupted: int = 0
    copied_bytes: int = 0
    verification: LoadVerification = LoadVerification()


class ServedVersion:
    """The version one holder (a generator, a scorer) serves, and a place to wait for a newer one.

    Belongs to one event loop. -1 is no version at all. What is followed may stand still for some
    versions: `due` says which one there is at a version of the policy.
    """

    def __init__(
        self, holder: str, version: int = -1, *, due: Callable[[int], int] = lambda version: version
    ) -> None:
        self._resolve_due_version = due
        self.holder = holder
        self._version = version
        self._version_changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The version that is held now."""
        return self._version

    def advance_to(self, version: int) -> None:
        """From now on `version` is held. Raises WeightsError unless it is newer."""
        if version <= self._version:
            raise WeightsError(
                f"{self.holder} holds version {self._version}: cannot go to version {version}"
            )
        self._version = version
        changed, self._version_changed = self._version_changed, asyncio.Event()
        changed.set()

    async def wait_for_version(self, version: int) -> int:
        """Wait until what is due at `version`, or a newer one, is held, and say which one is.

        It has no deadline of its own, which would have to know how many steps a resumed run makes
        again before that version. Two others bound it: that of the trainer, which has to make the
        version, and those of whoever takes it up, with whom the process ends.
        """
        while self._version < self._resolve_due_version(version):
            await self._version_changed.wait()
        return self._version
