"""How an actor makes what it hosts. Tests and benchmarks bring engines of their own."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.buffer.assembly.packing import RolloutIndex
from streamrl.config import RunConfig
from streamrl.engines.generator_config import SamplingSettings
from streamrl.messages import Array, Columns, Prompt, Rollout
from streamrl.stream.protocols import FollowerProtocol, SampleFunction
from streamrl.stream.stage_worker import ComputeFunction
from streamrl.weights import WeightLoadStats

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.resharding.executors import ReshardingStats
    from streamrl.resharding.storage import ShardStorage


class HostedGenerator(Protocol):
    """What a generator actor hosts: its stages by name, and sampling for evaluations."""

    @property
    def stages(self) -> Mapping[str, SampleFunction]: ...

    async def collect_partial_rollouts(self) -> Mapping[str, Columns]:
        """By uid, the groups under way of which a completion token exists."""
        ...

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: SamplingSettings
    ) -> list[Rollout]: ...

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats: ...

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None: ...

    async def get_storage(self) -> "ShardStorage | None":
        """Where its parameters lie, to be filled there by others; None if they cannot be."""
        ...

    async def activate_version(self, version: int) -> WeightLoadStats:
        """Go over to a version that has been filled into its storage."""
        ...

    async def sleep(self) -> None:
        """Free the memory of keys and values until it samples again."""
        ...

    async def pause(self, reason: str) -> None:
        """Sample nothing until `resume`; what is under way stays as it is."""
        ...

    async def resume(self, reason: str) -> None: ...


class HostedFollowerRank(Protocol):
    """What an actor hosts that has a part of a generator, which another actor hosts."""

    async def run_rank(self) -> None:
        """Compute along until the other ends; raises GenerationError when it does."""
        ...

    async def get_storage(self) -> "ShardStorage | None":
        """As a generator's, of what is here."""
        ...

    def fill_shard(self, tensors: Mapping[str, Any]) -> int:
        """Serve what is here of a full set of parameters, while the other stands still; the bytes
        that were copied."""
        ...

    async def sleep(self) -> None: ...


def _return_no_samples() -> Sequence[Mapping[str, Any]]:
    return ()


def _return_no_counts() -> Mapping[str, float]:
    return {}


async def _do_nothing() -> None:
    return None


@dataclass(frozen=True)
class HostedScorer:
    """What a scorer actor hosts: its stages by name, a few scored texts to look at, and counts.

    A group that cannot be scored comes back as the error. `follower` is there if the stages hold a
    model that is trained elsewhere. `start` readies what it scores with, `close` ends it.
    """

    stages: Mapping[str, ComputeFunction]
    follower: FollowerProtocol | None = None
    drain_samples: Callable[[], Sequence[Mapping[str, Any]]] = _return_no_samples
    drain_counts: Callable[[], Mapping[str, float]] = _return_no_counts
    start: Callable[[], Awaitable[Any]] = _do_nothing
    close: Callable[[], Awaitable[None]] = _do_nothing


class HostedTrainerRank(Protocol):
    """What a trainer actor hosts. Not asyncio; called from one thread."""

    def set_adaptive_params(self, dials: Mapping[str, float]) -> None: ...

    def plan_step(self, groups: Mapping[str, Columns]) -> None: ...

    def precompute_logprobs(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex]
    ) -> None: ...

    def sync_plan(self) -> None: ...

    def train_micro_batch(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], version: int
    ) -> Mapping[str, float]: ...

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float: ...

    def step(self, normaliser: float) -> Mapping[str, float]: ...

    @property
    def has_sharded_params(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def compute_token_logprobs(self, token_ids: Array) -> Array: ...

    def full_state(self) -> Iterable[tuple[str, "Tensor"]]: ...

    def count_received_bytes(self, gathered: Mapping[str, "Tensor"]) -> int: ...

    def reshard_to_generator(
        self, served: "ShardStorage | None", version: int
    ) -> "ReshardingStats | None": ...

    def merged_state(self) -> Iterable[tuple[str, "Tensor"]]: ...

    def offload_optimizer(self) -> None: ...

    def save_training_state(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None: ...

    def load_training_state(self, folder: Path) -> None: ...


class EngineFactory(Protocol):
    """Makes the engines of a run, each in the process that hosts it. Must be picklable."""

    async def make_generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> HostedGenerator: ...

    async def make_follower_rank(
        self, config: RunConfig, max_length: int, rank: int
    ) -> HostedFollowerRank: ...

    async def make_scorer(self, config: RunConfig, max_length: int, role: str) -> HostedScorer: ...

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> HostedTrainerRank: ...
