"""Versions of the weights: the newest one, the one that each follower serves, and what they cost.

The publisher adds versions to a registry; a follower loads them and serves one at a time.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from streamrl.errors import LogprobCheckError, WeightsError
from streamrl.weights.broadcast_tree import BroadcastTree
from streamrl.weights.manifest import WeightManifest


class PullTurns:
    """Queue of nodes, each with its waiting readers; the readers of a node wake together."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, set[asyncio.Future[None]]] = OrderedDict()
        self._woken_nodes: set[str] = set()
        """Woken nodes of which no reader has run yet: each is about to use a free turn."""

    async def wait_for_turn(self, node: str, *, until_s: float) -> None:
        """Wait until the node is woken, or until `until_s` (event loop time)."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(node, set()).add(future)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await future
        finally:
            readers = self._waiting.get(node, set())
            readers.discard(future)
            self._woken_nodes.discard(node)
            if node in self._waiting and not readers:
                del self._waiting[node]

    def wake_nodes(self, num_turns: int) -> None:
        """Wake the first nodes, one for each free turn; nodes that are awake already count."""
        while self._waiting and len(self._woken_nodes) < num_turns:
            self._wake_first_node()

    def wake_all(self) -> None:
        while self._waiting:
            self._wake_first_node()

    def _wake_first_node(self) -> None:
        node, readers = self._waiting.popitem(last=False)
        self._woken_nodes.add(node)
        for future in readers:
            if not future.done():
                future.set_result(None)


MAX_NAMED_PARAMETERS = 3  # in an error message
LOAD_REFUSED = "weights_refused"
FALLBACK_USED = "weights_detour"
NOT_LOADED = "weights_not_loaded"


@dataclass(frozen=True)
class LoadVerification:
    """Comparison of a model's parameters with the published ones after a version was loaded.

    num_compared: parameters that could be compared; 0 if none. differing_names: checkpoint names of
    parameters whose values differ. warnings: the engine's own warnings about weights that it did
    not load.
    """

    num_compared: int = 0
    differing_names: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def raise_on_difference(self, holder: str) -> None:
        """Raise LogprobCheckError if a loaded parameter differs from its published value.

        `holder` names the generator or scorer in the error.
        """
        if self.differing_names:
            num_more = max(0, len(self.differing_names) - MAX_NAMED_PARAMETERS)
            names = ", ".join(
                self.differing_names[:MAX_NAMED_PARAMETERS]
            ) + f" and {num_more} more" * bool(num_more)
            engine_warnings = f"; vLLM says: {'; '.join(self.warnings)}" if self.warnings else ""
            raise LogprobCheckError(
                f"{holder} holds parameters that differ from the published ones: {names}."
                f" Training would use wrong log-probabilities{engine_warnings}"
            )


@dataclass(frozen=True)
class WeightLoadStats:
    """Cost and outcome of loading a version of the weights into a model.

    pause_s: seconds in which the model did not compute. num_interrupted: running rollouts that
    continue under the new version. copied_bytes: bytes of weights copied, including cast or merged
    ones; all other weights are used in place. verification: comparison with the published
    parameters.
    """

    pause_s: float = 0.0
    num_interrupted: int = 0
    copied_bytes: int = 0
    verification: LoadVerification = LoadVerification()


class ServedVersion:
    """Record of the version that one generator or scorer (`holder`) serves; tasks can wait for one.

    Loads nothing: the loader calls `advance_to`. Use from a single event loop. Version -1 means no
    weights yet. A followed model may skip versions of the policy (publish_every):
    `resolve_due_version` maps a policy version to the newest published version of that model.
    """

    def __init__(
        self,
        holder: str,
        version: int = -1,
        *,
        resolve_due_version: Callable[[int], int] = lambda version: version,
    ) -> None:
        self._resolve_due_version = resolve_due_version
        self.holder = holder
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
                f"{self.holder} holds version {self._version}: cannot switch to version {version}"
            )
        self._version = version
        changed, self._version_changed = self._version_changed, asyncio.Event()
        changed.set()

    async def wait_for_version(self, version: int) -> int:
        """Wait until the holder serves the weights due at policy version `version`, or newer ones.

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
    """Cost of one pull: a reader fetches a version of the weights and loads it.

    - pull_s: seconds from learning of the version until serving it.
    - pause_s: seconds without sampling.
    - num_bytes: bytes received.
    - num_interrupted: rollouts that ran while the version was loaded.
    - logprob_diff: largest difference of a log-probability from the trainer's; NaN if not checked.
    - fallback_reason: why the fallback transport was used; empty if not used.
    - copied_bytes: bytes copied within processes, from the trainer's to the served tensors; NaN if
      unknown.
    - warnings: the engine's warnings about weights that it did not load.
    """

    pull_s: float = 0.0
    pause_s: float = 0.0
    num_bytes: int = 0
    num_interrupted: int = 0
    logprob_diff: float = math.nan
    fallback_reason: str = ""
    copied_bytes: float = math.nan
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class WeightFault:
    """Version that a reader could not load as intended, and the reason."""

    version: int
    reason: str


@dataclass(frozen=True)
class ReaderState:
    """State that a reader reports: the version it serves and its node.

    pull, fault: statistics of the last pull and reason of the last failed pull, each reported once.
    """

    version: int
    pull: PullStats | None = None
    fault: WeightFault | None = None
    node: str = ""


