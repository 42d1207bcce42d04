"""Versions of the weights: manifests, the newest version, and the one that each follower serves.

A version travels in buckets: runs of bytes, each large enough to amortize the cost per object and
small enough that a copy fits anywhere. The publisher adds the manifest of a version to a registry;
a follower loads versions and serves one at a time.

Checksums prove that the bytes arrived. The logprob check proves that the bytes became the model: no
layer was left out, swapped, or read in a wrong layout.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from streamrl.errors import LogprobCheckError, WeightsError
from streamrl.messages import Array
from streamrl.weights.rank_slices import Readers, SliceLayout

SEQUENCE_LENGTHS = (64, 64, 64, 512)
"""Tokens per sequence, capped by the rollout length. The last is longer than the attention windows
that are common in small models.
"""
NUM_SEQUENCES = len(SEQUENCE_LENGTHS)
SAME_PARAMETERS_HINT = (
    ". Their parameters were compared and are equal, so the computation differs: check"
    " attention (trainer.attention), positions, experts and dtype (generator.dtype)"
)
CHECKED_QUANTILE, QUANTILE_FACTOR, SPREAD_SHARE = 0.9, 2.5, 0.3
"""Limits by measurement: docs/models.md. Rounding to bfloat16 reaches two thirds of them."""
NUM_INITIAL_CHECKS = 3
"""Publishes checked at the start of a run: the model as loaded, and the first updates, which change
every trained parameter.
"""


def is_logprob_check_due(count: int, *, every: int) -> bool:
    """Return True if the logprob check follows publish number `count`, counted from 0.

    The first three publishes are checked, then every `every`-th; `every` 0 disables the check.
    """
    return bool(every) and (count < NUM_INITIAL_CHECKS or count % every == 0)


@dataclass(frozen=True, eq=False)
class LogprobCheck:
    """Sequences of token ids, int32 [T] each, and the trainer's logprob per token, float32 [T].

    limit: nats by which the tokens may differ on average; 90 % may differ by QUANTILE_FACTOR times
    as much, and a few by more: where rounding flips the choice of an expert. Where logprobs are
    spread by more than 1 / SPREAD_SHARE nats, logits are large, and rounding and limit grow with
    them. The first token of a sequence has no logprob: a one-token sequence compares nothing.
    """

    sequences: Sequence[Array]
    logprobs: Sequence[Array]
    limit: float

    def compare_logprobs(
        self, logprobs: Sequence[Array], follower: str, *, same_parameters: bool = False
    ) -> float:
        """Return the largest difference, in nats, between a follower's logprobs and the trainer's.

        `logprobs`: the follower's, an array for each sequence. `follower` names the model in the
        error; `same_parameters`: its parameters are known to equal the trainer's. Raises
        LogprobCheckError if the differences exceed `limit` or one is NaN.
        """
        pairs = zip(self.logprobs, logprobs, strict=True)
        differences = np.concatenate([np.abs(ours[1:] - theirs[1:]) for ours, theirs in pairs])
        if not differences.size:
            return 0.0
        spread = np.concatenate([ours[1:] for ours in self.logprobs]).std()
        limit = self.limit * max(1.0, SPREAD_SHARE * float(spread))
        mean, quantile = differences.mean(), np.quantile(differences, CHECKED_QUANTILE)
        # A NaN exceeds every limit.
        if not (mean <= limit and quantile <= QUANTILE_FACTOR * limit):
            raise LogprobCheckError(
                f"{follower} gives log-probabilities that differ from the trainer's by {mean:.3g}"
                f" nats on average, and by {quantile:.3g} or more in a tenth of the tokens: with"
                f" weights.probe_limit={self.limit:g} these may be {limit:.3g} and"
                f" {QUANTILE_FACTOR * limit:.3g}. Generator and trainer do not compute the same"
                " model, so training would be wrong"
                f"{SAME_PARAMETERS_HINT if same_parameters else ''}"
            )
        return float(differences.max())


def make_check_sequences(*, vocab_size: int, max_length: int) -> list[Array]:
    """Return the token sequences of the logprob check: random, the same for every version.

    `max_length`: longest rollout in tokens.
    """
    rng = np.random.default_rng(0)
    lengths = [min(length, max_length - 1) for length in SEQUENCE_LENGTHS]
    return [rng.integers(0, vocab_size, length, np.int32) for length in lengths]


@dataclass(frozen=True)
class TensorSlot:
    """Place of a tensor in a bucket: `num_bytes` bytes from byte `offset` on; and its metadata."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """First byte after the tensor."""
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class WeightBucket:
    """Contents of a bucket: its tensors' slots, its size, and the checksum of all its bytes.

    Gaps between slots are zeros.
    """

    slots: tuple[TensorSlot, ...]
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class WeightManifest:
    """Buckets of a version and, for each bucket, the transport's handle by which readers fetch it.

    If `logprob_check` is set, followers compare their log-probabilities with the trainer's.
    rank_manifests: of the same version, for each rank of split generators its slices; empty if none
    takes them. slice_checksums: in a rank's manifest, of the same slices of the whole tensors, by
    name; only for the first versions.
    """

    version: int
    buckets: tuple[WeightBucket, ...]
    handles: tuple[Any, ...]
    logprob_check: LogprobCheck | None = None
    rank_manifests: "tuple[WeightManifest, ...]" = ()
    slice_checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes that one pull of this version moves."""
        return sum(bucket.num_bytes for bucket in self.buckets)


