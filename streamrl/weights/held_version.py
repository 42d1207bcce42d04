"""Version of the weights that a follower serves, and the outcome of loading it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrl.errors import LogprobCheckError, WeightsError

MAX_NAMED_PARAMETERS = 3  # in an error message


@dataclass(frozen=True)
class LoadVerification:
    """Comparison of a model's parameters with the published ones after a version was loaded.

    num_compared: parameters that could be compared; 0 if none. differing_names: checkpoint names of
    parameters whose values differ. warnings: the engine's own warnings about weights that it did
    not load.
    """

    num_compared: int = 0
    differing_names: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def raise_on_difference(self, holder: str) -> None:
        """Raise LogprobCheckError if a loaded parameter differs from its published value.

        `holder` names the generator or scorer in the error.
        """
        if self.differing_names:
            num_more = max(0, len(self.differing_names) - MAX_NAMED_PARAMETERS)
            names = ", ".join(
                self.differing_names[:MAX_NAMED_PARAMETERS]
            ) + f" and {num_more} more" * bool(num_more)
            engine_warnings = f"; vLLM says: {'; '.join(self.warnings)}" if self.warnings else ""
            raise LogprobCheckError(
                f"{holder} holds parameters that differ from the published ones: {names}."
                f" Training would use wrong log-probabilities{engine_warnings}"
            )


@dataclass(frozen=True)
class WeightLoadStats:
    """Cost and outcome of loading a version of the weights into a model.

    pause_s: seconds in which the model did not compute. num_interrupted: running rollouts that
    continue under the new version. copied_bytes: bytes of weights copied, including cast or merged
    ones; all other weights are used in place. verification: comparison with the published
    parameters.
    """

    pause_s: float = 0.0
    num_interrupted: int = 0
    copied_bytes: int = 0
    verification: LoadVerification = LoadVerification()


class ServedVersion:
    """Version of the weights that one generator or scorer (`holder`) serves.

    Use from a single event loop. Version -1 means no weights yet. A followed model may skip
    versions of the policy (publish_every): `resolve_due_version` maps a policy version to the
    version of the followed model that is current at that point.
    """

    def __init__(
        self,
        holder: str,
        version: int = -1,
        *,
        resolve_due_version: Callable[[int], int] = lambda version: version,
    ) -> None:
        self._resolve_due_version = resolve_due_version
        self.holder = holder
        self._version = version
        self._version_changed = asyncio.Event()

    @property
    def version(self) -> int:
        return self._version

    def advance_to(self, version: int) -> None:
        """Switch to `version` and wake all tasks that wait for it.

        Raises WeightsError unless `version` is newer than the served version.
        """
        if version <= self._version:
            raise WeightsError(
                f"{self.holder} holds version {self._version}: cannot switch to version {version}"
            )
        self._version = version
        changed, self._version_changed = self._version_changed, asyncio.Event()
        changed.set()

    async def wait_for_version(self, version: int) -> int:
        """Wait until the holder serves the weights due at policy version `version`, or newer ones.

        Returns the served version. Deliberately without a timeout: a resumed run may repeat any
        number of steps before that version exists. Two other timeouts bound the wait: the trainer's
        for producing the version, and the RPC timeouts of the process that loads it, after which
        this process ends too.
        """
        while self._version < self._resolve_due_version(version):
            await self._version_changed.wait()
        return self._version
