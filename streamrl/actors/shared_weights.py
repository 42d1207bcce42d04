"""Weights shared in place by the trainer and the generator of one process.

The trainer updates the tensors in place and the generator samples from the same memory: a new
version moves no byte if both use the same layout. The only question is timing: the generator stays
paused from the first change until it activates the new version.

    train -> invalidate_weights -> update -> publish_version -> activate_version -> sample
             (generator pauses)                                 (generator resumes)
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.engines.memory.peak_memory import PeakMemoryTracker
from streamrl.errors import DeadlineError, VersionSupersededError
from streamrl.messages import Array
from streamrl.stream.protocols import ClosableWeightChannel, FetchedWeights, FollowerProtocol
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.version_registry import ReaderState

if TYPE_CHECKING:
    from streamrl.engines.training.trainer import ModelTrainer
    from streamrl.resharding.storage import ShardStorage

PAUSE_FOR_UPDATE = "update"
"""Pause reason while the trainer changes the weights."""
PAUSE_FOR_SAVE = "save"
"""Pause reason while the whole training state is in device memory for a checkpoint."""


class PausableSampler(Protocol):
    """Generator that can be paused and can free its KV cache."""

    async def get_storage(self) -> "ShardStorage | None": ...

    async def sleep(self) -> None: ...

    async def pause(self, reason: str) -> None: ...

    async def resume(self, reason: str) -> None: ...


class FollowerRankWeights(Protocol):
    """Parameters of one rank of a generator that another process leads."""

    async def get_storage(self) -> "ShardStorage | None": ...

    async def sleep(self) -> None: ...

    def fill_shard(self, tensors: Mapping[str, Any]) -> int: ...


class SharedWeightsGenerator(FollowerProtocol, Protocol):
    """Generator that can also activate a version that the trainer wrote into its parameters."""

    async def activate_version(self, version: int) -> WeightLoadStats: ...


class SharedWeights:
    """Weights that the trainer and the generator of a process share, and their current version."""

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
        """Record that the trainer has started, so that the generator of this process may start.

        The engine joins the trainer's process group, which must exist first.
        """
        self._trainer_ready.set()

    async def wait_for_trainer(self, timeout_s: float) -> None:
        """Wait until the trainer of this process has started; DeadlineError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._trainer_ready.wait()
        except TimeoutError:
            raise DeadlineError(
                f"the generator waited {timeout_s:g} s for the trainer of its process to start"
            ) from None

    async def attach_generator(
        self, sampler: PausableSampler, *, should_fill_storage: bool
    ) -> None:
        """Set the generator that samples with these weights.

        should_fill_storage: the trainer copies each version into the generator's parameters;
        otherwise the generator reads the trainer's own tensors.
        """
        self._sampler = sampler
        self._should_fill_storage = should_fill_storage
        if should_fill_storage:
            self._generator_storage = await sampler.get_storage()

    async def attach_follower_rank(self, follower_rank: FollowerRankWeights) -> None:
        """Set the generator rank of this process, for a generator that another process leads.

        The trainer copies each version into the parameters of the rank. The leader pauses before
        the ranks update, all together, until it activates a version that every rank has published.
        """
        self._follower_rank = follower_rank
        self._should_fill_storage = True
        self._generator_storage = await follower_rank.get_storage()

    @asynccontextmanager
    async def run_training_phase(self, *, releases_kv: bool) -> AsyncIterator[None]:
        """Context in which the trainer computes.

        releases_kv: free the KV cache of the generator first. Memory peaks before the context count
        as "generate", those inside as "train".
        """
        generator = self._sampler or self._follower_rank
        if releases_kv and generator is not None:
            await generator.sleep()
        self.peak_memory.record_phase("generate")
        try:
            yield
        finally:
            self.peak_memory.record_phase("train")

    @asynccontextmanager
    async def pause_generator(self) -> AsyncIterator[bool]:
        """Context in which the generator of this process is paused; yields False if it cannot be.

        A follower rank cannot be paused here: only its leader, in another process, can do so.
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
        """Mark the weights as changing: pause the generator until `activate_version`.

        Both calls require the device lease: the caller holds the device pool until the change is
        complete.
        """
        self._version = -1
        if self._sampler is not None:
            await self._sampler.pause(PAUSE_FOR_UPDATE)

    @property
    def is_changing(self) -> bool:
        """Return whether the weights are between two versions, so that sampling must wait."""
        return self._version < 0

    def publish_version(self, trainer: "ModelTrainer", version: int) -> WeightManifest:
        """Declare the trainer's current weights to be `version`; return a manifest without buckets.

        Where trainer and generator have different layouts, reshards the weights into the
        generator's storage: a collective over all ranks.
        """
        self._tensors = None  # frees the previous full set before the next is gathered
        self._copied_bytes = 0
        resharding = (
            trainer.reshard_to_generator(self._generator_storage, version)
            if self._should_fill_storage
            else None
        )
        if resharding is None:
            self._tensors = dict(trainer.full_state())
            self._moved_bytes = trainer.count_received_bytes(self._tensors)
            if self._follower_rank is not None:
                # Copy now: no later call reaches a follower rank, and the leader waits for all.
                self._copied_bytes = self._follower_rank.fill_shard(self._tensors)
                self._tensors = None
        else:
            self._moved_bytes = resharding.received_bytes
            self._copied_bytes = resharding.copied_bytes
        self._version = version
        return WeightManifest(version, (), ())

    def fetch_version(self, version: int) -> FetchedWeights:
        """Return the shared tensors, with the bytes received from other ranks and the bytes copied.

        The mapping of tensors is empty if the generator's storage already holds the version. Raises
        VersionSupersededError if the trainer has begun a newer version.
        """
        self.validate_version(version)
        return FetchedWeights(
            self._tensors or {}, num_bytes=self._moved_bytes, copied_bytes=self._copied_bytes
        )

    async def activate_version(
        self, generator: SharedWeightsGenerator, version: int
    ) -> WeightLoadStats:
        """Switch the paused generator to a version and let it decode again.

        Raises VersionSupersededError if the trainer has begun a newer version.
        """
        self.validate_version(version)
        if self._tensors is None:
            stats = await generator.activate_version(version)
        else:
            stats = await generator.load_weights(self._tensors, version)
            # The gathered copy served this generator only; free the memory.
            self._tensors = None
        if self._sampler is not None:
            await self._sampler.resume(PAUSE_FOR_UPDATE)
        return stats

    def validate_version(self, version: int) -> None:
        """Raise VersionSupersededError unless the shared weights are `version`."""
        if version != self._version:
            raise VersionSupersededError(
                f"weights version {version} is gone: they have been updated"
            )


class PrefilledFollower:
    """Follower interface of a generator rank; the trainer has already filled its parameters."""

    def __init__(self, shared_weights: SharedWeights) -> None:
        self._shared_weights = shared_weights

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        """Check the version only: the trainer has already copied it into this rank's parameters.

        Raises VersionSupersededError if the trainer has begun a newer version.
        """
        self._shared_weights.validate_version(version)
        return WeightLoadStats()

    async def compute_logprobs(self, sequences: Sequence[Array]) -> None:
        """Return None: the leader of the generator runs the logprob check."""


class SharedWeightsChannel:
    """Weight channel between a trainer and a generator of one process: no bytes travel."""

    def __init__(self, channel: ClosableWeightChannel, shared_weights: SharedWeights) -> None:
        self._channel = channel
        self._shared_weights = shared_weights

    async def wait_for_newer(self, state: ReaderState, *, wait_s: float) -> WeightManifest | None:
        return await self._channel.wait_for_newer(state, wait_s=wait_s)

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        return self._shared_weights.fetch_version(manifest.version)

    async def close(self) -> None:
        await self._channel.close()


class SharedWeightsFollower:
    """Follower interface of a generator that shares the trainer's weights."""

    def __init__(self, generator: SharedWeightsGenerator, shared_weights: SharedWeights) -> None:
        self._generator = generator
        self._shared_weights = shared_weights

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        """Activate a version; VersionSupersededError if the trainer has begun a newer one."""
        return await self._shared_weights.activate_version(self._generator, version)

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        return await self._generator.compute_logprobs(sequences)