MAX_NAMED_PARAMETERS = 3  # in an error message
LOAD_REFUSED = "weights_refused"
FALLBACK_USED = "weights_detour"
NOT_LOADED = "weights_not_loaded"


@dataclass(frozen=True)
class LoadVerification:
    """Comparison of a model's parameters with the published ones after a version was loaded.

    num_compared: parameters that were compared, or that are views or copies of the published ones
    by construction; 0 if none. differing_names: checkpoint names of parameters whose values differ.
    warnings: the engine's own warnings about weights that it did not load.
    """

    num_compared: int = 0
    differing_names: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def raise_on_difference(self, subject: str) -> None:
        """Raise LogprobCheckError if a loaded parameter differs from its published value.

        `subject` names the follower in the error.
        """
        if self.differing_names:
            num_more = max(0, len(self.differing_names) - MAX_NAMED_PARAMETERS)
            names = ", ".join(
                self.differing_names[:MAX_NAMED_PARAMETERS]
            ) + f" and {num_more} more" * bool(num_more)
            engine_warnings = f"; vLLM says: {'; '.join(self.warnings)}" if self.warnings else ""
            raise LogprobCheckError(
                f"{subject} holds parameters that differ from the published ones: {names}."
                f" Training would use wrong log-probabilities{engine_warnings}"
            )


@dataclass(frozen=True)
class WeightLoadStats:
    """Cost and outcome of loading a version of the weights into a model.

    pause_s: seconds in which the model did not compute. num_interrupted: running rollouts that
    continue under the new version. copied_bytes: bytes of weights copied, including cast or merged
    ones; all other weights are used in place. verification: comparison with the published
    parameters. layouts: what each rank of a split generator reads; empty if it is unknown or
    everything.
    """

    pause_s: float = 0.0
    num_interrupted: int = 0
    copied_bytes: int = 0
    verification: LoadVerification = LoadVerification()
    layouts: Sequence[SliceLayout] = ()


class ServedVersion:
    """Record of the version that the process `follower` serves; its tasks can wait for one.

    Loads nothing: the loader calls `advance_to`. Use from a single event loop. Version -1 means no
    weights yet. A followed model may skip versions of the policy (publish_every):
    `resolve_due_version` maps a policy version to the newest published version of that model.
    """

    def __init__(
        self,
        follower: str,
        version: int = -1,
        *,
        resolve_due_version: Callable[[int], int] = lambda version: version,
    ) -> None:
        self._resolve_due_version = resolve_due_version
        self.follower = follower
        self._version = version
        self._version_changed = asyncio.Event()

    @property
    def version(self) -> int:
        return self._version

    def advance_to(self, version: int) -> None:
        """Switch to `version` and wake all tasks that wait for it.

        Raises WeightsError unless `version` is newer than the served version.
        """
        if version <= self._version:
            raise WeightsError(
                f"{self.follower} serves version {self._version}: cannot switch to {version}"
            )
        self._version = version
        changed, self._version_changed = self._version_changed, asyncio.Event()
        changed.set()

    async def wait_for_version(self, version: int) -> int:
        """Wait until the follower serves the weights due at policy version `version`, or newer.

        Returns the served version. Deliberately without a timeout: a resumed run may repeat any
        number of steps before that version exists. Two other timeouts bound the wait: the trainer's
        for producing the version, and the RPC timeouts of the process that loads it, after which
        this process ends too.
        """
        while self._version < self._resolve_due_version(version):
            await self._version_changed.wait()
        return self._version


