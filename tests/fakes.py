"""Fake engines, prompts and trainers of a stream that only take time.

Times are virtual seconds (planner/simulator/replicas/virtual_loop.py). Each fake records its work
for assertions.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.buffer.micro_batch_schedule import Round, ScheduledRound, UpdatePlan
from streamrl.data.pass_rates import PassRates
from streamrl.data.replays import ReplayStore
from streamrl.errors import RewardError, ServiceOutageError, StreamError
from streamrl.messages import (
    Array,
    Columns,
    Experience,
    FilteredGroup,
    Prompt,
    columns_to_rollouts,
    make_uid,
    parse_uid,
    rollouts_to_columns,
)
from streamrl.pipeline import hold_devices_per_group
from streamrl.stream.protocols import (
    FinishedCallback,
    SampleFunction,
    StageContext,
)
from streamrl.stream.stage_worker import StageResult
from streamrl.telemetry.spans import SpanRecorder
from streamrl.user_code.service_gate import request_service
from streamrl.weights import WeightLoadStats, WeightManifest
from streamrl.weights.rank_slices import Readers
from streamrl.weights.versions import (
    FetchedWeights,
    FollowerState,
    LogprobCheck,
    WeightBucket,
    WeightRegistry,
)
from tests.rollouts import make_rollout

STREAMED = UpdatePlan()
PROBE = LogprobCheck([np.array([1, 2, 3], np.int32)], [np.full(3, -1.0, np.float32)], limit=0.5)
GROUP_BYTES = 4000
"""Upper bound of the bytes of a group."""


@dataclass
class Plan:
    """Settings, durations and failure rates of a fake run; all randomness comes from `seed`."""

    seed: int = 0
    steps: int = 4
    groups_per_step: int = 4
    group_size: int = 2
    max_staleness: int = 1
    depth: int | None = None
    on_stale: str = "wait"
    on_stall: str = "abort"
    readmits: bool = False
    shards: int = 2
    generators: int = 2
    scorers: int = 1
    dp_size: int = 1
    pace: UpdatePlan = STREAMED
    micro_batch_tokens: int = 40
    generate_s: tuple[float, float] = (0.5, 2.0)
    score_s: tuple[float, float] = (0.1, 0.5)
    train_s: float = 0.3
    pull_s: float = 0.1
    fail_rate: float = 0.0
    filter_rate: float = 0.0
    rows: int = 0
    """Rows of the data, sampled by difficulty, with verdicts by uid; 0: endless prompts."""
    replay_frac: float = 0.0
    replay_size: int = 6
    replay_age: int = 8
    oversample: float | None = 1.0
    max_filtered: float = float("inf")
    max_dropped: float = float("inf")
    duplicate_rate: float = 0.0
    lost_rate: float = 0.0
    """Fraction of shard calls that lose their connection; the call continues in the shard."""
    stuck_attempts: int = 0
    """Number of attempts to score the second prompt that hang in a live process."""
    reference: bool = False
    critic: bool = False
    """A second model is trained on the same groups, and its shadow scores them."""
    slots: int = 0
    """Rollout slots of a generator; enough for three groups if 0."""
    greedy: bool = False
    """Sample a greedy completion besides each group; its score is a column."""
    max_turns: int = 0
    """Most turns of an episode; 0: rollouts have no environment."""
    environment_s: tuple[float, float] = (0.5, 2.0)
    """Time that the environment takes for a turn, s."""
    environment_fail_rate: float = 0.0
    """Fraction of turns in which the environment fails."""
    slow_prompt: str = ""
    """Uid of a prompt whose environment takes a minute for each turn."""
    critic_warmup_steps: int = 0
    """Number of first steps that train only the critic."""
    one_at_a_time: bool = False
    publish_s: float = 0.0
    weight_bytes: int = 0
    publish_every: int = 1
    broken_version: int = -1
    """Version whose served logprobs differ from the trainer's; if set, each version has a probe."""
    probe_s: float = 5.0
    newcomer_pull_s: float = 0.0
    """Extra time of the first pull of a joining or restarted generator, beside `pull_s`."""
    judge_outages: tuple[tuple[float, float], ...] = ()
    """Times between which the service of the reward stage does not answer."""
    tool_outages: tuple[tuple[float, float], ...] = ()
    """Times between which the server of the environment does not answer."""
    stall_s: float = 100.0
    lease_s: float = 60.0
    max_attempts: int = 3
    capacity_steps: float = float("inf")
    """Capacity of a shard in steps of the largest groups: at least one."""


