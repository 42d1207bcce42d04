"""Choice of the weights' transport, with a reason for the user. Pure arithmetic on given facts."""

import math
from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.weights.config import (
    AUTO,
    COLLECTIVE,
    OBJECT_STORE,
    SHARED_MEMORY,
    WeightsConfig,
)

TRANSPORT_LABELS = {
    SHARED_MEMORY: "shared memory",
    OBJECT_STORE: "object store",
    COLLECTIVE: "collective",
}


@dataclass(frozen=True)
class PublishedModel:
    """A published model: role, bytes per version, and number of readers."""

    role: str
    num_bytes: int
    num_readers: int


@dataclass(frozen=True)
class TransportFacts:
    """Facts about a cluster and a run that decide the transport.

    num_nodes: nodes that may hold publishers or readers. max_staleness: largest staleness of a
    trained token, in versions. shm_free_bytes: free bytes in /dev/shm on the publishers' node.
    object_store_bytes: bytes of `shm_free_bytes` that Ray's object store may still claim.
    num_gpus: GPUs that the models compute on. shares_gpus: several processes of the run use the
    same GPU. copied_roles: roles of which the collective transport copies every version to the
    object store. node_store_bytes: size of the smallest object store of a node. queue_bytes: bytes
    of a node's object store that the queue may fill.
    """

    num_nodes: int
    models: tuple[PublishedModel, ...]
    max_staleness: int
    shm_free_bytes: int
    object_store_bytes: int = 0
    num_gpus: int = 0
    shares_gpus: bool = False
    copied_roles: frozenset[str] = frozenset()
    node_store_bytes: float = math.inf
    queue_bytes: int = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of shared memory left for versions of the weights."""
        return max(0, self.shm_free_bytes - self.object_store_bytes)

    def count_lagging_versions(self, model: PublishedModel) -> int:
        """Return how many dropped versions of `model` its readers may still hold in shared memory.

        Each reader holds a version. Versions in use span at most max_staleness + 1: a reader
        further behind samples tokens that are too stale to train.
        """
        return min(model.num_readers, self.max_staleness + 1)


def choose_transport(config: WeightsConfig, facts: TransportFacts) -> tuple[str, str]:
    """Return the configured transport, or for auto the fastest that is possible.

    Also returns the reason, a line for the user, with the memory that the choice takes where that
    is much. Raises ConfigError, with the arithmetic, if the configured transport is impossible.
    """
    transport, reason = _choose_transport(config, facts)
    notes = (
        _describe_staging(config, facts, transport),
        _describe_spilling(config, facts, transport),
    )
    return transport, "; ".join([reason, *filter(None, notes)])


def _choose_transport(config: WeightsConfig, facts: TransportFacts) -> tuple[str, str]:
    if config.on_device and not facts.models:
        raise ConfigError(
            "weights.on_device=true has no effect: this placement publishes no weights between"
            " processes. Remove it."
        )
    if config.on_device:
        return _choose_on_device(config, facts)
    obstacle = _find_obstacle(config, facts)
    if config.transport == SHARED_MEMORY and obstacle:
        raise ConfigError(f"weights.transport=shared_memory: {obstacle}")
    if config.transport == COLLECTIVE and facts.num_gpus and facts.shares_gpus:
        raise ConfigError(
            "weights.transport=collective: NCCL needs a GPU for each process, but processes of this"
            " placement share GPUs: remove weights.transport, or choose store"
        )
    if config.transport != AUTO:
        name = TRANSPORT_LABELS.get(config.transport, config.transport)
        return config.transport, f"weights: {name} (set by weights.transport)"
    if facts.num_nodes > 1 and facts.num_gpus and not facts.shares_gpus:
        return COLLECTIVE, (
            f"weights: collective (publisher and readers have a GPU each, on {facts.num_nodes}"
            " nodes)"
        )
    if obstacle:
        reason = f"{TRANSPORT_LABELS[SHARED_MEMORY]} {obstacle}"
        return OBJECT_STORE, f"weights: {TRANSPORT_LABELS[OBJECT_STORE]} ({reason})"
    num_readers = sum(model.num_readers for model in facts.models)
    readers = f"{num_readers} reader{'s' * (num_readers != 1)}"
    return (
        SHARED_MEMORY,
        f"weights: {TRANSPORT_LABELS[SHARED_MEMORY]} (publisher and {readers} are on one node;"
        f" {_describe_needed_memory(config, facts)}; {_describe_capacity(facts)})",
    )


def _choose_on_device(config: WeightsConfig, facts: TransportFacts) -> tuple[str, str]:
    """Return the transport with buckets on devices. Raise ConfigError on shared GPUs."""
    if facts.num_gpus and facts.shares_gpus:
        raise ConfigError(
            "weights.on_device=true: NCCL needs a GPU for each process, but processes of this"
            f" placement share GPUs ({facts.num_nodes} nodes, {facts.num_gpus} GPUs). Remove"
            " weights.on_device"
        )
    where = "GPUs" if facts.num_gpus else "processes (no GPUs: buckets are in host memory)"
    return (
        COLLECTIVE,
        f"weights: collective between {where}; each holds one more copy of the weights",
    )


def divide_shared_memory(config: WeightsConfig, facts: TransportFacts) -> dict[str, int]:
    """Return the bytes of shared memory that each published model may use, by role.

    The available bytes are divided in proportion to the models' peak needs.
    """
    needs = _count_needed_bytes(config, facts)
    total = sum(needs.values())
    return {role: facts.capacity_bytes * need // total for role, need in needs.items()}


def _find_obstacle(config: WeightsConfig, facts: TransportFacts) -> str | None:
    """Return the reason why the shared memory transport is impossible, or None."""
    if obstacle := describe_node_obstacle(facts.num_nodes):
        return obstacle
    if sum(_count_needed_bytes(config, facts).values()) > facts.capacity_bytes:
        return f"{_describe_needed_memory(config, facts)}; {_describe_capacity(facts)}"
    return None


def describe_node_obstacle(num_nodes: int) -> str:
    """Return why shared memory cannot serve `num_nodes` nodes; empty for a single node."""
    if num_nodes == 1:
        return ""
    return f"needs one node; publisher and readers are on {num_nodes}"


def _count_needed_bytes(config: WeightsConfig, facts: TransportFacts) -> dict[str, int]:
    """Return the peak shared memory of each model, in bytes by role.

    The peak consists of the versions kept, the version being written, and those that readers still
    hold.
    """
    return {
        model.role: (config.keep_versions + 1 + facts.count_lagging_versions(model))
        * model.num_bytes
        for model in facts.models
    }


def _describe_staging(config: WeightsConfig, facts: TransportFacts, transport: str) -> str:
    """Return the pinned host memory of the collective transport between GPUs; empty for others."""
    if transport != COLLECTIVE or not facts.num_gpus or config.on_device:
        return ""
    sizes = ", ".join(f"{_format_size(model.num_bytes)} of {model.role}" for model in facts.models)
    return sizes and f"publisher and readers keep in pinned host memory: {sizes}"


def _describe_spilling(config: WeightsConfig, facts: TransportFacts, transport: str) -> str:
    """Return a sum if versions and the queue may exceed a node's object store; else empty.

    The collective transport copies a version of every model to the store when readers change.
    """
    if transport not in (OBJECT_STORE, COLLECTIVE) or not facts.models:
        return ""
    num_bytes, terms = facts.queue_bytes, []
    for model in facts.models:
        count, versions = 1, "1 for new readers"
        if transport != COLLECTIVE or model.role in facts.copied_roles:
            count = config.keep_versions + 1
            versions = f"({config.keep_versions} kept + 1 being written)"
        num_bytes += count * model.num_bytes
        terms.append(f"{versions} x {_format_size(model.num_bytes)} of {model.role}")
    if num_bytes <= facts.node_store_bytes:
        return ""
    return (
        f"Ray may spill to disk: needs {_format_size(num_bytes)} = {' + '.join(terms)} +"
        f" {_format_size(facts.queue_bytes)} of the queue; a node's object store has"
        f" {_format_size(facts.node_store_bytes)}: raise placement.object_store_mb, or"
        " `ray start --object-store-memory` of a cluster"
    )


def _describe_capacity(facts: TransportFacts) -> str:
    capacity = f"/dev/shm has {_format_size(facts.capacity_bytes)}"
    if not facts.object_store_bytes:
        return capacity
    return (
        f"{capacity} = {_format_size(facts.shm_free_bytes)} free -"
        f" {_format_size(facts.object_store_bytes)} for Ray's object store"
    )


def _describe_needed_memory(config: WeightsConfig, facts: TransportFacts) -> str:
    terms = " + ".join(
        f"({config.keep_versions} kept + 1 being written +"
        f" {facts.count_lagging_versions(model)} being read)"
        f" x {_format_size(model.num_bytes)} of {model.role}"
        for model in facts.models
    )
    return f"needs {_format_size(sum(_count_needed_bytes(config, facts).values()))} = {terms}"


def _format_size(num_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
