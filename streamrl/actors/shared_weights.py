"""Weights that lie in one place for the trainer and the generator of one process.

The trainer updates them where they lie, and the generator samples from them there: a new version
moves no byte where both lay them out alike. What is to be seen to is when: nothing is sampled from
the moment the trainer begins to change them until the generator has taken the new version up.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.actors.protocols import HostedTrainerRank
from streamrl.engines.memory.peak_memory import PeakMemoryTracker
from streamrl.errors import DeadlineError, VersionSupersededError
from streamrl.messages import Array
from streamrl.stream.protocols import ClosableWeightChannel, FetchedWeights, FollowerProtocol
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.version_registry import ReaderState

if TYPE_CHECKING:
    from streamrl.resharding.storage import ShardStorage

PAUSE_FOR_UPDATE = "update"
"""Why a generator stands still while its weights change."""
PAUSE_FOR_SAVE = "save"
"""Why it stands still while all there is of the trainer is written."""


class PausableSampler(Protocol):
    """What samples from the weights, and can stand still."""

    async def get_storage(self) -> "ShardStorage | None": ...

    async def sleep(self) -> None: ...

    async def pause(self, reason: str) -> None: ...

    async def resume(self, reason: str) -> None: ...


class FollowerRankWeights(Protocol):
    """A part of a generator that another process has."""

    async def get_storage(self) -> "ShardStorage | None": ...

    async def sleep(self) -> None: ...

    def fill_shard(self, tensors: Mapping[str, Any]) -> int: ...


class SharedWeightsGenerator(FollowerProtocol, Protocol):
    """Takes a version up that lies in its own parameters, too."""

    async def activate_version(self, version: int) -> WeightLoadStats: ...


class SharedWeights:
    """What the two engines of a process share."""

    def __init__(self) -> None:
        self._trainer_ready = asyncio.Event()
        self._sampler: PausableSampler | None = None
        self._follower_rank: FollowerRankWeights | None = None
        self._should_fill_storage = False
        self._generator_storage: ShardStorage | None = None
        self._version = -1
        self._tensors: Mapping[str, Any] | None = {}
        self._moved_bytes = self._copied_bytes = 0
        self.peak_memory = PeakMemoryTracker()

    def mark_trainer_ready(self) -> None:
        """The trainer has joined the other ranks, and a generator may come into their group."""
        self._trainer_ready.set()

    async def wait_for_trainer(self, timeout_s: float) -> None:
        """Raises DeadlineError if the trainer is not there in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._trainer_ready.wait()
        except TimeoutError:
            raise DeadlineError(
                f"the generator waited {timeout_s:g} s for the trainer of its process to start"
            ) from None

    async def attach_generator(self, sampler: PausableSampler, *, fills: bool) -> None:
        """The generator is there; the trainer `fills` its parameters, if it cannot lend its own."""
        self._sampler = sampler
        self._should_fill_storage = fills
        if fills:
            self._generator_storage = await sampler.get_storage()

    async def attach_follower_rank(self, part: FollowerRankWeights) -> None:
        """A part of a generator is there, which the trainer fills.

        It is computed with by whoever leads the generator, in another process. That one stands
        still from before the ranks update, all together, until it takes a version up that all of
        them have published.
        """
        self._follower_rank = part
        self._should_fill_storage = True
        self._generator_storage = await part.get_storage()

    @asynccontextmanager
    async def run_training_phase(self, *, releases_kv: bool) -> AsyncIterator[None]:
        """Inside the trainer computes; the generator's keys and values make room for it, or stay.

        What is before and after is the generator's, and counted as its memory.
        """
        keeper = self._sampler or self._follower_rank
        if releases_kv and keeper is not None:
            await keeper.sleep()
        self.peak_memory.record_phase("generate")
        try:
            yield
        finally:
            self.peak_memory.record_phase("train")

    @asynccontextmanager
    async def pause_generator(self) -> AsyncIterator[bool]:
        """Inside the generator of this process stands still; its rollouts go on afterwards.

        Gives whether it does: a part of one can be told so only by its leader.
        """
        if self._sampler is None:
            yield False
            return
        await self._sampler.pause(PAUSE_FOR_SAVE)
        try:
            yield True
        finally:
            await self._sampler.resume(PAUSE_FOR_SAVE)

    async def invalidate_weights(self) -> None:
        """The weights are about to change: nothing is sampled until they are taken up.

        Who calls it has the pool until they have changed, as has who takes a version up.
        """
        self._version = -1
        if self._sampler is not None:
            await self._sampler.pause(PAUSE_FOR_UPDATE)

    @property
    def is_changing(self) -> bool:
        """Whether the weights are no version that may be sampled with."""
        return self._version < 0

    def publish_version(self, trainer: HostedTrainerRank, version: int) -> WeightManifest:
        """The weights are `version` as they lie. The manifest has nothing to fetch.

        Where a rank has other parts of them than its generator they come to lie there now, from
        all ranks.
        """
        self._tensors = None  # two sets at once would be one too many
        self._copied_bytes = 0
        moved = (
            trainer.reshard_to_generator(self._generator_storage, version)
            if self._should_fill_storage
            else None
        )
        if moved is None:
            self._tensors = dict(trainer.full_state())
            self._moved_bytes = trainer.count_received_bytes(self._tensors)
            if self._follower_rank is not None:
                # Nobody tells it to later, and its leader waits for all ranks.
                self._copied_bytes = self._follower_rank.fill_shard(self._tensors)
                self._tensors = None
        else:
            self._moved_bytes = moved.received_bytes
            self._copied_bytes = moved.copied_bytes
        self._version = version
        return WeightManifest(version, (), ())

    def fetch_version(self, version: int) -> FetchedWeights:
        """The weights where they lie, what came from other ranks for them, and what was copied.

        There are none to be had where they lie in the generator already. Raises SupersededError
        once they are no longer that version: the trainer may have made the next one before a
        generator has come to take this one up.
        """
        self.validate_version(version)
        return FetchedWeights(
            self._tensors or {}, num_bytes=self._moved_bytes, copied_bytes=self._copied_bytes
        )

    async def activate_version(
        self, generator: SharedWeightsGenerator, version: int
    ) -> WeightLoadStats:
        """Have the generator serve a version, and sample again. Raises as `fetch_version` does."""
        self.validate_version(version)
        if self._tensors is None:
            loaded = await generator.activate_version(version)
        else:
            loaded = await generator.load_weights(self._tensors, version)
            # What was gathered for it alone is of no use to anybody else.
            self._tensors = None
        if self._sampler is not None:
            await self._sampler.resume(PAUSE_FOR_UPDATE)
        return loaded

    def validate_version(self, version: int) -> None:
        """Raise SupersededError unless the weights are that version."""
        if version != self._version:
            raise VersionSupersededError(
                f"weights version {version} is gone: they have been updated"
            )