@dataclass(frozen=True)
class PullStats:
    """Cost of one pull: a follower fetches a version of the weights and loads it.

    - pull_s: seconds from learning of the version until serving it.
    - pause_s: seconds without sampling.
    - num_bytes: bytes received.
    - num_interrupted: rollouts that ran while the version was loaded.
    - logprob_diff: largest difference of a log-probability from the trainer's; NaN if not checked.
    - fallback_reason: why the fallback transport was used; empty if not used.
    - copied_bytes: bytes copied within processes, from the trainer's to the served tensors; NaN if
      unknown.
    - warnings: the engine's warnings about weights that it did not load.
    - layouts: as in `WeightLoadStats`.
    """

    pull_s: float = 0.0
    pause_s: float = 0.0
    num_bytes: int = 0
    num_interrupted: int = 0
    logprob_diff: float = math.nan
    fallback_reason: str = ""
    copied_bytes: float = math.nan
    warnings: Sequence[str] = ()
    layouts: Sequence[SliceLayout] = ()


@dataclass(frozen=True)
class WeightFault:
    """Version that a follower could not load as intended, and the reason."""

    version: int
    reason: str


@dataclass(frozen=True)
class FollowerState:
    """State that a follower reports: the version it serves.

    pull, fault: statistics of the last pull and reason of the last failed pull, each reported once.
    """

    version: int
    pull: PullStats | None = None
    fault: WeightFault | None = None


class FollowerProtocol(Protocol):
    """A model kept equal to a trained model.

    In a run: `GenerationEngine`, `FollowerScorer`, and `SharedWeights` on devices that trainer and
    generator share.
    """

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        """Replace the model's weights by the tensors of `version`.

        Raises WeightsError and keeps the old version on failure.
        """
        ...

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array] | None:
        """Return the model's logprob of each token of each sequence.

        sequences: token ids, int32 [T] each. Returns float32 [T] per sequence, 0 for its first
        token, or None if the model computes no logprobs, such as a critic.
        """
        ...


@dataclass(frozen=True)
class FetchedWeights:
    """Weights of one version as a follower has fetched them.

    num_bytes: bytes transferred.
    fallback_reason: reason for using another transport than configured; "" if none was needed.
    copied_bytes: bytes copied within processes on the way; NaN if unknown.
    """

    tensors: Mapping[str, Any]
    num_bytes: int = 0
    fallback_reason: str = ""
    copied_bytes: float = math.nan


class WeightChannel(Protocol):
    """Connection of a follower to the versions that its trainer publishes.

    `wait_for_newer` returns the manifest of a version newer than that of `state`, None after
    `wait_s`. In a run: `RemoteWeightChannel`.
    """

    async def wait_for_newer(
        self, state: FollowerState, *, wait_s: float
    ) -> WeightManifest | None: ...

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        """Fetch and verify the tensors of the version of a manifest.

        Raises WeightsError on failure.
        """
        ...


@dataclass(frozen=True)
class SyncStats:
    """Publishes and pulls of one model's weights during an interval.

    publish_s: longest publish in seconds, NaN without any. max_version_lag: versions that the
    slowest follower is behind. num_faults: failed publishes and pulls since the run began.
    """

    pulls: Sequence[PullStats]
    publish_s: float
    max_version_lag: int
    num_faults: int


