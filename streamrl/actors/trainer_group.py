"""The ranks of a trainer as one, for the training loop; no tensor comes by."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.actors.coordination.step_reporter import RoleActors
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, await_reply, gather_replies
from streamrl.algorithms import AlgorithmSettings
from streamrl.buffer.assembly.micro_batch_schedule import ScheduledRound, UpdatePlan
from streamrl.buffer.assembly.packing import Round
from streamrl.dataflow import POLICY
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.run_dir.checkpoint import CheckpointWriter
from streamrl.stream.train_step import add_metric_sums
from streamrl.weights import WeightManifest
from streamrl.weights.logprob_probe import is_logprob_check_due


class TrainerGroup:
    """All ranks as the one trainer the training loop calls."""

    def __init__(
        self,
        ranks: RoleActors,
        *,
        settings: AlgorithmSettings,
        config: TrainerConfig,
        publishes_together: bool = False,
        rests_until: int = 0,
        probe_every: int = 0,
    ) -> None:
        """`publishes_together`: it takes all ranks also where each has all parameters.

        `probe_every`: which versions get a probe, see `is_logprob_check_due`.
        """
        self.role = ranks.role
        self._probe_every = probe_every
        self._num_published = 0
        self._published_version = -1
        self._has_logprob_check = False
        self._frozen_until = rests_until
        self._version = 0
        self._adaptive_params: Mapping[str, float] = {}
        self._name = ranks.names[0].rpartition("-")[0]
        self._ranks = ranks.actors
        self._timeout_s = config.collective_timeout_s + CALL_TIMEOUT_S
        self._is_publish_collective = config.has_sharded_params or publishes_together
        self._publish_lock = asyncio.Lock()
        self._should_precompute_logprobs = (
            settings.should_recompute_logprobs and self.role == POLICY
        )
        self._tensor_parallel = config.tensor_parallel
        self.dp_size = config.dp_size
        self.update_plan = UpdatePlan(
            settings.scope == "step", settings.epochs, settings.mini_batches
        )

    def begin_step(self, version: int, dials: Mapping[str, float]) -> None:
        """Have the ranks train the step of this version, with these."""
        self._version, self._adaptive_params = version, dials

    def is_frozen(self, version: int) -> bool:
        """Whether the step of this version is left to the other trainers."""
        return version < self._frozen_until

    async def plan_step(self, uids: Sequence[str], turns: Sequence[ScheduledRound]) -> None:
        """Have every rank derive what needs the whole step, if anything does."""
        if not self.update_plan.requires_full_step:
            return
        first = [turn.micro_batches for turn in turns if turn.epoch == 0]
        rounds = first if self._should_precompute_logprobs else []
        async with self._exclude_publish():
            plans = [
                rank.plan_step.remote(uids, [work[share] for work in rounds], self._adaptive_params)
                for rank, share in self._pair_dp_ranks()
            ]
            await self._gather_replies("plan", plans)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """One micro-batch on every rank; sums over the shares."""
        version, dials = self._version, self._adaptive_params
        async with self._exclude_publish():
            calls = [
                rank.train_micro_batch.remote(work[share], epoch, version, dials)
                for rank, share in self._pair_dp_ranks()
            ]
            parts = await self._gather_replies("train", calls)
        sums: dict[str, float] = {}
        for part in parts[:: self._tensor_parallel]:
            add_metric_sums(sums, part)
        return sums

    def _pair_dp_ranks(self) -> list[tuple[Any, int]]:
        """Every rank with the share it trains; those of a tensor-parallel group have the same."""
        return [(rank, i // self._tensor_parallel) for i, rank in enumerate(self._ranks)]

    async def apply_update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Update on every rank; rank 0 speaks for all."""
        async with self._exclude_publish():
            replies = await self._gather_replies(
                "update", [rank.update.remote(sums) for rank in self._ranks]
            )
        metrics: Mapping[str, float] = replies[0]
        return metrics

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Publish the weights as they are."""
        async with self._publish_lock:
            if version != self._published_version:  # else it is sent again, as it was
                # Said to all ranks alike: one that could not send may have counted otherwise.
                self._has_logprob_check = is_logprob_check_due(
                    self._num_published, every=self._probe_every
                )
            calls = [
                rank.publish_weights.remote(version, readers, self._has_logprob_check)
                for rank in self._ranks
            ]
            manifest = (await self._gather_replies("publish", calls))[0]
            self._num_published += version != self._published_version
            self._published_version = version
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def publish_reference(
        self, version: int, readers: Sequence[str], *, moves: bool
    ) -> WeightManifest:
        """Publish the reference that follows this model."""
        async with self._publish_lock:
            calls = [rank.publish_reference.remote(version, readers, moves) for rank in self._ranks]
            manifest = (await self._gather_replies("publish_reference", calls))[0]
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def save_checkpoint(self, writer: CheckpointWriter) -> None:
        """Write every rank's part of a checkpoint."""
        model, state = writer.get_role_dirs(self.role)
        async with self._exclude_publish():
            await self._gather_replies(
                "save", [rank.save_checkpoint.remote(model, state) for rank in self._ranks]
            )

    def _exclude_publish(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Meanwhile nothing is gathered to be published, and nothing begins to be.

        What two calls begin, two ranks may begin in another order.
        """
        return self._publish_lock if self._is_publish_collective else contextlib.nullcontext()

    async def _gather_replies(self, what: str, replies: Sequence[Any]) -> list[Any]:
        names = (f"{self._name}-{rank}.{what}" for rank in range(len(self._ranks)))
        calls = (
            await_reply(r, name, self._timeout_s) for r, name in zip(replies, names, strict=True)
        )
        return await gather_replies(*calls)


class EmaReferencePublisher:
    """The reference that follows a policy, as something to publish."""

    def __init__(self, policy: TrainerGroup) -> None:
        self._policy = policy
        self._has_published = False

    async def publish_weights(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Publish it, moved to this version; the first time as the run found it."""
        moves, self._has_published = self._has_published, True
        return await self._policy.publish_reference(version, readers, moves=moves)
