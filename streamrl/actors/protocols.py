"""Interfaces between actors and the engines they host, real or simulated."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.config import RunConfig
from streamrl.engines.generator_config import SamplingSettings
from streamrl.messages import Array, Columns, Prompt, Rollout
from streamrl.stream.protocols import FollowerProtocol, SampleFunction
from streamrl.stream.stage_worker import ComputeFunction
from streamrl.weights import WeightLoadStats

if TYPE_CHECKING:
    from streamrl.engines.training.trainer import ModelTrainer
    from streamrl.resharding.storage import ShardStorage


class HostedGenerator(Protocol):
    """Engine of a generator actor, with a sample function per stage."""

    @property
    def stages(self) -> Mapping[str, SampleFunction]: ...

    async def collect_partial_rollouts(self) -> Mapping[str, Columns]:
        """Return the unfinished rollouts of groups with at least one completion token, by uid."""
        ...

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: SamplingSettings
    ) -> list[Rollout]:
        """Sample a completion of an evaluation prompt per seed."""

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats: ...

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None: ...

    async def get_storage(self) -> "ShardStorage | None":
        """Return the memory of the engine's parameters, so that a trainer can write into it.

        None if the engine does not support this.
        """
        ...

    async def activate_version(self, version: int) -> WeightLoadStats:
        """Switch to a version that a trainer has written into the storage of `get_storage`."""
        ...

    async def sleep(self) -> None:
        """Free the KV cache; the next request allocates it again."""
        ...

    async def pause(self, reason: str) -> None:
        """Stop decoding until `resume` with the same reason; running requests keep their state."""
        ...

    async def resume(self, reason: str) -> None:
        """End the pause of this reason; decoding continues when no pause is left."""


class HostedFollowerRank(Protocol):
    """One rank of a generator that spans several processes; another process leads."""

    async def run_rank(self) -> None:
        """Compute each engine step together with the leader; raises GenerationError if it exits."""
        ...

    async def get_storage(self) -> "ShardStorage | None": ...

    def fill_shard(self, tensors: Mapping[str, Any]) -> int:
        """Copy this rank's shard out of all parameters of the model; return the copied bytes.

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


class EngineFactory(Protocol):
    """Builds the engines of a run, each in the process that hosts the engine. Must be picklable."""

    async def make_generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> HostedGenerator: ...

    async def make_follower_rank(
        self, config: RunConfig, max_length: int, rank: int
    ) -> HostedFollowerRank: ...

    async def make_scorer(self, config: RunConfig, max_length: int, role: str) -> HostedScorer: ...

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> "ModelTrainer": ...
