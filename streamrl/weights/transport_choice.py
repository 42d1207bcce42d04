"""Which transport a run takes, and the sentence that says why. Pure arithmetic on facts."""

from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.weights.config import AUTO, SHARED_MEMORY, STORE, WeightsConfig

NAMES = {SHARED_MEMORY: "shared memory", STORE: "the object store"}


@dataclass(frozen=True)
class Published:
    """A model that is published: whose it is, bytes of a version, and how many follow it."""

    role: str
    num_bytes: int
    readers: int


@dataclass(frozen=True)
class Facts:
    """What is known of a cluster and a run before anything moves.

    num_nodes: nodes on which publishers and readers may be. max_staleness: versions that tokens may
    be old when they are trained. shm_free_bytes: free in /dev/shm of the publishers' node.
    store_bytes: what Ray's object store may yet take of that.
    """

    num_nodes: int
    published: tuple[Published, ...]
    max_staleness: int
    shm_free_bytes: int
    store_bytes: int = 0

    @property
    def room_bytes(self) -> int:
        """What is left for versions of the weights."""
        return max(0, self.shm_free_bytes - self.store_bytes)

    def lagging(self, model: Published) -> int:
        """Versions that are read though they are no longer kept.

        A reader has one in use. They may be as many versions apart as tokens may be old: who is
        further behind samples nothing that is trained.
        """
        return min(model.readers, self.max_staleness + 1)


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
    num_readers = sum(model.readers for model in facts.published)
    readers = f"{num_readers} reader{'s' * (num_readers != 1)}"
    return Choice(
        SHARED_MEMORY,
        f"weights: {NAMES[SHARED_MEMORY]}, as publisher and {readers} are on one node, "
        f"{_has(facts)} and {_needs(config, facts)}",
    )


def shares(config: WeightsConfig, facts: Facts) -> dict[str, int]:
    """Bytes of shared memory that each published model may take: all there are, as they need."""
    needs = _needed(config, facts)
    total = sum(needs.values())
    return {role: facts.room_bytes * need // total for role, need in needs.items()}


def _obstacle(config: WeightsConfig, facts: Facts) -> str | None:
    """What keeps weights from going through shared memory, if anything."""
    if why := many_nodes(facts.num_nodes):
        return why
    if sum(_needed(config, facts).values()) > facts.room_bytes:
        return f"{_has(facts)} and {_needs(config, facts)}"
    return None


def many_nodes(num_nodes: int) -> str:
    """What keeps weights from going through shared memory on so many nodes; empty on one."""
    one = num_nodes == 1
    return "" if one else f"publisher and readers are on {num_nodes} nodes, and must be on one"


def _needed(config: WeightsConfig, facts: Facts) -> dict[str, int]:
    """Bytes of all versions of each model that are there at once: kept, laid and still read."""
    return {
        model.role: (config.keep_versions + 1 + facts.lagging(model)) * model.num_bytes
        for model in facts.published
    }


def _has(facts: Facts) -> str:
    has = f"/dev/shm has {_size(facts.room_bytes)}"
    if not facts.store_bytes:
        return has
    return f"{has} = {_size(facts.shm_free_bytes)} - {_size(facts.store_bytes)} of Ray's own store"


def _needs(config: WeightsConfig, facts: Facts) -> str:
    terms = " + ".join(
        f"(weights.keep_versions={config.keep_versions} + 1 laid + {facts.lagging(model)} read)"
        f" x {_size(model.num_bytes)} of {model.role}"
        for model in facts.published
    )
    return f"{_size(sum(_needed(config, facts).values()))} are needed = {terms}"


def _size(num_bytes: int) -> str:
    """A size as people say it, in the unit in which it is neither long nor zero."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
