"""Weights that lie in one place for the trainer and the generator of one process.

The trainer updates them where they lie, and the generator samples from them there: a new version
moves no byte where both lay them out alike. What is to be seen to is when: nothing is sampled from
the moment the trainer begins to change them until the generator has taken the new version up.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.errors import DeadlineError, SupersededError
from streamrl.faces import Fetched, Follower, WeightChannel
from streamrl.messages import Array
from streamrl.weights import Loaded, WeightManifest
from streamrl.weights.registry import ReaderState

if TYPE_CHECKING:
    from torch import Tensor

UPDATE = "update"
"""Why a generator stands still while its weights change."""


class Sampler(Protocol):
    """What samples from the weights, and can stand still."""

    async def suspend(self, reason: str) -> None: ...

    async def resume(self, reason: str) -> None: ...


class Residence:
    """What the two engines of a process share."""

    def __init__(self) -> None:
        self._trainer_is_in = asyncio.Event()
        self._sampler: Sampler | None = None
        self._version = -1
        self._tensors: Mapping[str, Any] = {}

    def trainer_is_in(self) -> None:
        """The trainer has joined the other ranks, and a generator may come into their group."""
        self._trainer_is_in.set()

    async def wait_for_trainer(self, timeout_s: float) -> None:
        """Raises DeadlineError if the trainer is not there in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._trainer_is_in.wait()
        except TimeoutError:
            raise DeadlineError(
                f"the generator waited {timeout_s:g} s for the trainer of its process to start"
            ) from None

    def let_in(self, sampler: Sampler) -> None:
        """The generator is there."""
        self._sampler = sampler

    async def about_to_change(self) -> None:
        """The weights are about to change: nothing is sampled until they are taken up.

        Who calls it has the pool until they have changed, as has who takes a version up.
        """
        self._version = -1
        if self._sampler is not None:
            await self._sampler.suspend(UPDATE)

    def publish(self, tensors: Iterable[tuple[str, "Tensor"]], version: int) -> WeightManifest:
        """The weights are `version` as they lie. The manifest has nothing to fetch."""
        self._tensors, self._version = dict(tensors), version
        return WeightManifest(version, (), ())

    def tensors(self, version: int) -> Mapping[str, Any]:
        """The weights where they lie. Raises SupersededError once they are no longer that version.

        The trainer may have made the next one before a generator has come to take this one up.
        """
        if version != self._version:
            raise SupersededError(f"weights version {version} is gone: they have been updated")
        return self._tensors

    async def taken_up(self) -> None:
        """The generator serves the version that was fetched last."""
        if self._sampler is not None:
            await self._sampler.resume(UPDATE)


class ClosableChannel(WeightChannel, Protocol):
    """A channel that may be left."""

    async def close(self) -> None: ...


class ResidentChannel:
    """The readers' end of weight sync in a process that has the trainer, too."""

    def __init__(self, channel: ClosableChannel, residence: Residence) -> None:
        self._channel = channel
        self._residence = residence

    async def newest(self, held: ReaderState, *, wait_s: float) -> WeightManifest | None:
        """See RemoteChannel.newest."""
        return await self._channel.newest(held, wait_s=wait_s)

    async def fetch(self, manifest: WeightManifest) -> Fetched:
        """The weights where they lie."""
        return Fetched(self._residence.tensors(manifest.version))

    async def close(self) -> None:
        """Nothing is followed any more."""
        await self._channel.close()


class ResidentFollower:
    """A generator that takes versions up where they lie, and may sample again once it has."""

    def __init__(self, generator: Follower, residence: Residence) -> None:
        self._generator = generator
        self._residence = residence

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> Loaded:
        """See Follower.load_weights. Raises SupersededError if they have changed meanwhile."""
        tensors = self._residence.tensors(version)
        loaded = await self._generator.load_weights(tensors, version)
        await self._residence.taken_up()
        return loaded

    async def probe(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        """See Follower.probe."""
        return await self._generator.probe(sequences)
