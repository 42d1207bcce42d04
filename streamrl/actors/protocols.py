"""How an actor makes what it hosts. Tests and benchmarks bring engines of their own."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.buffer.assembly.packing import Pick
from streamrl.config import RunConfig
from streamrl.engines.generator_config import Sampling
from streamrl.messages import Array, Columns, Prompt, Rollout
from streamrl.stream.protocols import Follower, Sample
from streamrl.stream.stage_worker import Compute
from streamrl.weights import Loaded

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.resharding.executors import Moved
    from streamrl.resharding.storage import Storage


class HostedGenerator(Protocol):
    """What a generator actor hosts: its stages by name, and sampling for evaluations."""

    @property
    def stages(self) -> Mapping[str, Sample]: ...

    async def begun(self) -> Mapping[str, Columns]:
        """By uid, the groups under way of which a completion token exists."""
        ...

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], *, sampling: Sampling
    ) -> list[Rollout]: ...

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> Loaded: ...

    async def probe(self, sequences: Sequence[Array]) -> Sequence[Array] | None: ...

    async def storage(self) -> "Storage | None":
        """Where its parameters lie, to be filled there by others; None if they cannot be."""
        ...

    async def take_up(self, version: int) -> Loaded:
        """Go over to a version that has been filled into its storage."""
        ...

    async def release_kv(self) -> None:
        """Free the memory of keys and values until it samples again."""
        ...

    async def suspend(self, reason: str) -> None:
        """Sample nothing until `resume`; what is under way stays as it is."""
        ...

    async def resume(self, reason: str) -> None: ...


class HostedPart(Protocol):
    """What an actor hosts that has a part of a generator, which another actor hosts."""

    async def serve(self) -> None:
        """Compute along until the other ends; raises GenerationError when it does."""
        ...

    async def storage(self) -> "Storage | None":
        """As a generator's, of what is here."""
        ...

    def put(self, tensors: Mapping[str, Any]) -> int:
        """Serve what is here of a full set of parameters, while the other stands still; the bytes
        that were copied."""
        ...

    async def release_kv(self) -> None: ...


def _no_samples() -> Sequence[Mapping[str, Any]]:
    return ()


def _no_counts() -> Mapping[str, float]:
    return {}


async def _nothing() -> None:
    return None


@dataclass(frozen=True)
class HostedScorer:
    """What a scorer actor hosts: its stages by name, a few scored texts to look at, and counts.

    A group that cannot be scored comes back as the error. `follower` is there if the stages hold a
    model that is trained elsewhere. `start` readies what it scores with, `close` ends it.
    """

    stages: Mapping[str, Compute]
    follower: Follower | None = None
    drain_samples: Callable[[], Sequence[Mapping[str, Any]]] = _no_samples
    drain_counts: Callable[[], Mapping[str, float]] = _no_counts
    start: Callable[[], Awaitable[Any]] = _nothing
    close: Callable[[], Awaitable[None]] = _nothing


class HostedRank(Protocol):
    """What a trainer actor hosts. Not asyncio; called from one thread."""

    def adopt(self, dials: Mapping[str, float]) -> None: ...

    def plan(self, groups: Mapping[str, Columns]) -> None: ...

    def look(self, groups: Mapping[str, Columns], picks: Sequence[Pick]) -> None: ...

    def settle(self) -> None: ...

    def train_micro_batch(
        self, groups: Mapping[str, Columns], picks: Sequence[Pick], version: int
    ) -> Mapping[str, float]: ...

    def normaliser(self, sums: Mapping[str, float]) -> float: ...

    def step(self, normaliser: float) -> Mapping[str, float]: ...

    @property
    def gathers(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def token_logprobs(self, token_ids: Array) -> Array: ...

    def full_state(self) -> Iterable[tuple[str, "Tensor"]]: ...

    def received_bytes(self, gathered: Mapping[str, "Tensor"]) -> int: ...

    def switch(self, served: "Storage | None", version: int) -> "Moved | None": ...

    def whole_state(self) -> Iterable[tuple[str, "Tensor"]]: ...

    def offload_optimizer(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class EngineFactory(Protocol):
    """Makes the engines of a run, each in the process that hosts it. Must be picklable."""

    async def generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> HostedGenerator: ...

    async def generator_part(self, config: RunConfig, max_length: int, rank: int) -> HostedPart: ...

    async def scorer(self, config: RunConfig, max_length: int, role: str) -> HostedScorer: ...

    def trainer(self, config: RunConfig, max_length: int, rank: int, role: str) -> HostedRank: ...
