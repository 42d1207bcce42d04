"""A trained model: every round, update and publish takes its time, and nothing else."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from streamrl.buffer.assembly.micro_batch_schedule import Pace, Turn
from streamrl.buffer.assembly.packing import Round
from streamrl.placement.stage_timings import TrainTiming
from streamrl.simulator.replicas.cpu_model import Machine
from streamrl.simulator.replicas.prompts import Completions
from streamrl.simulator.replicas.recorder import NO_FACTS, Facts, Recorder
from streamrl.weights import WeightManifest


class TimedTrainer:
    """A Trainer. A round takes as long as its largest micro-batch; `devices` is held meanwhile.

    publish_s: until a version is on its way.
    """

    def __init__(  # noqa: PLR0913
        self,
        timing: TrainTiming,
        pace: Pace,
        *,
        publish_s: float,
        machine: Machine,
        completions: Completions,
        recorder: Recorder,
        devices: asyncio.Lock | None = None,
    ) -> None:
        self.num_shares = timing.shares
        self.pace = pace
        self._timing = timing
        self._publish_s = publish_s
        self._machine = machine
        self._completions = completions
        self._recorder = recorder
        self._devices = devices

    def adopt(self, version: int, dials: Mapping[str, float]) -> None:
        """Nothing depends on either."""

    def rests(self, version: int) -> bool:
        """Never."""
        return False

    async def plan(self, uids: Sequence[str], turns: Sequence[Turn]) -> None:
        """Takes step_s."""
        await self._work("plan", self._timing.step_s)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """Takes what the share with the largest micro-batch needs."""
        shares, rollouts, most, largest = 0, 0, 0.0, NO_FACTS
        prompt_tokens, completions = self._completions.prompt_tokens, self._completions
        for picks in work:
            if picks:
                tokens = sum([completions.of(uid)[index] for uid, index in picks])
                tokens += prompt_tokens * len(picks)
                seconds = self._timing.micro_batch_s + self._timing.token_s * tokens
                if seconds > most:
                    most, largest = seconds, {"rollouts": len(picks), "tokens": tokens}
                shares += 1
                rollouts += len(picks)
        await self._asked()
        await self._work("train", most, shares, largest)
        return {"rollouts": float(rollouts)}

    async def update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Takes update_s."""
        await self._asked()
        await self._work("update", self._timing.update_s, self.num_shares)
        return {}

    async def publish(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Takes publish_s, beside everything else."""
        lane = self._recorder.begin("publish", {"version": version})
        await asyncio.sleep(self._publish_s)
        self._recorder.end(lane)
        return WeightManifest(version, (), ())

    async def _asked(self) -> None:
        """Takes round_s, of the devices nothing."""
        await self._machine.until(self._machine.now + self._timing.round_s)

    async def _work(
        self, name: str, seconds: float, processes: int = 1, facts: Facts = NO_FACTS
    ) -> None:
        devices: AbstractAsyncContextManager[object] = self._devices or nullcontext()
        async with devices:
            lane = self._recorder.begin(name, facts)
            try:
                await self._machine.work(seconds, processes=processes)
            finally:
                self._recorder.end(lane)


class MovedReference:
    """What a reference follows that is moved after the policy: its trainer publishes it."""

    def __init__(self, publish_s: float) -> None:
        self._publish_s = publish_s

    async def publish(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Takes publish_s."""
        await asyncio.sleep(self._publish_s)
        return WeightManifest(version, (), ())
