"""Interfaces between actors and the engines they host, real or simulated."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.config.run_config import RunConfig
from streamrl.stream.protocols import FollowerProtocol
from streamrl.stream.stage_worker import ComputeFunction

if TYPE_CHECKING:
    from streamrl.engines.generation.generator import GenerationEngine
    from streamrl.engines.training.trainer import ModelTrainer
    from streamrl.engines.vllm.follower_rank import FollowerRank


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
    ) -> "GenerationEngine": ...

    async def make_follower_rank(
        self, config: RunConfig, max_length: int, rank: int
    ) -> "FollowerRank": ...

    async def make_scorer(self, config: RunConfig, max_length: int, role: str) -> HostedScorer: ...

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> "ModelTrainer": ...