class PrefilledFollower:
    """A part of a generator that has each version in it by the time it is offered."""

    def __init__(self, residence: SharedWeights) -> None:
        self._shared_weights = residence

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        """Nothing is left to be done.

        Raises SupersededError as `SharedWeights.fetch_version` does.
        """
        self._shared_weights.validate_version(version)
        return WeightLoadStats()

    async def compute_logprobs(self, sequences: Sequence[Array]) -> None:
        """The leader of the generator is asked."""


class SharedWeightsChannel:
    """The readers' end of weight sync in a process that has the trainer, too."""

    def __init__(self, channel: ClosableWeightChannel, residence: SharedWeights) -> None:
        self._channel = channel
        self._shared_weights = residence

    async def wait_for_newer(self, held: ReaderState, *, wait_s: float) -> WeightManifest | None:
        """See RemoteChannel.newest."""
        return await self._channel.wait_for_newer(held, wait_s=wait_s)

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        """The weights where they lie."""
        return self._shared_weights.fetch_version(manifest.version)

    async def close(self) -> None:
        """Nothing is followed any more."""
        await self._channel.close()


class SharedWeightsFollower:
    """A generator that takes versions up where they lie, and may sample again once it has."""

    def __init__(self, generator: SharedWeightsGenerator, residence: SharedWeights) -> None:
        self._generator = generator
        self._shared_weights = residence

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        """See Follower.load_weights. Raises SupersededError if they have changed meanwhile."""
        return await self._shared_weights.activate_version(self._generator, version)

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        """See Follower.probe."""
        return await self._generator.compute_logprobs(sequences)
