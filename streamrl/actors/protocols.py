"""Interfaces between actors and the engines they host, real or simulated."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.buffer.assembly.packing import RolloutIndex
from streamrl.config import RunConfig
from streamrl.messages import Array, Columns
from streamrl.stream.protocols import FollowerProtocol
from streamrl.stream.stage_worker import ComputeFunction

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.engines.generation.generator import GenerationEngine
    from streamrl.engines.vllm.follower_rank import FollowerRank
    from streamrl.resharding.executors import ReshardingStats
    from streamrl.resharding.storage import ShardStorage


def _return_no_samples() -> Sequence[Mapping[str, Any]]:
    return ()


def _return_no_counts() -> Mapping[str, float]:
    return {}


async def _do_nothing() -> None:
    return None


@dataclass(frozen=True)
class HostedScorer:
    """Compute functions of a scorer actor by stage name, with their life cycle.

    A compute function returns an error in place of a group that it cannot score.

    follower: loads new weights; None if no stage uses a model that is trained.
    drain_samples, drain_counts: return scored texts and metric counts since the last call.
    start, close: start and stop the models and processes that the stages need.
    """

    stages: Mapping[str, ComputeFunction]
    follower: FollowerProtocol | None = None
    drain_samples: Callable[[], Sequence[Mapping[str, Any]]] = _return_no_samples
    drain_counts: Callable[[], Mapping[str, float]] = _return_no_counts
    start: Callable[[], Awaitable[Any]] = _do_nothing
    close: Callable[[], Awaitable[None]] = _do_nothing


class HostedTrainerRank(Protocol):
    """Trainer backend of one rank, called by a trainer actor in a single thread."""

    def set_adaptive_params(self, adaptive_params: Mapping[str, float]) -> None:
        """Set the coefficients that the run adjusts, such as the KL coefficient, by name."""

    def plan_step(self, groups: Mapping[str, Columns]) -> None:
        """Compute columns, such as advantages, that need all groups of the training step."""

    def precompute_logprobs(
        self, groups: Mapping[str, Columns], rollouts: Sequence[RolloutIndex]
    ) -> None:
        """Store the log-probabilities of these rollouts under the policy before the step trains."""

    def sync_plan(self) -> None:
        """Exchange precomputed data between the ranks, after all calls of `precompute_logprobs`."""

    def train_micro_batch(
        self, groups: Mapping[str, Columns], rollouts: Sequence[RolloutIndex], version: int
    ) -> Mapping[str, float]:
        """Run forward and backward passes; return sums for the metrics and the loss denominator."""

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float: ...

    def step(self, loss_denominator: float) -> Mapping[str, float]:
        """Run an optimizer step on the accumulated gradients; return metrics of the update."""

    @property
    def has_sharded_params(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def compute_token_logprobs(self, token_ids: Array) -> Array: ...

    def full_state(self) -> Iterable[tuple[str, "Tensor"]]:
        """Yield all trained parameters; with sharded ones, every rank must exhaust the iterator."""

    def count_received_bytes(self, gathered: Mapping[str, "Tensor"]) -> int:
        """Return the bytes of an exhausted `full_state` that came from other ranks."""

    def reshard_to_generator(
        self, generator_storage: "ShardStorage | None", version: int
    ) -> "ReshardingStats | None":
        """Write the parameters into the generator's storage; None where only `full_state` works."""

    def merged_state(self) -> Iterable[tuple[str, "Tensor"]]:
        """Yield the full model as `full_state` does, with LoRA adapters merged."""

    def offload_optimizer(self) -> None: ...

    def save_training_state(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None: ...

    def load_training_state(self, folder: Path) -> None: ...


class EngineFactory(Protocol):
    """Builds the engines of a run, each in the process that hosts the engine. Must be picklable."""

    async def make_generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> "GenerationEngine": ...

    async def make_follower_rank(
        self, config: RunConfig, max_length: int, rank: int
    ) -> "FollowerRank": ...

    async def make_scorer(self, config: RunConfig, max_length: int, role: str) -> HostedScorer: ...

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> HostedTrainerRank: ...
