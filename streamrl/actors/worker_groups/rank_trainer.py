"""Trainer of one rank in an own loop: the training step of the stream, on groups in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from streamrl.actors.coordination.trainer_group import ParallelTrainer
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.buffer.assembly.micro_batch_schedule import ScheduledRound
from streamrl.buffer.assembly.packing import MicroBatch, Round
from streamrl.config.run_config import RunConfig
from streamrl.distributed.process_group import translate_collective_errors
from streamrl.group_episodes import count_samples
from streamrl.messages import Columns
from streamrl.stream.device_lease import DedicatedDeviceLease
from streamrl.stream.protocols import TrainStepResult
from streamrl.stream.train_step import ReadyRounds, RoundRunner, make_scheduler


class UninterruptedStep:
    """Control of a training step that nothing abandons and no publish delays."""

    def should_abandon_step(self, *, needs_s: float = 0.0) -> bool:
        return False

    async def begin_update(self, role: str, *, finishes_step: bool) -> bool:
        return True


class RankTrainer(ParallelTrainer):
    """Trainer of this process, one of the ranks of a model, which all run the same steps.

    Each rank has all groups of a step in memory and trains its micro-batch of every round.
    """

    def __init__(self, role: str, config: RunConfig, max_length: int, rank: int) -> None:
        super().__init__(role, config)
        trainer_config = config.get_trainer_config(role)
        self._pipeline = config.pipeline
        self._rank, self._dp_rank = rank, trainer_config.get_dp_rank(rank)
        self._timeout_s = trainer_config.collective_timeout_s
        self.model = RealEngineFactory().make_trainer(config, max_length, rank, role)

    async def train_step(
        self,
        groups: Mapping[str, Columns],
        derived: Mapping[str, Columns],
        version: int,
        adaptive_params: Mapping[str, float],
    ) -> TrainStepResult:
        """Run a training step with all its updates; all ranks must call it with the same groups.

        derived: derived columns of each group, by uid.
        """
        self._groups, self._derived = groups, derived
        self.begin_step(version, adaptive_params)
        scheduler = make_scheduler(self, self._pipeline)
        for uid, columns in groups.items():
            scheduler.add_group(uid, columns["lengths"].tolist(), count_samples(columns).tolist())
        ready = ReadyRounds({self.role: scheduler.take_rounds(complete=True)}, list(groups))
        runner = RoundRunner(self, UninterruptedStep(), DedicatedDeviceLease())
        await runner.run_rounds(self.role, ready)
        return runner.result

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        """Prepare the training step with the derived columns of its groups."""
        self.model.set_adaptive_params(self._adaptive_params)
        self.model.plan_step(self._groups, self._derived)
        if to_precompute := self.select_precomputed(rounds):
            for micro_batches in to_precompute:
                picks = micro_batches[self._dp_rank]
                self.model.precompute_logprobs(self._select_groups(picks), picks, self._version)
            self.model.sync_plan()

    async def train_round(self, micro_batches: Round, *, epoch: int) -> Mapping[str, float]:
        """Train this rank's micro-batch; return the sums over all ranks."""
        picks = micro_batches[self._dp_rank]
        groups = self._select_groups(picks)
        sums = self.model.train_micro_batch(groups, picks, self._version, epoch=epoch)
        return self.sum_over_ranks(self.gather_from_ranks(sums, "sums"))

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Run the optimizer step. sums: sums of all rounds of the update."""
        return self.model.step(self.model.compute_loss_denominator(sums), self._version)

    def gather_from_ranks(self, value: Any, name: str) -> list[Any]:
        """Return the values of all ranks; a collective. name: of the value, for errors."""
        values: list[Any] = [None] * dist.get_world_size()
        waited = f"rank {self._rank} waited {self._timeout_s:g} s"
        with translate_collective_errors(f"{waited} for the others' {name}"):
            dist.all_gather_object(values, value)
        return values

    def _select_groups(self, picks: MicroBatch) -> dict[str, Columns]:
        return {uid: self._groups[uid] for uid, _ in picks}
