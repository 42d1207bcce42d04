"""The settings of weight sync."""

from dataclasses import dataclass

from streamrl.errors import ConfigError

AUTO = "auto"
OBJECT_STORE = "store"
SHARED_MEMORY = "shared_memory"
COLLECTIVE = "collective"
DISK = "disk"
DELTA = "delta"
TRANSPORTS = (AUTO, OBJECT_STORE, SHARED_MEMORY, COLLECTIVE, DISK, DELTA)
ON_UPDATE_MODES = ("interrupt", "drain")
KV_CACHE_MODES = ("recompute", "keep")
EXACT_LOGPROB_LIMIT = 1e-3
ROUNDED_LOGPROB_LIMIT = 1.0
MAX_BUCKET_MB = 4096


@dataclass
class WeightsConfig:
    """How versions of the weights travel, and when."""

    #: What they travel through: store (Ray's object store), shared_memory (one node), collective (a
    #: broadcast to all who follow), disk (a directory per version, for other engines too), delta
    #: (through the store, only what has changed), or auto, which takes shared memory where there is
    #: one node and the store elsewhere, and says so.
    transport: str = AUTO
    #: A version is published after every so many steps; the others are sampled by the last one.
    publish_every: int = 1
    #: What a new version does to running rollouts: interrupt goes on with them under the new
    #: weights; drain lets them end under the old ones, and begins none meanwhile.
    on_update: str = "interrupt"
    #: Keys and values of rollouts that are interrupted: computed anew, or kept as the old weights
    #: made them.
    kv: str = "recompute"
    #: With the first three and then every so many published versions generators compare the
    #: log-probabilities of a fixed batch with the trainer's; 0 for never.
    probe_every: int = 20
    #: Largest difference of a log-probability that a probe lets pass. Unset: 1e-3 where trainer and
    #: generator compute in float32, else 1. Needs `probe_every`.
    probe_limit: float | None = None
    #: Size of a bucket, MB, at most 4096. A larger tensor gets a bucket of its own.
    bucket_mb: int = 64
    #: How many of the newest versions the publisher keeps for those who are still pulling.
    keep_versions: int = 2

    def __post_init__(self) -> None:
        for key, allowed in (
            ("transport", TRANSPORTS),
            ("on_update", ON_UPDATE_MODES),
            ("kv", KV_CACHE_MODES),
        ):
            if vars(self)[key] not in allowed:
                raise ConfigError(
                    f"weights.{key}={vars(self)[key]}: must be one of {', '.join(allowed)}"
                )
        for key in ("publish_every", "bucket_mb", "keep_versions"):
            if vars(self)[key] < 1:
                raise ConfigError(f"weights.{key}={vars(self)[key]}: must be at least 1")
        if self.bucket_mb > MAX_BUCKET_MB:
            raise ConfigError(
                f"weights.bucket_mb={self.bucket_mb}: must be at most {MAX_BUCKET_MB}"
            )
        if self.probe_every < 0:
            raise ConfigError(f"weights.probe_every={self.probe_every}: must be 0 or more")
        if self.probe_limit is not None and self.probe_limit <= 0:
            raise ConfigError(f"weights.probe_limit={self.probe_limit}: must be above 0")
        if self.probe_limit is not None and not self.probe_every:
            raise ConfigError(
                f"weights.probe_limit={self.probe_limit}: nothing is probed with"
                " weights.probe_every=0"
            )
        if self.on_update == "drain" and self.kv == "keep":
            raise ConfigError(
                "weights.kv=keep: nothing runs through an update under weights.on_update=drain"
            )

    def resolve_probe_limit(self, *, exact: bool) -> float:
        """What a probe lets pass; `exact` is whether both sides compute in float32."""
        if self.probe_limit is not None:
            return self.probe_limit
        return EXACT_LOGPROB_LIMIT if exact else ROUNDED_LOGPROB_LIMIT

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes."""
        return self.bucket_mb << 20