def check_service(outages: Sequence[tuple[float, float]], error: StreamError) -> None:
    """Raise the error within an outage."""
    now = asyncio.get_running_loop().time()
    if any(begin <= now < end for begin, end in outages):
        raise error


class FakePrompts:
    """Endless prompts of three tokens, which are also the code points of their message."""

    def __init__(self, drawn: int = 0, rows: int = 0, replays: ReplayStore | None = None) -> None:
        self.drawn = drawn
        self._rows = rows
        self.pass_rates = PassRates() if rows else None
        self.replays = replays

    def state_dict(self) -> Mapping[str, Any]:
        rates = self.pass_rates and self.pass_rates.state_dict()
        replays = self.replays and self.replays.state_dict()
        return {"drawn": self.drawn, "pass_rates": rates, "replays": replays}

    async def prefetch_prompts(self, count: int) -> None:
        pass

    def draw_prompts(self, count: int) -> list[Prompt]:
        return [next(self) for _ in range(count)]

    def __next__(self) -> Prompt:
        while True:
            epoch, row = divmod(self.drawn, self._rows) if self._rows else (0, self.drawn)
            self.drawn += 1
            if self.pass_rates is None or self.pass_rates.is_chosen(seed=1, epoch=epoch, row=row):
                return self.get_prompt(make_uid(epoch, row))

    @staticmethod
    def get_prompt(uid: str) -> Prompt:
        message = {"role": "user", "content": "\1\2\3"}
        return Prompt(uid, np.array([1, 2, 3], np.int32), messages=[message])


@dataclass(frozen=True)
class SampledToken:
    """A sampled token: its position in the completion or turn (from 1), version and time."""

    uid: str
    position: int
    version: int
    at_s: float


class FakeGenerator:
    """Generator that samples tokens over time, each with the version served at that moment.

    One completion of a group releases its slot halfway.
    """

    def __init__(self, plan: Plan, rng: random.Random, generated: Counter[str]) -> None:
        self.version = -1
        self.computed = set[str]()
        self.sampled: list[SampledToken] = []
        self._plan = plan
        self._rng = rng
        self._generated = generated
        self._in_flight: list[tuple[Prompt, list[int], list[int]]] = []

    @property
    def stages(self) -> Mapping[str, SampleFunction]:
        return {"generate": self.group, "greedy": self.greedy}

    def make_sample_function(self, stage: StageContext) -> SampleFunction:
        return hold_devices_per_group(stage, self.stages[stage.name])

    async def read_partials(self) -> Mapping[str, Columns]:
        """Return the tokens sampled so far."""
        # A holder may get a group again before it learns that its lease expired; the task with the
        # most tokens wins.
        ordered = sorted(self._in_flight, key=lambda work: len(work[1]))
        return {work[0].uid: self._columns(*work) for work in ordered if work[1]}

    async def greedy(
        self, prompt: Prompt, partials: Columns | None, finished: FinishedCallback
    ) -> Columns:
        assert partials is None
        self.computed.add(prompt.uid)
        await asyncio.sleep(self._rng.uniform(*self._plan.generate_s))
        return {"greedy_ids": np.array([4, 5], np.int32)}

    async def group(
        self, prompt: Prompt, partials: Columns | None, finished: FinishedCallback
    ) -> Columns:
        self._generated[prompt.uid] += partials is None
        rng = random.Random(f"{self._plan.seed}/{prompt.uid}")
        count = rng.randint(1, 8)
        script = [rng.randint(4, 9) for _ in range(count)]
        tokens, versions = split_partials(partials)
        assert tokens == script[: len(tokens)]
        work = prompt, tokens, versions
        self._in_flight.append(work)
        try:
            for token in script[len(tokens) :]:
                await asyncio.sleep(self._rng.uniform(*self._plan.generate_s) / count)
                tokens.append(token)
                versions.append(self.version)
                now = asyncio.get_running_loop().time()
                self.sampled.append(SampledToken(prompt.uid, len(tokens), self.version, now))
                if 2 * len(tokens) == count:
                    finished()
        finally:
            self._in_flight = [entry for entry in self._in_flight if entry is not work]
        return self._columns(prompt, tokens, versions)

    def _columns(self, prompt: Prompt, tokens: list[int], versions: list[int]) -> Columns:
        rollout = make_rollout(prompt.token_ids, tokens, versions=versions)
        return rollouts_to_columns([rollout] * self._plan.group_size)

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        await asyncio.sleep(self._plan.pull_s)
        if self.version < 0 < version:
            await asyncio.sleep(self._plan.newcomer_pull_s)
        assert version > self.version
        self.version = version
        return WeightLoadStats()

    async def compute_logprobs(self, sequences: Sequence[Array]) -> Sequence[Array]:
        await asyncio.sleep(self._plan.probe_s)
        logprob = -2.0 if self.version == self._plan.broken_version else -1.0
        return [np.full(len(ids), logprob, np.float32) for ids in sequences]


