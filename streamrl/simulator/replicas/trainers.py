"""A trained model: every round, update and publish takes its time, and nothing else."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from streamrl.buffer.assembly.micro_batch_schedule import ScheduledRound, UpdatePlan
from streamrl.buffer.assembly.packing import Round
from streamrl.placement.stage_timings import TrainTiming
from streamrl.simulator.replicas.cpu_model import CpuModel
from streamrl.simulator.replicas.prompts import CompletionLengths
from streamrl.simulator.replicas.recorder import NO_SPAN_ARGS, ProcessRecorder, SpanArgs
from streamrl.weights import WeightManifest


class SimulatedTrainer:
    """A Trainer. A round takes as long as its largest micro-batch; `devices` is held meanwhile.

    publish_s: until a version is on its way.
    """

    def __init__(  # noqa: PLR0913
        self,
        timing: TrainTiming,
        pace: UpdatePlan,
        *,
        publish_s: float,
        machine: CpuModel,
        completions: CompletionLengths,
        recorder: ProcessRecorder,
        devices: asyncio.Lock | None = None,
    ) -> None:
        self.dp_size = timing.dp_size
        self.update_plan = pace
        self._timing = timing
        self._publish_s = publish_s
        self._cpu = machine
        self._completions = completions
        self._recorder = recorder
        self._device_lock = devices

    def begin_step(self, version: int, dials: Mapping[str, float]) -> None:
        """Nothing depends on either."""

    def is_frozen(self, version: int) -> bool:
        """Never."""
        return False

    async def plan_step(self, uids: Sequence[str], turns: Sequence[ScheduledRound]) -> None:
        """Takes step_s."""
        await self._run_work("plan", self._timing.step_s)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """Takes what the share with the largest micro-batch needs."""
        shares, rollouts, most, largest = 0, 0, 0.0, NO_SPAN_ARGS
        prompt_tokens, completions = self._completions.prompt_tokens, self._completions
        for picks in work:
            if picks:
                tokens = sum([completions.get_lengths(uid)[index] for uid, index in picks])
                tokens += prompt_tokens * len(picks)
                seconds = self._timing.micro_batch_s + self._timing.token_s * tokens
                if seconds > most:
                    most, largest = seconds, {"rollouts": len(picks), "tokens": tokens}
                shares += 1
                rollouts += len(picks)
        await self._wait_round_delay()
        await self._run_work("train", most, shares, largest)
        return {"rollouts": float(rollouts)}

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Takes update_s."""
        await self._wait_round_delay()
        await self._run_work("update", self._timing.update_s, self.dp_size)
        return {}

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Takes publish_s, beside everything else."""
        lane = self._recorder.begin_span("publish", {"version": version})
        await asyncio.sleep(self._publish_s)
        self._recorder.end_span(lane)
        return WeightManifest(version, (), ())

    async def _wait_round_delay(self) -> None:
        """Takes round_s, of the devices nothing."""
        await self._cpu.wait_until(self._cpu.now + self._timing.round_s)

    async def _run_work(
        self, name: str, seconds: float, processes: int = 1, facts: SpanArgs = NO_SPAN_ARGS
    ) -> None:
        devices: AbstractAsyncContextManager[object] = self._device_lock or nullcontext()
        async with devices:
            lane = self._recorder.begin_span(name, facts)
            try:
                await self._cpu.run_work(seconds, processes=processes)
            finally:
                self._recorder.end_span(lane)


class SimulatedReference:
    """What a reference follows that is moved after the policy: its trainer publishes it."""

    def __init__(self, publish_s: float) -> None:
        self._publish_s = publish_s

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Takes publish_s."""
        await asyncio.sleep(self._publish_s)
        return WeightManifest(version, (), ())
