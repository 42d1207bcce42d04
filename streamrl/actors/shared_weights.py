"""Weights that lie in one place for the trainer and the generator of one process.

The trainer updates them where they lie, and the generator samples from them there: a new version
moves no byte where both lay them out alike. What is to be seen to is when: nothing is sampled from
the moment the trainer begins to change them until the generator has taken the new version up.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.actors.protocols import HostedRank
from streamrl.engines.memory.peak_memory import PeakMemory
from streamrl.errors import DeadlineError, SupersededError
from streamrl.messages import Array
from streamrl.stream.protocols import ClosableChannel, Fetched, Follower
from streamrl.weights import Loaded, WeightManifest
from streamrl.weights.version_registry import ReaderState

if TYPE_CHECKING:
    from streamrl.resharding.storage import Storage

UPDATE = "update"
"""Why a generator stands still while its weights change."""
SAVE = "save"
"""Why it stands still while all there is of the trainer is written."""


class Sampler(Protocol):
    """What samples from the weights, and can stand still."""

    async def storage(self) -> "Storage | None": ...

    async def release_kv(self) -> None: ...

    async def suspend(self, reason: str) -> None: ...

    async def resume(self, reason: str) -> None: ...


class SplitOff(Protocol):
    """A part of a generator that another process has."""

    async def storage(self) -> "Storage | None": ...

    async def release_kv(self) -> None: ...

    def put(self, tensors: Mapping[str, Any]) -> int: ...


class ResidentGenerator(Follower, Protocol):
    """Takes a version up that lies in its own parameters, too."""

    async def take_up(self, version: int) -> Loaded: ...


class Residence:
    """What the two engines of a process share."""

    def __init__(self) -> None:
        self._trainer_is_in = asyncio.Event()
        self._sampler: Sampler | None = None
        self._part: SplitOff | None = None
        self._fills = False
        self._served: Storage | None = None
        self._version = -1
        self._tensors: Mapping[str, Any] | None = {}
        self._moved_bytes = self._copied_bytes = 0
        self.memory = PeakMemory()

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

    async def let_in(self, sampler: Sampler, *, fills: bool) -> None:
        """The generator is there; the trainer `fills` its parameters, if it cannot lend its own."""
        self._sampler = sampler
        self._fills = fills
        if fills:
            self._served = await sampler.storage()

    async def let_in_part(self, part: SplitOff) -> None:
        """A part of a generator is there, which the trainer fills.

        It is computed with by whoever leads the generator, in another process. That one stands
        still from before the ranks update, all together, until it takes a version up that all of
        them have published.
        """
        self._part = part
        self._fills = True
        self._served = await part.storage()

    @asynccontextmanager
    async def training(self, *, releases_kv: bool) -> AsyncIterator[None]:
        """Inside the trainer computes; the generator's keys and values make room for it, or stay.

        What is before and after is the generator's, and counted as its memory.
        """
        keeper = self._sampler or self._part
        if releases_kv and keeper is not None:
            await keeper.release_kv()
        self.memory.ends("generate")
        try:
            yield
        finally:
            self.memory.ends("train")

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[bool]:
        """Inside the generator of this process stands still; its rollouts go on afterwards.

        Gives whether it does: a part of one can be told so only by its leader.
        """
        if self._sampler is None:
            yield False
            return
        await self._sampler.suspend(SAVE)
        try:
            yield True
        finally:
            await self._sampler.resume(SAVE)

    async def about_to_change(self) -> None:
        """The weights are about to change: nothing is sampled until they are taken up.

        Who calls it has the pool until they have changed, as has who takes a version up.
        """
        self._version = -1
        if self._sampler is not None:
            await self._sampler.suspend(UPDATE)

    @property
    def is_changing(self) -> bool:
        """Whether the weights are no version that may be sampled with."""
        return self._version < 0

    def publish(self, trainer: HostedRank, version: int) -> WeightManifest:
        """The weights are `version` as they lie. The manifest has nothing to fetch.

        Where a rank has other parts of them than its generator they come to lie there now, from
        all ranks.
        """
        self._tensors = None  # two sets at once would be one too many
        self._copied_bytes = 0
        moved = trainer.switch(self._served, version) if self._fills else None
        if moved is None:
            self._tensors = dict(trainer.full_state())
            self._moved_bytes = trainer.received_bytes(self._tensors)
            if self._part is not None:
                # Nobody tells it to later, and its leader waits for all ranks.
                self._copied_bytes = self._part.put(self._tensors)
                self._tensors = None
        else:
            self._moved_bytes = moved.received_bytes
            self._copied_bytes = moved.copied_bytes
        self._version = version
        return WeightManifest(version, (), ())

    def fetched(self, version: int) -> Fetched:
        """The weights where they lie, what came from other ranks for them, and what was copied.

        There are none to be had where they lie in the generator already. Raises SupersededError
        once they are no longer that version: the trainer may have made the next one before a
        generator has come to take this one up.
        """
        self.check(version)
        return Fetched(
            self._tensors or {}, num_bytes=self._moved_bytes, copied_bytes=self._copied_bytes
        )

    async def take_up(self, generator: ResidentGenerator, version: int) -> Loaded:
        """Have the generator serve a version, and sample again. Raises as `fetched` does."""
        self.check(version)
        if self._tensors is None:
            loaded = await generator.take_up(version)
        else:
            loaded = await generator.load_weights(self._tensors, version)
            # What was gathered for it alone is of no use to anybody else.
            self._tensors = None
        if self._sampler is not None:
            await self._sampler.resume(UPDATE)
        return loaded

    def check(self, version: int) -> None:
        """Raise SupersededError unless the weights are that version."""
        if version != self._version:
            raise SupersededError(f"weights version {version} is gone: they have been updated")


class PartFollower:
    """A part of a generator that has each version in it by the time it is offered."""

    def __init__(self, residence: Residence) -> None:
        self._residence = residence

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> Loaded:
        """Nothing is left to be done. Raises SupersededError as `Residence.fetched` does."""
        self._residence.check(version)
        return Loaded()

    async def probe(self, sequences: Sequence[Array]) -> None:
        """The leader of the generator is asked."""


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
        return self._residence.fetched(manifest.version)

    async def close(self) -> None:
        """Nothing is followed any more."""
        await self._channel.close()


class ResidentFollower:
    """A generator that takes versions up where they lie, and may sample again once it has."""

    def __init__(self, generator: ResidentGenerator, residence: Residence) -> None:
        self._generator = generator
        self._residence = residence

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> Loaded:
        """See Follower.load_weights. Raises SupersededError if they have changed meanwhile."""
        return await self._residence.take_up(self._generator, version)

    async def probe(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        """See Follower.probe."""
        return await self._generator.probe(sequences)