def split_partials(partials: Columns | None) -> tuple[list[int], list[int]]:
    """Return the sampled tokens of the first partial rollout, and their versions."""
    if partials is None:
        return [], []
    rollout = columns_to_rollouts(partials)[0]
    return rollout.completion_ids.tolist(), rollout.policy_version[rollout.loss_mask].tolist()


class FakeScorer:
    """Scorer that returns scores, reference logprobs or values after a delay; rewards may fail."""

    def __init__(self, plan: Plan, rng: random.Random, stage: str) -> None:
        self._plan = plan
        self._rng = rng
        self._stage = stage
        self.computed = set[str]()
        self._version = -1

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        await asyncio.sleep(self._plan.pull_s)
        self._version = version
        return WeightLoadStats()

    async def compute_logprobs(self, sequences: Sequence[Array]) -> None:
        pass

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        await asyncio.sleep(self._rng.uniform(*self._plan.score_s))
        stuck = self._plan.stuck_attempts
        if any(e.uid == "0:1:0" and e.lease.attempt <= stuck for e in experiences):
            await asyncio.Event().wait()

        async def request() -> Sequence[StageResult]:
            if self._stage == "reward":
                check_service(self._plan.judge_outages, ServiceOutageError("http://judge: refused"))
            return [self._score_one(experience) for experience in experiences]

        return await request_service("http://judge", request, RewardError)

    def _score_one(self, experience: Experience) -> StageResult:
        self.computed.add(experience.uid)
        if self._stage == "reference":
            return {"ref_logprobs": np.zeros(len(experience.columns["token_ids"]), np.float32)}
        if self._stage == "baseline":
            assert experience.columns["greedy_ids"].tolist() == [4, 5]
            return {"baseline_scores": np.zeros(len(experience.columns["lengths"]), np.float32)}
        if self._stage == "value":
            assert self._version >= experience.admitted_version, "the critic's version is stale"
            return {"values": np.zeros(len(experience.columns["token_ids"]), np.float32)}
        if self._rng.random() < self._plan.fail_rate:
            return RewardError("the verifier is down")
        scores = {"scores": np.zeros(len(experience.columns["lengths"]), np.float32)}
        if not self._plan.rows:
            is_filtered = self._rng.random() < self._plan.filter_rate
            return FilteredGroup("all rewards are equal") if is_filtered else scores
        pass_rate = 1.0 if parse_uid(experience.uid)[1] % 2 else 0.5  # odd rows are easy
        if random.Random(experience.uid).random() < self._plan.filter_rate:
            return FilteredGroup("all rewards are equal", pass_rate)
        return scores | {"pass_rate": np.array([pass_rate], np.float32)}