class WeightRegistry:
    """Rendezvous of a model's publisher and followers; holds manifests, never weights.

    The last `keep_versions` manifests stay, so that a follower in the middle of a pull keeps its
    buckets when the next version arrives.
    """

    def __init__(
        self,
        *,
        keep_versions: int,
        on_fault: Callable[[str, str, WeightFault], None] = lambda kind, follower, fault: None,
    ) -> None:
        """Create a registry.

        `on_fault(kind, follower, fault)` is called for every failed pull (kind LOAD_REFUSED), every
        pull through the fallback transport (FALLBACK_USED), and weights that an engine did not load
        (NOT_LOADED).
        """
        self._keep_versions = keep_versions
        self._on_fault = on_fault
        self._manifests: list[WeightManifest] = []
        self._version_published = asyncio.Event()
        self._follower_versions: dict[str, int] = {}
        self._follower_layouts: dict[str, Sequence[SliceLayout]] = {}
        #: The version that each follower is loading, and when it began by the event loop's clock.
        self.loads: dict[str, tuple[WeightManifest, float]] = {}
        self._publish_durations_s: list[float] = []
        self._pulls: list[PullStats] = []
        self._num_faults = 0

    @property
    def version(self) -> int:
        """Newest published version; -1 before the first."""
        return self._manifests[-1].version if self._manifests else -1

    @property
    def followers(self) -> Readers:
        """All current followers, sorted; with the layouts of ranks that those of now loaded."""
        names = sorted(self._follower_versions)
        return {name: self._follower_layouts.get(name, ()) for name in names}

    def add_manifest(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        """Add a published version, or replace the newest one if it was published again.

        Raises WeightsError if the version is older than the newest.
        """
        if manifest.version < self.version:
            raise WeightsError(f"version {manifest.version} was published after {self.version}")
        older = [m for m in self._manifests if m.version < manifest.version]
        self._manifests = [*older, manifest][-self._keep_versions :]
        self._publish_durations_s.append(publish_s)
        self._version_published.set()

    def count_fault(self) -> None:
        """Count a failed attempt to publish, for the metrics."""
        self._num_faults += 1

    async def wait_for_newer(
        self, follower: str, state: FollowerState, *, wait_s: float
    ) -> WeightManifest | None:
        """Wait up to `wait_s` for a version newer than the follower's; return its manifest or None.

        Records `state`, the follower's report, for the statistics first.
        """
        self._record_state(follower, state)
        try:
            async with asyncio.timeout(wait_s):
                while self.version <= state.version:
                    self._version_published.clear()
                    await self._version_published.wait()
        except TimeoutError:
            return None
        if follower not in self._follower_versions:
            return None
        self.loads[follower] = self._manifests[-1], asyncio.get_running_loop().time()
        return self._manifests[-1]

    def remove_follower(self, follower: str) -> None:
        """Forget a follower that left, so that the version lag no longer includes it."""
        self._follower_versions.pop(follower, None)
        self._follower_layouts.pop(follower, None)
        self.loads.pop(follower, None)

    def _record_state(self, follower: str, state: FollowerState) -> None:
        """Record a follower's version and pull, and report its faults."""
        self._follower_versions[follower] = state.version
        self.loads.pop(follower, None)
        if state.pull is not None:
            self._pulls.append(state.pull)
            # Equal ones become one object, which a message to the trainers contains once.
            same = (own for own in self._follower_layouts.values() if own == state.pull.layouts)
            self._follower_layouts[follower] = next(same, state.pull.layouts)
            if state.pull.fallback_reason:
                self._on_fault(
                    FALLBACK_USED, follower, WeightFault(state.version, state.pull.fallback_reason)
                )
            for warning in state.pull.warnings:
                self._on_fault(NOT_LOADED, follower, WeightFault(state.version, warning))
        if state.fault is not None:
            self._num_faults += 1
            self._on_fault(LOAD_REFUSED, follower, state.fault)

    def drain_stats(self) -> SyncStats:
        """Return the statistics of publishes and pulls since the last call."""
        pulls, self._pulls = self._pulls, []
        publish_s = max(self._publish_durations_s, default=math.nan)
        self._publish_durations_s = []
        served_versions = [version for version in self._follower_versions.values() if version >= 0]
        max_version_lag = self.version - min(served_versions, default=self.version)
        return SyncStats(pulls, publish_s, max_version_lag, self._num_faults)


def compute_weight_metrics(
    policy: SyncStats, shadows: Sequence[SyncStats] = ()
) -> Mapping[str, float]:
    """Return the weights/* metrics of an interval, NaN for unmeasured ones.

    `shadows`: statistics of the other published models, critics and references. Pauses,
    interruptions, copies and logprob checks count for the policy only; the other metrics include
    the shadows.
    """
    models = (policy, *shadows)
    pulls = [pull for model in models for pull in model.pulls]
    seconds = sum(pull.pull_s for pull in pulls)
    num_bytes = sum(pull.num_bytes for pull in pulls)
    copied_bytes = sum(pull.copied_bytes for pull in policy.pulls)
    publish_times_s = [model.publish_s for model in models if not math.isnan(model.publish_s)]
    logprob_diffs = [
        pull.logprob_diff for pull in policy.pulls if not math.isnan(pull.logprob_diff)
    ]
    return {
        "weights/skew_max": max(model.max_version_lag for model in models),
        "weights/publish_s": max(publish_times_s, default=math.nan),
        "weights/pull_s": max((pull.pull_s for pull in pulls), default=0.0),
        "weights/pause_s": max((pull.pause_s for pull in policy.pulls), default=0.0),
        "weights/bytes": num_bytes,
        "weights/copied_bytes": copied_bytes if policy.pulls else math.nan,
        "weights/bytes_per_s": num_bytes / seconds if seconds else math.nan,
        "weights/interrupted": sum(pull.num_interrupted for pull in policy.pulls),
        "weights/probe_diff": max(logprob_diffs, default=math.nan),
        "weights/faults": sum(model.num_faults for model in models),
    }
