"""Which transport a run takes, and the sentence that says why. Pure arithmetic on facts."""

from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.weights.config import AUTO, OBJECT_STORE, SHARED_MEMORY, WeightsConfig

TRANSPORT_LABELS = {SHARED_MEMORY: "shared memory", OBJECT_STORE: "the object store"}


@dataclass(frozen=True)
class PublishedModel:
    """A model that is published: whose it is, bytes of a version, and how many follow it."""

    role: str
    num_bytes: int
    num_readers: int


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of a cluster and a run before anything moves.

    num_nodes: nodes on which publishers and readers may be. max_staleness: versions that tokens may
    be old when they are trained. shm_free_bytes: free in /dev/shm of the publishers' node.
    store_bytes: what Ray's object store may yet take of that.
    """

    num_nodes: int
    models: tuple[PublishedModel, ...]
    max_staleness: int
    shm_free_bytes: int
    object_store_bytes: int = 0

    @property
    def capacity_bytes(self) -> int:
        """What is left for versions of the weights."""
        return max(0, self.shm_free_bytes - self.object_store_bytes)

    def count_lagging_versions(self, model: PublishedModel) -> int:
        """Versions that are read though they are no longer kept.

        A reader has one in use. They may be as many versions apart as tokens may be old: who is
        further behind samples nothing that is trained.
        """
        return min(model.num_readers, self.max_staleness + 1)


@dataclass(frozen=True)
class TransportDecision:
    """A transport (one of TRANSPORTS, never auto) and, in one line for the user, why it is that."""

    transport: str
    reason: str


def choose_transport(config: WeightsConfig, facts: ClusterFacts) -> TransportDecision:
    """The transport that the settings ask for, or for auto the fastest that is possible.

    Raises ConfigError, with the arithmetic, if the one asked for is impossible.
    """
    obstacle = _find_obstacle(config, facts)
    if config.transport == SHARED_MEMORY and obstacle:
        raise ConfigError(f"weights.transport=shared_memory: {obstacle}")
    if config.transport != AUTO:
        name = TRANSPORT_LABELS.get(config.transport, config.transport)
        return TransportDecision(config.transport, f"weights: {name}, as weights.transport says")
    if obstacle:
        return TransportDecision(
            OBJECT_STORE,
            f"weights: {TRANSPORT_LABELS[OBJECT_STORE]}, as for shared memory {obstacle}",
        )
    num_readers = sum(model.num_readers for model in facts.models)
    readers = f"{num_readers} reader{'s' * (num_readers != 1)}"
    return TransportDecision(
        SHARED_MEMORY,
        f"weights: {TRANSPORT_LABELS[SHARED_MEMORY]}, as publisher and {readers} are on one node, "
        f"{_describe_capacity(facts)} and {_describe_demand(config, facts)}",
    )


def divide_shared_memory(config: WeightsConfig, facts: ClusterFacts) -> dict[str, int]:
    """Bytes of shared memory that each published model may take: all there are, as they need."""
    needs = _count_needed_bytes(config, facts)
    total = sum(needs.values())
    return {role: facts.capacity_bytes * need // total for role, need in needs.items()}


def _find_obstacle(config: WeightsConfig, facts: ClusterFacts) -> str | None:
    """What keeps weights from going through shared memory, if anything."""
    if why := describe_node_obstacle(facts.num_nodes):
        return why
    if sum(_count_needed_bytes(config, facts).values()) > facts.capacity_bytes:
        return f"{_describe_capacity(facts)} and {_describe_demand(config, facts)}"
    return None


def describe_node_obstacle(num_nodes: int) -> str:
    """What keeps weights from going through shared memory on so many nodes; empty on one."""
    one = num_nodes == 1
    return "" if one else f"publisher and readers are on {num_nodes} nodes, and must be on one"


def _count_needed_bytes(config: WeightsConfig, facts: ClusterFacts) -> dict[str, int]:
    """Bytes of all versions of each model that are there at once: kept, laid and still read."""
    return {
        model.role: (config.keep_versions + 1 + facts.count_lagging_versions(model))
        * model.num_bytes
        for model in facts.models
    }


def _describe_capacity(facts: ClusterFacts) -> str:
    has = f"/dev/shm has {_format_size(facts.capacity_bytes)}"
    if not facts.object_store_bytes:
        return has
    return (
        f"{has} = {_format_size(facts.shm_free_bytes)} -"
        f" {_format_size(facts.object_store_bytes)} of Ray's own store"
    )


def _describe_demand(config: WeightsConfig, facts: ClusterFacts) -> str:
    terms = " + ".join(
        f"(weights.keep_versions={config.keep_versions} + 1 laid +"
        f" {facts.count_lagging_versions(model)} read)"
        f" x {_format_size(model.num_bytes)} of {model.role}"
        for model in facts.models
    )
    return f"{_format_size(sum(_count_needed_bytes(config, facts).values()))} are needed = {terms}"


def _format_size(num_bytes: int) -> str:
    """A size as people say it, in the unit in which it is neither long nor zero."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
