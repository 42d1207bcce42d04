"""Real loops, queue and run log on a virtual clock, with the timings of simulated engines."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from streamrl.buffer.micro_batch_schedule import Round, ScheduledRound, UpdatePlan
from streamrl.dataflow import CRITIC, POLICY, Dataflow
from streamrl.messages import (
    Columns,
    Experience,
    Prompt,
    rollouts_to_columns,
)
from streamrl.placement.placements import Placement
from streamrl.planner.problem.stage_timings import StageTimings, WeightsTiming
from streamrl.planner.problem.workload import Workload
from streamrl.planner.simulator.replicas import DeviceLeases
from streamrl.planner.simulator.simulated_engine import SimulatedEngine
from streamrl.planner.simulator.simulated_prompts import CompletionLengths
from streamrl.planner.simulator.virtual_loop import run_virtual
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import FinishedCallback, StageContext
from streamrl.stream.stage_worker import ConcurrencyLimit, StageResult
from streamrl.weights import WeightLoadStats, WeightManifest
from tests import fake_stream
from tests.fake_stream import Stream, dataflow_of, run_stream
from tests.fakes import FakeGenerator, FakeScorer, Plan
from tests.rollouts import make_rollout

PROMPT_TOKENS = 3
"""As in tests.fakes."""
BATCH = 2
"""Groups per score batch, as in tests.fake_stream."""


@dataclass
class AgreementCase:
    """A run for the real loops and the simulator: plan, placement, timings, workload."""

    plan: Plan
    placement: Placement
    timings: StageTimings
    workload: Workload
    seed: int = 7
    pace: UpdatePlan = field(default_factory=UpdatePlan)

    @property
    def dataflow(self) -> Dataflow:
        return dataflow_of(self.plan)

    def weights(self, stage: str) -> WeightsTiming:
        return self.timings.weights.get(stage, WeightsTiming())


def run_real(case: AgreementCase, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Run the real loops of a case to the end and return the stream."""
    completions = CompletionLengths(case.workload, case.seed)

    def generator(plan: Plan, rng: random.Random, generated: Counter[str]) -> "TimedGenerator":
        return TimedGenerator(case, completions)

    def scorer(plan: Plan, rng: random.Random, stage: str) -> "TimedScorer":
        return TimedScorer(case, stage)

    def trainers(plan: Plan) -> dict[str, "Rank"]:
        roles = [POLICY, *([CRITIC] if plan.critic else [])]
        return {role: Rank(case, role, completions) for role in roles}

    monkeypatch.setattr(fake_stream, "FakeGenerator", generator)
    monkeypatch.setattr(fake_stream, "FakeScorer", scorer)
    monkeypatch.setattr(fake_stream, "make_trainers", trainers)
    monkeypatch.setattr(fake_stream, "StageMaker", lambda stream: Stages(case, stream))
    return run_virtual(run_stream(case.plan))


class Stages:
    """Maker of stage contexts with the device leases of each role."""

    def __init__(self, case: AgreementCase, stream: Stream) -> None:
        self._make = FAKE_STAGE_MAKER(stream)
        self._stream = stream
        self._leases = DeviceLeases(case.dataflow, case.placement, slice_s=1.0)
        self._device_leases: dict[str, Any] = {}

    def __call__(self, name: str, process: str) -> StageContext:
        stage_context = self._make(name, process)
        role = process.rpartition("-")[0] or POLICY
        if process not in self._device_leases:
            sampler = self._stream.samplers[-1] if role == "generator" else None
            suspendable = sampler if isinstance(sampler, TimedGenerator) else None
            lease = self._leases.make_lease(role, process, suspendable=suspendable)
            self._device_leases[process] = lease or DedicatedDeviceLease()
        return StageContext(
            name,
            stage_context.queue,
            self._device_leases[process],
            stage_context.spans,
            stage_context.leave_requested,
        )


FAKE_STAGE_MAKER = fake_stream.StageMaker


@dataclass(eq=False)
class SampledGroup:
    """A group being sampled, with the slots whose release is not yet reported."""

    done: "asyncio.Future[Mapping[int, int]]"
    finished: FinishedCallback
    slots: ConcurrencyLimit


