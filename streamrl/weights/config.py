"""Settings of weight sync."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from streamrl.files.typed_settings import above, at_least, check_conflicts, one_of

AUTO = "auto"
OBJECT_STORE = "store"
SHARED_MEMORY = "shared_memory"
COLLECTIVE = "collective"
TRANSPORT_MODULES = {
    OBJECT_STORE: "object_store",
    SHARED_MEMORY: "shared_memory",
    COLLECTIVE: "collective",
}
"""Module of `weights/transports` by the value of `weights.transport` that selects it."""
TRANSPORTS = (AUTO, *TRANSPORT_MODULES)
TRANSPORT_LABELS = {name: module.replace("_", " ") for name, module in TRANSPORT_MODULES.items()}
RUN_TOKEN_ENV = "STREAMRL_RUN_TOKEN"
"""Environment variable: distinguishes the shared memory of a run on a machine."""
KV_CACHE_MODES = ("recompute", "keep")
EXACT_LOGPROB_LIMIT = 3e-4
ROUNDED_LOGPROB_LIMIT = 0.1


@dataclass
class WeightsConfig:
    """Transport of the weights, interval of publishing, and effect on running rollouts."""

    bucket_mb: ClassVar[int] = 64
    """Size of a bucket in MB. A larger tensor gets a bucket of its own."""
    keep_versions: ClassVar[int] = 2
    """Newest versions that the publisher keeps for followers that are still pulling."""
    #: Transport of the weights: store (Ray's object store), shared_memory (single node), collective
    #: (broadcast to all followers), or auto: shared memory on a single node, collective on several
    #: whose processes have a GPU each, the store otherwise; the run prints its choice.
    transport: Annotated[str, one_of(*TRANSPORTS)] = AUTO
    #: Training steps per published version; generators keep the last published version in between.
    publish_every: Annotated[int, at_least(1)] = 1
    #: KV cache of running rollouts, which continue under the new weights: recompute it under these,
    #: or keep the entries that the old weights produced.
    kv: Annotated[str, one_of(*KV_CACHE_MODES)] = "recompute"
    #: Published versions per logprob check, in which generators compare the log-probabilities of
    #: fixed sequences with the trainer's. The first three versions are always checked; 0: never.
    probe_every: Annotated[int, at_least(0)] = 20
    #: Largest mean difference of log-probabilities, in nats, that passes the check; nine in ten may
    #: differ by 2.5 times as much, and large logits allow more. Unset: 3e-4 if trainer and
    #: generator both compute in float32, else 0.1. Requires `probe_every`.
    probe_limit: Annotated[float | None, above(0)] = None

    def __post_init__(self) -> None:
        conflict = (
            self.probe_limit is not None and not self.probe_every,
            "probe_limit",
            "has no effect: weights.probe_every=0 disables the check. Remove one of them.",
        )
        check_conflicts(self, [conflict], "weights.")

    def resolve_probe_limit(self, *, exact: bool) -> float:
        """Return the limit of the logprob check, in nats.

        `exact`: trainer and generator both compute in float32; this decides the default of
        `probe_limit`.
        """
        if self.probe_limit is not None:
            return self.probe_limit
        return EXACT_LOGPROB_LIMIT if exact else ROUNDED_LOGPROB_LIMIT

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mb << 20
