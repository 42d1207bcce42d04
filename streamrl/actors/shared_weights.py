"""Weights shared in place by the trainer and the generator of one process.

The trainer updates the tensors in place and the generator samples from the same memory: a new
version moves no byte if both use the same layout. The only question is timing: the generator stays
paused from the first change until it activates the new version.

    train -> invalidate_weights -> update -> publish_version -> load_weights -> sample
             (generator pauses)                                 (generator resumes)
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from streamrl.engines.memory.peak_memory import PeakMemoryTracker, release_freed_memory
from streamrl.engines.memory.worker_memory import WorkerMemory
from streamrl.errors import DeadlineError, VersionSupersededError
from streamrl.messages import Array
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.versions import FetchedWeights

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.training.model_trainer import ModelTrainer
    from streamrl.engines.vllm.peer_rank import PeerRank
    from streamrl.resharding.storage import ShardStorage

PAUSE_FOR_UPDATE = "update"
"""Pause reason while the trainer changes the weights."""
PAUSE_FOR_SAVE = "save"
"""Pause reason while the whole training state is in device memory for a checkpoint."""
RunFunction = Callable[..., Awaitable[Any]]
"""Runs a function with arguments, in a thread for example, and returns its result."""


async def run_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class SharedWeights:
    """Weights in a process's memory that its trainer updates and its generator samples from.

    The trainer publishes a version here, and `follow_weights` loads it into the generator, with the
    same calls as for a generator in another process.
    """

    _trainer: "ModelTrainer"
    _run_in_thread: RunFunction

    def __init__(self) -> None:
        self._trainer_ready = asyncio.Event()
        self._should_sleep_generator = self._should_offload_optimizer = False
        self._generator: GenerationEngine | None = None
        self._peer_rank: PeerRank | None = None
        self._should_fill_storage = False
        self._generator_storage: ShardStorage | None = None
        self._version = -1
        self._tensors: Mapping[str, Any] = {}
        self._moved_bytes = self._copied_bytes = 0
        self.peak_memory = PeakMemoryTracker()

    async def attach_trainer(
        self,
        trainer: "ModelTrainer",
        memory: WorkerMemory | None,
        *,
        run_in_thread: RunFunction = run_directly,
    ) -> None:
        """Set the trainer that changes the weights; the generator of this process may start then.

        The engine joins the trainer's process group, which must exist first.

        memory: what to offload because memory is short; None for nothing.
        run_in_thread: runs a function in the trainer's thread; by default functions run directly.
        """
        self._trainer, self._run_in_thread = trainer, run_in_thread
        if memory is not None:
            self._should_sleep_generator = memory.releases_kv
            self._should_offload_optimizer = memory.offloads_optimizer
        if self._should_offload_optimizer:
            await self._run_in_thread(trainer.offload_optimizer)
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
        self, generator: "GenerationEngine", *, should_fill_storage: bool
    ) -> None:
        """Set the generator that samples with these weights.

        should_fill_storage: the trainer copies each version into the generator's parameters;
        otherwise the generator reads the trainer's own tensors.
        """
        self._generator = generator
        self._should_fill_storage = should_fill_storage
        if should_fill_storage:
            self._generator_storage = await generator.get_storage()

    async def attach_peer_rank(self, peer_rank: "PeerRank") -> None:
        """Set the generator rank of this process, for a generator that another process leads.

        The trainer copies each version into the parameters of the rank. The leader pauses before
        the ranks update, all together, until it activates a version that every rank has published.
        """
        self._peer_rank = peer_rank
        self._should_fill_storage = True
        self._generator_storage = await peer_rank.get_storage()

    @asynccontextmanager
    async def run_training_phase(
        self, *, is_piece: bool = False, may_release_kv: bool = True
    ) -> AsyncIterator[None]:
        """Context in which the trainer computes in the memory that the generator gives up.

        If memory is short, frees the KV cache of the generator first and offloads the optimizer at
        the end. may_release_kv: the generator is idle, so its KV cache may be freed. is_piece: the
        context computes only a micro-batch of several, so freed memory stays cached for the next,
        unless memory is short.

        Memory peaks before the context count as "generate", those inside as "train".
        """
        generator = self._generator or self._peer_rank
        if self._should_sleep_generator and may_release_kv and generator is not None:
            await generator.sleep()
        self.peak_memory.record_phase("generate")
        try:
            yield
            if self._should_offload_optimizer:
                await self._run_in_thread(self._trainer.offload_optimizer)
            if self._should_sleep_generator or not is_piece:
                await self._run_in_thread(release_freed_memory)
        finally:
            self.peak_memory.record_phase("train")

    @asynccontextmanager
    async def hold_whole_state(self) -> AsyncIterator[None]:
        """Context in which the optimizer state is on the device too, for saving a checkpoint.

        If the optimizer is offloaded because memory is short, pauses the generator of this process
        and frees its KV cache. A peer rank cannot be paused here: only its leader, in another
        process, can do so. The caller needs no device lease.
        """
        if not self._should_offload_optimizer:
            yield
            return
        generator = self._generator
        if generator is not None:
            await generator.pause(PAUSE_FOR_SAVE)
        try:
            async with self.run_training_phase(may_release_kv=generator is not None):
                yield
        finally:
            if generator is not None:
                await generator.resume(PAUSE_FOR_SAVE)

    async def invalidate_weights(self) -> None:
        """Mark the weights as changing: pause the generator until `load_weights`.

        This call needs the trainers' device lease, `load_weights` later that of the generator.
        While `publish_version` runs in between, nobody holds a lease: the pause alone keeps the
        generator from computing.
        """
        self._version = -1
        if self._generator is not None:
            await self._generator.pause(PAUSE_FOR_UPDATE)

    @property
    def is_changing(self) -> bool:
        """Return whether the weights are between two versions, so that sampling must wait."""
        return self._version < 0

    def publish_version(self, version: int) -> WeightManifest:
        """Declare the trainer's current weights to be `version`; return a manifest without buckets.

        Where trainer and generator have different layouts, reshards the weights into the
        generator's storage: a collective over all ranks.
        """
        trainer = self._trainer
        self._tensors = {}  # frees the previous full set before the next is gathered
        self._copied_bytes = 0
        resharding = (
            trainer.reshard_to_generator(self._generator_storage, version)
            if self._should_fill_storage
            else None
        )
        if resharding is None:
            self._tensors = dict(trainer.full_state())
            self._moved_bytes = trainer.count_received_bytes(self._tensors)
            if self._peer_rank is not None:
                # Copy now: no later call reaches a peer rank, and the leader waits for all.
                self._copied_bytes = self._peer_rank.fill_shard(self._tensors)
                self._tensors = {}
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
        self._validate_version(version)
        return FetchedWeights(
            self._tensors, num_bytes=self._moved_bytes, copied_bytes=self._copied_bytes
        )

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        """Switch the paused generator to a version and let it decode again.

        tensors: those of `fetch_version`; empty if the generator's storage holds the version.
        Raises VersionSupersededError if the trainer has begun a newer version. On a peer rank,
        nothing is left to load.
        """
        self._validate_version(version)
        if self._generator is None:
            return WeightLoadStats()
        if tensors:
            stats = await self._generator.load_weights(tensors, version)
        else:
            stats = await self._generator.activate_version(version)
        # A gathered copy served this generator only; free the memory.
        self._tensors = {}
        await self._generator.resume(PAUSE_FOR_UPDATE)
        return stats

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        """Return the generator's logprobs; None on a peer rank, whose leader is checked."""
        return (
            None if self._generator is None else await self._generator.compute_logprobs(sequences)
        )

    def _validate_version(self, version: int) -> None:
        """Raise VersionSupersededError unless the shared weights are `version`."""
        if version != self._version:
            raise VersionSupersededError(
                f"weights version {version} is superseded: the trainer has updated them"
            )