class TimedGenerator(FakeGenerator):
    """Simulated engine behind the interface of a real generator."""

    def __init__(self, case: AgreementCase, completions: CompletionLengths) -> None:
        super().__init__(case.plan, random.Random(), Counter())
        self._active_groups: list[SampledGroup] = []
        # Each group has its own limit without free slots, so that every finished rollout is an
        # event.
        self._limits: list[ConcurrencyLimit] = []
        self._engine: SimulatedEngine[SampledGroup] = SimulatedEngine(
            case.timings.generator, self._limits
        )
        self._timing = case.weights("generate")
        self._completions = completions
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def group(
        self, prompt: Prompt, partials: Columns | None, finished: FinishedCallback
    ) -> Columns:
        lengths = self._completions.get_lengths(prompt.uid)
        group = SampledGroup(self._loop.create_future(), finished, ConcurrencyLimit(0))
        self._active_groups.append(group)
        self._limits.append(group.slots)
        self._engine.add_group(group, PROMPT_TOKENS, lengths, self._loop.time(), group.slots)
        self._set_timer()
        versions = [v for v, count in sorted((await group.done).items()) for _ in range(count)]
        rollouts, at = [], 0
        for length in lengths:
            rollout_versions, at = versions[at : at + length], at + length
            rollouts.append(make_rollout(prompt.token_ids, [5] * length, versions=rollout_versions))
        return rollouts_to_columns(rollouts)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self._engine.next_event_s
        self._timer = self._loop.call_at(at, self._advance, at)

    def _advance(self, at: float) -> None:
        done = self._engine.advance_to(at)
        for group in self._active_groups:
            while group.slots.free_slots:
                self._engine.reserve_slots(group.slots, 1)
                group.finished()
        for finished_group in done:
            finished_group.key.done.set_result(finished_group.tokens_by_version)
            self._active_groups.remove(finished_group.key)
            self._limits.remove(finished_group.key.slots)
        self._set_timer()

    async def suspend(self) -> None:
        until = self._engine.pause(self._loop.time())
        self._set_timer()
        await asyncio.sleep(until - self._loop.time())

    async def resume(self) -> None:
        self._engine.resume(self._loop.time())
        self._set_timer()

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        until = self._engine.load_version(version, self._timing.pause_s, self._loop.time())
        self._set_timer()
        await asyncio.sleep(until - self._loop.time())
        return WeightLoadStats()


class TimedScorer(FakeScorer):
    """Scorer that scores one batch at a time."""

    def __init__(self, case: AgreementCase, stage: str) -> None:
        super().__init__(case.plan, random.Random(), stage)
        self._case = case
        self._lock = asyncio.Lock()

    async def load_weights(self, tensors: Mapping[str, Any], version: int) -> WeightLoadStats:
        await asyncio.sleep(self._case.weights(self._stage).pause_s)
        return WeightLoadStats()

    async def score(self, experiences: Sequence[Experience]) -> Sequence[StageResult]:
        lengths = [int(n) for e in experiences for n in e.columns["lengths"]]
        async with self._lock:
            timing = self._case.timings.score[self._stage]
            await asyncio.sleep(timing.batch_duration_s(len(lengths), sum(lengths)))
        names = {"reward": "scores", "reference": "ref_logprobs", "value": "values"}
        per = "lengths" if self._stage == "reward" else "token_ids"
        return [
            {names[self._stage]: np.zeros(len(e.columns[per]), np.float32)} for e in experiences
        ]


class Rank:
    """Trainer whose rounds take as long as their largest micro-batch."""

    def __init__(self, case: AgreementCase, role: str, completions: CompletionLengths) -> None:
        self._timing, self._completions = case.timings.train[role], completions
        self._publish_s = case.weights("generate" if role == POLICY else "value").publish_s
        self.dp_size, self.update_plan = self._timing.dp_size, case.pace
        self.version = self.weights = 0

    def is_frozen(self, version: int) -> bool:
        return False

    def begin_step(self, version: int, adaptive_params: Mapping[str, float]) -> None:
        self.version = version

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        await asyncio.sleep(self._timing.step_s)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        tokens = [
            sum(PROMPT_TOKENS + self._completions.get_lengths(uid)[i] for uid, i in picks)
            for picks in work
        ]
        await asyncio.sleep(
            max(self._timing.micro_batch_s + self._timing.token_s * n for n in tokens if n)
        )
        return {}

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        await asyncio.sleep(self._timing.update_s)
        return {}

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        await asyncio.sleep(self._publish_s)
        return WeightManifest(version, (), ())
