"""Which transport a run takes, and the sentence that says why. Pure arithmetic on facts."""

from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.weights.config import AUTO, SHARED_MEMORY, STORE, WeightsConfig

SPARE_VERSIONS = 2
"""Besides those that are kept: one that is being laid, and one that slow readers still read."""

NAMES = {SHARED_MEMORY: "shared memory", STORE: "the object store"}


@dataclass(frozen=True)
class Facts:
    """What is known of a cluster and a model before anything moves.

    num_nodes: nodes on which publisher and readers are. readers: how many follow the weights.
    model_bytes: size of one version. shm_free_bytes: free in /dev/shm of the publisher's node.
    """

    num_nodes: int
    readers: int
    model_bytes: int
    shm_free_bytes: int


@dataclass(frozen=True)
class Choice:
    """A transport (one of TRANSPORTS, never auto) and, in one line for the user, why it is that."""

    transport: str
    reason: str


def choose(config: WeightsConfig, facts: Facts) -> Choice:
    """The transport that the settings ask for, or for auto the fastest that is possible.

    Raises ConfigError, with the arithmetic, if the one asked for is impossible.
    """
    obstacle = _obstacle(config, facts)
    if config.transport == SHARED_MEMORY and obstacle:
        raise ConfigError(f"weights.transport=shared_memory: {obstacle}")
    if config.transport != AUTO:
        name = NAMES.get(config.transport, config.transport)
        return Choice(config.transport, f"weights: {name}, as weights.transport says")
    if obstacle:
        return Choice(STORE, f"weights: {NAMES[STORE]}, as for shared memory {obstacle}")
    readers = f"{facts.readers} reader{'s' * (facts.readers != 1)}"
    sizes = f"{_size(facts.model_bytes)} a version, {_size(facts.shm_free_bytes)} free"
    return Choice(
        SHARED_MEMORY,
        f"weights: {NAMES[SHARED_MEMORY]}, as publisher and {readers} are on one node ({sizes})",
    )


def _obstacle(config: WeightsConfig, facts: Facts) -> str | None:
    """What keeps weights from going through shared memory, if anything."""
    if facts.num_nodes > 1:
        return f"publisher and readers are on {facts.num_nodes} nodes, and must be on one"
    versions = config.keep_versions + SPARE_VERSIONS
    needed = versions * facts.model_bytes
    if needed > facts.shm_free_bytes:
        return (
            f"/dev/shm has {_size(facts.shm_free_bytes)} free and {_size(needed)} are needed: "
            f"{versions} versions (weights.keep_versions={config.keep_versions} and "
            f"{SPARE_VERSIONS} on their way) of {_size(facts.model_bytes)}"
        )
    return None


def _size(num_bytes: int) -> str:
    """A size as people say it, in the unit in which it is neither long nor zero."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
