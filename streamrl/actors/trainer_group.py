"""The ranks of a trainer as one, for the training loop; no tensor comes by."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.actors.coordination.step_reporter import RoleActors
from streamrl.actors.transport.ray_calls import CALL_TIMEOUT_S, all_answered, call
from streamrl.algorithms import Settings
from streamrl.buffer.assembly.micro_batch_schedule import Pace, Turn
from streamrl.buffer.assembly.packing import Round
from streamrl.dataflow import POLICY
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.run_dir.checkpoint import CheckpointWriter
from streamrl.stream.train_step import add_sums
from streamrl.weights import WeightManifest
from streamrl.weights.logprob_probe import is_probed


class TrainerGroup:
    """All ranks as the one trainer the training loop calls."""

    def __init__(
        self,
        ranks: RoleActors,
        *,
        settings: Settings,
        config: TrainerConfig,
        publishes_together: bool = False,
        rests_until: int = 0,
        probe_every: int = 0,
    ) -> None:
        """`publishes_together`: it takes all ranks also where each has all parameters.

        `probe_every`: which versions get a probe, see `is_probed`.
        """
        self.role = ranks.role
        self._probe_every = probe_every
        self._count = 0
        self._published = -1
        self._probes = False
        self._rests_until = rests_until
        self._version = 0
        self._dials: Mapping[str, float] = {}
        self._name = ranks.names[0].rpartition("-")[0]
        self._ranks = ranks.actors
        self._timeout_s = config.collective_timeout_s + CALL_TIMEOUT_S
        self._together = config.gathers or publishes_together
        self._publishing = asyncio.Lock()
        self._looks_ahead = settings.looks_ahead and self.role == POLICY
        self._tensor_parallel = config.tensor_parallel
        self.num_shares = config.num_shares
        self.pace = Pace(settings.scope == "step", settings.epochs, settings.mini_batches)

    def adopt(self, version: int, dials: Mapping[str, float]) -> None:
        """Have the ranks train the step of this version, with these."""
        self._version, self._dials = version, dials

    def rests(self, version: int) -> bool:
        """Whether the step of this version is left to the other trainers."""
        return version < self._rests_until

    async def plan(self, uids: Sequence[str], turns: Sequence[Turn]) -> None:
        """Have every rank derive what needs the whole step, if anything does."""
        if not self.pace.whole_steps:
            return
        first = [turn.work for turn in turns if turn.epoch == 0]
        rounds = first if self._looks_ahead else []
        async with self._alone():
            plans = [
                rank.plan.remote(uids, [work[share] for work in rounds], self._dials)
                for rank, share in self._seated()
            ]
            await self._all("plan", plans)

    async def train_round(self, work: Round, *, epoch: int) -> Mapping[str, float]:
        """One micro-batch on every rank; sums over the shares."""
        version, dials = self._version, self._dials
        async with self._alone():
            calls = [
                rank.train.remote(work[share], epoch, version, dials)
                for rank, share in self._seated()
            ]
            parts = await self._all("train", calls)
        sums: dict[str, float] = {}
        for part in parts[:: self._tensor_parallel]:
            add_sums(sums, part)
        return sums

    def _seated(self) -> list[tuple[Any, int]]:
        """Every rank with the share it trains; those of a tensor-parallel group have the same."""
        return [(rank, i // self._tensor_parallel) for i, rank in enumerate(self._ranks)]

    async def update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Update on every rank; rank 0 speaks for all."""
        async with self._alone():
            replies = await self._all("update", [rank.update.remote(sums) for rank in self._ranks])
        metrics: Mapping[str, float] = replies[0]
        return metrics

    async def publish(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Publish the weights as they are."""
        async with self._publishing:
            if version != self._published:  # else it is sent again, as it was
                # Said to all ranks alike: one that could not send may have counted otherwise.
                self._probes = is_probed(self._count, every=self._probe_every)
            calls = [rank.publish.remote(version, readers, self._probes) for rank in self._ranks]
            manifest = (await self._all("publish", calls))[0]
            self._count += version != self._published
            self._published = version
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def publish_reference(
        self, version: int, readers: Sequence[str], *, moves: bool
    ) -> WeightManifest:
        """Publish the reference that follows this model."""
        async with self._publishing:
            calls = [rank.publish_reference.remote(version, readers, moves) for rank in self._ranks]
            manifest = (await self._all("publish_reference", calls))[0]
        assert isinstance(manifest, WeightManifest)
        return manifest

    async def save(self, writer: CheckpointWriter) -> None:
        """Write every rank's part of a checkpoint."""
        model, state = writer.dirs(self.role)
        async with self._alone():
            await self._all("save", [rank.save.remote(model, state) for rank in self._ranks])

    def _alone(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Meanwhile nothing is gathered to be published, and nothing begins to be.

        What two calls begin, two ranks may begin in another order.
        """
        return self._publishing if self._together else contextlib.nullcontext()

    async def _all(self, what: str, replies: Sequence[Any]) -> list[Any]:
        names = (f"{self._name}-{rank}.{what}" for rank in range(len(self._ranks)))
        calls = (call(r, name, self._timeout_s) for r, name in zip(replies, names, strict=True))
        return await all_answered(*calls)


class MovedReference:
    """The reference that follows a policy, as something to publish."""

    def __init__(self, policy: TrainerGroup) -> None:
        self._policy = policy
        self._is_open = False

    async def publish(self, version: int, readers: Sequence[str]) -> WeightManifest:
        """Publish it, moved to this version; the first time as the run found it."""
        moves, self._is_open = self._is_open, True
        return await self._policy.publish_reference(version, readers, moves=moves)