@dataclass(frozen=True)
class SyncStats:
    """Publishes and pulls of one model's weights during an interval.

    publish_s: longest publish in seconds, NaN without any. max_version_lag: versions that the
    slowest reader is behind. num_faults: failed publishes and pulls since the run began.
    """

    pulls: Sequence[PullStats]
    publish_s: float
    max_version_lag: int
    num_faults: int


class WeightRegistry:
    """Rendezvous of a model's publisher and readers; holds manifests, never weights.

    The last `keep_versions` manifests stay, so that a reader in the middle of a pull keeps its
    buckets when the next version arrives.
    """

    def __init__(
        self,
        *,
        keep_versions: int,
        on_fault: Callable[[str, str, WeightFault], None] = lambda kind, reader, fault: None,
        broadcast_tree: BroadcastTree | None = None,
    ) -> None:
        """Create a registry.

        `on_fault(kind, reader, fault)` is called for every failed pull (kind LOAD_REFUSED), every
        pull through the fallback transport (FALLBACK_USED), and weights that an engine did not load
        (NOT_LOADED). `broadcast_tree` limits which nodes pull at a time.
        """
        self._keep_versions = keep_versions
        self._on_fault = on_fault
        self._broadcast_tree = broadcast_tree
        self._manifests: list[WeightManifest] = []
        self._version_published = asyncio.Event()
        self._pull_turns = PullTurns()
        self._reader_versions: dict[str, int] = {}
        self._publish_durations_s: list[float] = []
        self._pulls: list[PullStats] = []
        self._num_faults = 0

    @property
    def version(self) -> int:
        """Newest published version; -1 before the first."""
        return self._manifests[-1].version if self._manifests else -1

    @property
    def readers(self) -> list[str]:
        """Names of all current readers, sorted."""
        return sorted(self._reader_versions)

    def add_manifest(self, manifest: WeightManifest, *, publish_s: float = 0.0) -> None:
        """Add a published version, or replace the newest one if it was published again.

        Raises WeightsError if the version is older than the newest.
        """
        if manifest.version < self.version:
            raise WeightsError(f"version {manifest.version} was published after {self.version}")
        older = [m for m in self._manifests if m.version < manifest.version]
        self._manifests = [*older, manifest][-self._keep_versions :]
        if self._broadcast_tree is not None:
            self._broadcast_tree.num_bytes = manifest.num_bytes
        self._publish_durations_s.append(publish_s)
        self._version_published.set()
        self._pull_turns.wake_all()

    def count_fault(self) -> None:
        """Count a failed attempt to publish, for the metrics."""
        self._num_faults += 1

    async def wait_for_newer(
        self, reader: str, state: ReaderState, *, wait_s: float
    ) -> WeightManifest | None:
        """Wait up to `wait_s` for a version newer than the reader's; return its manifest or None.

        Records `state`, the reader's report, for the statistics first. The broadcast tree may delay
        the pull.
        """
        self._record_state(reader, state)
        try:
            async with asyncio.timeout(wait_s):
                while self.version <= state.version:
                    self._version_published.clear()
                    await self._version_published.wait()
                if reader in self._reader_versions:  # a reader that died must take no turn
                    await self._start_pull(state.node)
        except TimeoutError:
            return None
        return self._manifests[-1] if reader in self._reader_versions else None

    async def _start_pull(self, node: str) -> None:
        """Wait until the broadcast tree lets a reader on a node pull the newest version."""
        tree, clock = self._broadcast_tree, asyncio.get_running_loop().time
        try:
            while tree is not None and not tree.try_start_pull(node, self.version, clock()):
                await self._pull_turns.wait_for_turn(node, until_s=tree.find_next_deadline())
        finally:
            self._wake_waiting_nodes()  # this reader may have left after it was woken

    def _wake_waiting_nodes(self) -> None:
        """Wake as many waiting nodes as may start a pull now."""
        if self._broadcast_tree is not None:
            now_s = asyncio.get_running_loop().time()
            self._pull_turns.wake_nodes(self._broadcast_tree.count_free_slots(now_s))

    def remove_reader(self, reader: str) -> None:
        """Forget a reader that left, so that the version lag no longer includes it."""
        self._reader_versions.pop(reader, None)

    def _record_state(self, reader: str, state: ReaderState) -> None:
        """Record a reader's version and pull, report its faults, and update the broadcast tree."""
        self._reader_versions[reader] = state.version
        if state.pull is not None:
            self._pulls.append(state.pull)
            if state.pull.fallback_reason:
                self._on_fault(
                    FALLBACK_USED, reader, WeightFault(state.version, state.pull.fallback_reason)
                )
            for warning in state.pull.warnings:
                self._on_fault(NOT_LOADED, reader, WeightFault(state.version, warning))
        if state.fault is not None:
            self._num_faults += 1
            self._on_fault(LOAD_REFUSED, reader, state.fault)
        if self._broadcast_tree is not None and state.fault is not None:
            self._broadcast_tree.remove_node(state.node)
        elif self._broadcast_tree is not None:
            self._broadcast_tree.mark_pulled(state.node, state.version)
        self._wake_waiting_nodes()

    def drain_stats(self) -> SyncStats:
        """Return the statistics of publishes and pulls since the last call."""
        pulls, self._pulls = self._pulls, []
        publish_s = max(self._publish_durations_s, default=math.nan)
        self._publish_durations_s = []
        served_versions = [version for version in self._reader_versions.values() if version >= 0]
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
