"""Interfaces between actors and the engines they host.

Tests and benchmarks implement them with fake engines.
"""

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
    """Engine of a generator actor: stages by name, and sampling for evaluations."""

    @property
    def stages(self) -> Mapping[str, SampleFunction]: ...

    async def collect_partial_rollouts(self) -> Mapping[str, Columns]:
        """Return, by uid, the groups in flight with at least one completion token."""
        ...

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: SamplingSettings
    ) -> list[Rollout]: ...

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats: ...

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None: ...

    async def get_storage(self) -> "ShardStorage | None":
        """Return the parameter storage, for in-place updates by a trainer; None if unsupported."""
        ...

    async def activate_version(self, version: int) -> WeightLoadStats:
        """Switch to the version that was written into the storage."""
        ...

    async def sleep(self) -> None:
        """Free the KV cache until the next request."""
        ...

    async def pause(self, reason: str) -> None:
        """Stop decoding until `resume`; running requests keep their state."""
        ...

    async def resume(self, reason: str) -> None: ...


class HostedFollowerRank(Protocol):
    """Rank of a generator; its leader lives in another process."""

    async def run_rank(self) -> None:
        """Compute in step with the leader; raises GenerationError when the leader exits."""
        ...

    async def get_storage(self) -> "ShardStorage | None": ...

    def fill_shard(self, tensors: Mapping[str, Any]) -> int:
        """Copy this rank's shard out of a full set of parameters, and return the copied bytes.

        The leader is paused meanwhile.
        """
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
    """Stages of a scorer actor by name, with sampled texts and counts for the metrics.

    A stage returns an error in place of a group that it cannot score.

    follower: set if the stages use a model that is trained elsewhere.
    start, close: set up and tear down what the stages need.
    """

    stages: Mapping[str, ComputeFunction]
    follower: FollowerProtocol | None = None
    drain_samples: Callable[[], Sequence[Mapping[str, Any]]] = _return_no_samples
    drain_counts: Callable[[], Mapping[str, float]] = _return_no_counts
    start: Callable[[], Awaitable[Any]] = _do_nothing
    close: Callable[[], Awaitable[None]] = _do_nothing


class HostedTrainerRank(Protocol):
    """Engine of a trainer actor. Synchronous; called from one thread."""

    def set_adaptive_params(self, adaptive_params: Mapping[str, float]) -> None: ...

    def plan_step(self, groups: Mapping[str, Columns]) -> None: ...

    def precompute_logprobs(
        self, groups: Mapping[str, Columns], rollouts: Sequence[RolloutIndex]
    ) -> None: ...

    def sync_plan(self) -> None: ...

    def train_micro_batch(
        self, groups: Mapping[str, Columns], rollouts: Sequence[RolloutIndex], version: int
    ) -> Mapping[str, float]: ...

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float: ...

    def step(self, loss_denominator: float) -> Mapping[str, float]: ...

    @property
    def has_sharded_params(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def compute_token_logprobs(self, token_ids: Array) -> Array: ...

    def full_state(self) -> Iterable[tuple[str, "Tensor"]]: ...

    def count_received_bytes(self, gathered: Mapping[str, "Tensor"]) -> int: ...

    def reshard_to_generator(
        self, generator_storage: "ShardStorage | None", version: int
    ) -> "ReshardingStats | None": ...

    def merged_state(self) -> Iterable[tuple[str, "Tensor"]]: ...

    def offload_optimizer(self) -> None: ...

    def save_training_state(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None: ...

    def load_training_state(self, folder: Path) -> None: ...


class EngineFactory(Protocol):
    """Builds the engines of a run, each in the process that hosts it. Must be picklable."""

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
