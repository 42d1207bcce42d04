"""Trainer ranks of a model as a single object for the training loop; tensors stay on the ranks."""

import asyncio
from collections.abc import Mapping, Sequence

from streamrl.actors.coordination.role_actors import RoleActors
from streamrl.actors.rank_calls import RankCalls
from streamrl.buffer.micro_batch_schedule import Round, ScheduledRound, UpdatePlan
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import POLICY, CallKind
from streamrl.engines.trainer_config import SAVE_TIMEOUT_S
from streamrl.run_dir.checkpoint import CheckpointWriter, get_role_dirs
from streamrl.stream.train_step import add_metric_sums
from streamrl.weights import WeightManifest
from streamrl.weights.rank_slices import Readers
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

    def __init__(self, ranks: RoleActors, config: RunConfig, model_bytes: int) -> None:
        """Create the group of these ranks. model_bytes: size of the model's weight files."""
        super().__init__(ranks.role, config)
        is_policy = self.role == POLICY
        # The first versions are always checked.
        self._probe_every = config.weights.probe_every if is_policy else 0
        self._num_published = 0
        self._published_version = -1
        self._has_logprob_check = False
        self._publish_lock = asyncio.Lock()
        self.hosted_calls = [call for call in ranks.calls if call.kind is CallKind.SCORE]
        self._updates_left = 0
        plan = self.update_plan
        self._updates_per_step = plan.num_epochs * plan.num_mini_batches
        self._ranks = RankCalls(
            ranks.names,
            ranks.actors,
            self._trainer_config,
            model_bytes=model_bytes,
            # A publish may include a logprob check, which is a forward pass. And no group may be
            # scored between two updates of a step.
            is_collective=self._trainer_config.has_collective_forward
            or (is_policy and config.needs_resharding)
            or bool(self.hosted_calls and self._updates_per_step > 1),
        )
        self.score_groups = self._ranks.score_groups

    def begin_step(self, version: int, adaptive_params: Mapping[str, float]) -> None:
        super().begin_step(version, adaptive_params)
        self._updates_left = self._updates_per_step
        self._ranks.holds_version.set()

    async def plan_step(self, uids: Sequence[str], rounds: Sequence[ScheduledRound]) -> None:
        """Let every rank prepare the training step, if the algorithm needs all groups at once.

        uids: groups of the step. rounds: schedule of the step.
        """
        if not self.update_plan.requires_full_step:
            return
        to_precompute = self.select_precomputed(rounds)
        async with self._ranks.exclude_others():
            planned = [
                [batches[rank] for batches in to_precompute] for rank in self._ranks.dp_ranks
            ]
            await self._ranks.call_each_rank(
                "plan_step",
                [(uids, batches, self._adaptive_params, self._version) for batches in planned],
            )

    async def train_round(self, micro_batches: Round, *, epoch: int) -> Mapping[str, float]:
        """Train a round, one micro-batch per data-parallel rank; return the sums over the ranks."""
        step = (epoch, self._version, self._adaptive_params)
        async with self._ranks.exclude_others():
            rank_sums = await self._ranks.call_each_rank(
                "train_micro_batch", [(micro_batches[rank], *step) for rank in self._ranks.dp_ranks]
            )
        return self.sum_over_ranks(rank_sums)

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Run the optimizer step on every rank; return rank 0's metrics of the update.

        sums: sums of all rounds of the update.
        """
        async with self._ranks.exclude_others():
            self._ranks.holds_version.clear()
            replies = await self._ranks.call_ranks("update", sums, self._version)
            self._updates_left -= 1
            if not self._updates_left:
                self._ranks.holds_version.set()
        metrics: Mapping[str, float] = replies[0]
        return metrics

    async def publish_weights(self, version: int, followers: Readers) -> WeightManifest:
        """Publish the model as `version` to these followers; return the manifest."""
        async with self._publish_lock, self._ranks.exclude_others():
            if version != self._published_version:  # a retry repeats the first decision
                # Decided here, not per rank: the check is a collective, and after a failed send the
                # counts of the ranks could differ.
                self._has_logprob_check = is_logprob_check_due(
                    self._num_published, every=self._probe_every
                )
            manifest, *_ = await self._ranks.call_ranks(
                "publish_weights", version, followers, self._has_logprob_check
            )
            self._num_published += version != self._published_version
            self._published_version = version
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def publish_reference(self, version: int, followers: Readers) -> WeightManifest:
        """Update the policy's EMA reference and publish it as `version`; return the manifest."""
        async with self._publish_lock, self._ranks.exclude_others():
            manifest, *_ = await self._ranks.call_ranks("publish_reference", version, followers)
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def save_checkpoint(self, writer: CheckpointWriter) -> None:
        folders = get_role_dirs(writer.partial_dir, self.role)
        async with self._ranks.exclude_others():
            for proofs in await self._ranks.call_ranks(
                "save_checkpoint", *folders, timeout_s=SAVE_TIMEOUT_S
            ):
                writer.add_proofs(proofs)
