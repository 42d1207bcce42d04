"""Trainer ranks of a model as a single object for the training loop; tensors stay on the ranks."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, call_actor, gather_replies
from streamrl.buffer.micro_batch_schedule import Round, ScheduledRound, UpdatePlan
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import POLICY
from streamrl.engines.trainer_config import SAVE_TIMEOUT_S
from streamrl.run_dir.checkpoint import CheckpointWriter
from streamrl.stream.train_step import add_metric_sums
from streamrl.weights import WeightManifest
from streamrl.weights.versions import is_logprob_check_due


class ParallelTrainer:
    """Base of trained models whose ranks share every round."""

    def __init__(self, role: str, config: RunConfig) -> None:
        settings, trainer_config = config.algorithm_settings, config.get_trainer_config(role)
        self.role = role
        self.dp_size = trainer_config.dp_size
        self.update_plan = UpdatePlan(
            settings.scope == "step", settings.epochs, settings.mini_batches
        )
        self._trainer_config = trainer_config
        self._recomputes_logprobs = settings.should_recompute_logprobs and role == POLICY
        has_critic = len(config.dataflow.trained_roles) > 1
        self._frozen_until = config.critic.warmup_alone if role == POLICY and has_critic else 0
        self._version = 0
        self._adaptive_params: Mapping[str, float] = {}

    def begin_step(self, version: int, adaptive_params: Mapping[str, float]) -> None:
        """Set the version and the adaptive parameters with which the next rounds train."""
        self._version, self._adaptive_params = version, adaptive_params

    def is_frozen(self, version: int) -> bool:
        """Return whether the training step at `version` skips this model (critic warm-up)."""
        return version < self._frozen_until

    def select_precomputed(self, rounds: Sequence[ScheduledRound]) -> list[Round]:
        """Return the rounds whose log-probabilities are computed before the step's first update.

        Later epochs repeat the rollouts of the first.
        """
        if not self._recomputes_logprobs:
            return []
        return [round_.micro_batches for round_ in rounds if round_.epoch == 0]

    def sum_over_ranks(self, rank_sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Add up the metric sums of all ranks.

        Ranks that train the same micro-batch have the same sums, so only the first counts.
        """
        total: dict[str, float] = {}
        for sums in rank_sums[:: self._trainer_config.ranks_per_batch]:
            add_metric_sums(total, sums)
        return total


class TrainerGroup(ParallelTrainer):
    """All ranks of a trained model; each method calls every rank."""

    def __init__(self, ranks: RoleActors, config: RunConfig) -> None:
        super().__init__(ranks.role, config)
        is_policy = self.role == POLICY
        # The first versions are always checked.
        self._probe_every = config.weights.probe_every if is_policy else 0
        self._num_published = 0
        self._published_version = -1
        self._has_logprob_check = False
        self._name = ranks.names[0].rpartition("-")[0]
        self._ranks = ranks.actors
        trainer_config = self._trainer_config
        self._dp_ranks = [trainer_config.get_dp_rank(i) for i in range(len(self._ranks))]
        self._timeout_s = trainer_config.collective_timeout_s + CALL_TIMEOUT_S
        # A publish may include a logprob check, which is a forward pass.
        self._is_publish_collective = trainer_config.has_collective_forward or (
            is_policy and config.needs_resharding
        )
        self._publish_lock = asyncio.Lock()

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        """Let every rank prepare the training step, if the algorithm needs all groups at once.

        uids: groups of the step. rounds: schedule of the step.
        """
        if not self.update_plan.requires_full_step:
            return
        to_precompute = self.select_precomputed(rounds)
        async with self._exclude_publish():
            planned = [[batches[rank] for batches in to_precompute] for rank in self._dp_ranks]
            await self._call_each_rank(
                "plan_step",
                [(uids, batches, self._adaptive_params, self._version) for batches in planned],
            )

    async def train_round(self, micro_batches: Round, *, epoch: int) -> Mapping[str, float]:
        """Train a round, one micro-batch per data-parallel rank; return the sums over the ranks."""
        step = (epoch, self._version, self._adaptive_params)
        async with self._exclude_publish():
            rank_sums = await self._call_each_rank(
                "train_micro_batch", [(micro_batches[rank], *step) for rank in self._dp_ranks]
            )
        return self.sum_over_ranks(rank_sums)

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Run the optimizer step on every rank; return rank 0's metrics of the update.

        sums: sums of all rounds of the update.
        """
        async with self._exclude_publish():
            replies = await self._call_ranks("update", sums, self._version)
        metrics: Mapping[str, float] = replies[0]
        return metrics

    async def publish_weights(self, version: int, followers: Sequence[str]) -> WeightManifest:
        """Publish the model as `version` to these followers; return the manifest."""
        async with self._publish_lock:
            if version != self._published_version:  # a retry repeats the first decision
                # Decided here, not per rank: the check is a collective, and after a failed send the
                # counts of the ranks could differ.
                self._has_logprob_check = is_logprob_check_due(
                    self._num_published, every=self._probe_every
                )
            manifest, *_ = await self._call_ranks(
                "publish_weights", version, followers, self._has_logprob_check
            )
            self._num_published += version != self._published_version
            self._published_version = version
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def publish_reference(self, version: int, followers: Sequence[str]) -> WeightManifest:
        """Update the policy's EMA reference and publish it as `version`; return the manifest."""
        async with self._publish_lock:
            manifest, *_ = await self._call_ranks("publish_reference", version, followers)
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def save_checkpoint(self, writer: CheckpointWriter) -> None:
        folders = writer.get_role_dirs(self.role)
        async with self._exclude_publish():
            for proofs in await self._call_ranks(
                "save_checkpoint", *folders, timeout_s=SAVE_TIMEOUT_S
            ):
                writer.add_proofs(proofs)

    def _exclude_publish(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Return the lock that keeps publishing and another call apart where both are collectives.

        Two collectives started concurrently could start in different orders on two ranks and
        deadlock. Where publishing is no collective, returns a context that does nothing.
        """
        return self._publish_lock if self._is_publish_collective else contextlib.nullcontext()

    async def _call_ranks(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every rank with the same arguments; return the replies by rank."""
        return await self._call_each_rank(method, [arguments] * len(self._ranks), timeout_s)

    async def _call_each_rank(
        self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every rank with its own arguments; return the replies by rank."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        calls = (
            call_actor(rank, f"{self._name}-{i}", method, *values, timeout_s=timeout_s)
            for i, (rank, values) in enumerate(zip(self._ranks, arguments, strict=True))
        )
        return await gather_replies(*calls)
