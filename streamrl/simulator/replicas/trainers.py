"""Simulated trainers: rounds, updates and publishes as timed waits."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from streamrl.buffer.assembly.micro_batch_schedule import ScheduledRound, UpdatePlan
from streamrl.buffer.assembly.packing import Round
from streamrl.placement.stage_timings import TrainTiming
from streamrl.simulator.replicas.cpu_model import CpuModel
from streamrl.simulator.replicas.recorder import NO_SPAN_ARGS, ProcessRecorder, SpanArgs
from streamrl.simulator.replicas.simulated_prompts import CompletionLengths
from streamrl.weights import WeightManifest


class SimulatedTrainer:
    """Trainer of a simulated run: each round, update and publication is a wait.

    publish_s: time until a published version can be pulled.
    devices: lock shared with other trainers on the same devices, held during computation.
    """

    def __init__(  # noqa: PLR0913
        self,
        timing: TrainTiming,
        update_plan: UpdatePlan,
        *,
        publish_s: float,
        cpu: CpuModel,
        completions: CompletionLengths,
        recorder: ProcessRecorder,
        devices: asyncio.Lock | None = None,
    ) -> None:
        self.dp_size = timing.dp_size
        self.update_plan = update_plan
        self._timing = timing
        self._publish_s = publish_s
        self._cpu = cpu
        self._completions = completions
        self._recorder = recorder
        self._device_lock = devices

    def begin_step(self, version: int, adaptive_params: Mapping[str, float]) -> None:
        pass

    def is_frozen(self, version: int) -> bool:
        return False

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        await self._run_work("plan", self._timing.step_s)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """Wait as long as the data-parallel rank with the round's largest micro-batch computes."""
        num_ranks, rollouts, longest_s, span_args = 0, 0, 0.0, NO_SPAN_ARGS
        get_tokens = self._completions.get_rollout_tokens
        for micro_batch in work:
            if micro_batch:
                tokens = sum([get_tokens(uid)[index] for uid, index in micro_batch])
                seconds = self._timing.micro_batch_s + self._timing.token_s * tokens
                if seconds > longest_s:
                    longest_s, span_args = seconds, {"rollouts": len(micro_batch), "tokens": tokens}
                num_ranks += 1
                rollouts += len(micro_batch)
        await self._wait_round_delay()
        await self._run_work("train", longest_s, num_ranks, span_args)
        return {"rollouts": float(rollouts)}

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        await self._wait_round_delay()
        await self._run_work("update", self._timing.update_s, self.dp_size)
        return {}

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        lane = self._recorder.begin_span("publish", {"version": version})
        await asyncio.sleep(self._publish_s)
        self._recorder.end_span(lane)
        return WeightManifest(version, (), ())

    async def _wait_round_delay(self) -> None:
        """Wait the time to dispatch a round, without occupying devices."""
        await self._cpu.wait_until(self._cpu.now + self._timing.round_s)

    async def _run_work(
        self, name: str, seconds: float, processes: int = 1, span_args: SpanArgs = NO_SPAN_ARGS
    ) -> None:
        """Occupy the trainer's devices, with `processes` busy ranks, recorded as a span."""
        devices: AbstractAsyncContextManager[object] = self._device_lock or nullcontext()
        async with devices:
            lane = self._recorder.begin_span(name, span_args)
            try:
                await self._cpu.run_work(seconds, processes=processes)
            finally:
                self._recorder.end_span(lane)


async def publish_reference(
    publish_s: float, version: int, readers: Sequence[str]
) -> WeightManifest:
    """Publish an EMA reference, which the policy's trainer computes, in `publish_s`."""
    await asyncio.sleep(publish_s)
    return WeightManifest(version, (), ())