def make_manifest(version: int, num_bytes: int, probe: LogprobCheck | None) -> WeightManifest:
    """Return the manifest of a version without tensors."""
    return WeightManifest(version, (WeightBucket((), num_bytes, ""),), (), probe)


@dataclass
class FakeTrainer:
    """Trainer whose weights are a digest of all trained rollouts.

    `digests` has the weights of each version, `trained` the rollouts of each step.
    """

    train_s: float = 0.3
    dp_size: int = 1
    update_plan: UpdatePlan = STREAMED
    version: int = 0
    weights: int = 0
    trained: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    gradient: list[Round] = field(default_factory=list)
    epochs: list[list[tuple[str, int]]] = field(default_factory=list)
    planned: set[str] = field(default_factory=set)
    num_updates: int = 0
    frozen_until: int = 0
    publish_s: float = 0.0
    weight_bytes: int = 0
    probe: LogprobCheck | None = None
    is_publishing: bool = False
    spans: SpanRecorder = field(default_factory=lambda: SpanRecorder("trainer"))

    def begin_step(self, version: int, dials: Mapping[str, float]) -> None:
        assert dials == {}
        self.version = version

    def is_frozen(self, version: int) -> bool:
        return version < self.frozen_until

    async def publish_weights(self, version: int, readers: Readers) -> WeightManifest:
        assert not self.is_publishing, "a version is already being published"
        before, self.is_publishing = self.weights, True
        await asyncio.sleep(self.publish_s)
        assert self.weights == before, "the weights changed during the publish"
        self.is_publishing = False
        return make_manifest(version, self.weight_bytes, self.probe)

    async def plan_step(self, uids: Sequence[str], turns: Sequence[ScheduledRound]) -> None:
        assert not self.planned
        self.planned = set(uids)
        assert all(
            uid in self.planned
            for turn in turns
            for picks in turn.micro_batches
            for uid, _ in picks
        )

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        assert len(work) == self.dp_size
        with self.spans.record_span("train"):
            await asyncio.sleep(self.train_s)
        self.gradient.append(work)
        self.epochs += [[] for _ in range(epoch + 1 - len(self.epochs))]
        picks = [pick for micro_batch in work for pick in micro_batch]
        self.epochs[epoch] += picks
        if self.update_plan.requires_full_step:
            assert {uid for uid, _ in picks} <= self.planned
        return {"rollouts": len(picks), "length_max": 1.0}

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        assert not self.is_publishing, "update during a publish"
        await asyncio.sleep(self.train_s)
        works, self.gradient = self.gradient, []
        assert sums["rollouts"] == sum(len(picks) for work in works for picks in work)
        self.weights = hash((self.weights, tuple(works)))
        self.num_updates += 1
        if self.num_updates < self.update_plan.num_epochs * self.update_plan.num_mini_batches:
            return {}
        epochs, self.epochs = self.epochs, []
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs[1:]), "epochs differ"
        assert self.planned == {uid for uid, _ in epochs[0]}
        self.planned, self.num_updates = set(), 0
        self.trained[self.version] = epochs[0]
        self.version += 1
        self.digests[self.version] = self.weights
        return {}


@dataclass
class FakeReference:
    """EMA reference that reads a trainer's model while publishing; the model must not change."""

    trainer: FakeTrainer
    publish_s: float

    async def publish_weights(self, version: int, readers: Readers) -> WeightManifest:
        before = self.trainer.weights
        await asyncio.sleep(self.publish_s)
        assert self.trainer.weights == before, "the weights changed during the publish"
        return WeightManifest(version, (), ())


class LocalChannel:
    """WeightChannel on a registry in the same process, without tensors."""

    def __init__(self, registry: WeightRegistry, follower: str) -> None:
        self._registry = registry
        self._follower = follower

    async def wait_for_newer(self, held: FollowerState, *, wait_s: float) -> WeightManifest | None:
        return await self._registry.wait_for_newer(self._follower, held, wait_s=wait_s)

    async def fetch_weights(self, manifest: WeightManifest) -> FetchedWeights:
        return FetchedWeights({})
