"""A rank of a trainer as an actor.

What needs torch is imported where it is made: whoever holds an actor's handle loads its class.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from streamrl.actors.actor_context import ActorReport, Wiring
from streamrl.actors.liveness import Living
from streamrl.actors.shared_weights import Residence
from streamrl.actors.transport.rendezvous import meeting_place
from streamrl.algorithms import columns_derived_from
from streamrl.buffer.assembly.packing import MicroBatch, Pick
from streamrl.dataflow import MOVED, POLICY, Call
from streamrl.engines.memory.peak_memory import give_back_freed, give_back_large_at_once
from streamrl.engines.training.rollout_sums import rollout_sums
from streamrl.errors import CheckpointError
from streamrl.messages import Columns
from streamrl.run_dir.crash_stacks import record_stacks
from streamrl.weights import WeightManifest
from streamrl.weights.logprob_probe import Probe, probe_sequences

if TYPE_CHECKING:
    from streamrl.actors.protocols import HostedRank
    from streamrl.actors.weight_sender import Sender
    from streamrl.config import RunConfig


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a trainer meet, at rank 0, and what they train there."""

    call: Call
    name: str
    address: str
    port: int


def sizes(groups: Mapping[str, Columns], picks: Sequence[Pick]) -> dict[str, int]:
    """Of a micro-batch, for its span: its rollouts, their tokens, and those of the longest."""
    lengths = [int(groups[uid]["lengths"][index]) for uid, index in picks]
    return {"rollouts": len(picks), "tokens": sum(lengths), "longest": max(lengths, default=0)}


def probe_of(trainer: "HostedRank", config: "RunConfig", *, max_length: int) -> Probe:
    """What the model says now of the sequences of a probe.

    All ranks must take part if parameters have to be gathered, and only rank 0 else.
    """
    from streamrl.engines.dtypes import float32_on_cpu

    sequences = probe_sequences(vocab_size=trainer.vocab_size, max_length=max_length)
    logprobs = [trainer.token_logprobs(sequence) for sequence in sequences]
    exact = float32_on_cpu(config.trainer, config.generator)
    return Probe(sequences, logprobs, config.weights.limit(exact=exact))


class TrainerActor(Living):
    """One rank. What touches the model runs in one thread; the queue is read beside it."""

    def __init__(self, residence: Residence | None = None) -> None:
        """`residence` is there if a generator shares this process, and the weights."""
        self._residence = residence

    async def rendezvous(self) -> tuple[str, int]:
        """Address and free port at which the ranks of a trainer may meet, asked of rank 0."""
        return meeting_place()

    async def node(self) -> str:
        """The node this rank is on."""
        return str(ray.get_runtime_context().get_node_id())

    async def start(
        self, wiring: Wiring, rank: int, meeting: Meeting, resume_dir: Path | None
    ) -> None:
        """Load the model, join the other ranks, and load the training state of a checkpoint."""
        from streamrl.engines.training.ema_reference import MovingReference

        self._config = wiring.config
        self._rank = rank
        name = f"{meeting.name}-{rank}"
        record_stacks(wiring.run_dir, name)
        (self._stage,) = wiring.stages([meeting.call], name)
        self._columns = wiring.train_columns
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._beside = ThreadPoolExecutor(1, "publisher")
        self._role = meeting.call.role
        memory = wiring.memory
        self._releases_kv = memory is not None and memory.releases_kv
        self._offloads = memory is not None and memory.offloads_optimizer
        if self._residence is not None and self._config.placement.memory_mb is not None:
            give_back_large_at_once()
        self._max_length = wiring.max_length
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting.address, str(meeting.port)
        make = wiring.engines.trainer
        self._trainer = await self._in_thread(
            make, wiring.config, self._max_length, rank, self._role
        )
        self._reference = MovingReference(self._config.reference.decay)
        self._sender = self._make_sender(wiring)
        if resume_dir is not None:
            await self._in_thread(self._trainer.load, resume_dir)
            if self._keeps_reference:
                await self._in_thread(self._reference.load, resume_dir)
        if self._offloads:
            await self._in_thread(self._trainer.offload_optimizer)
        if self._residence is not None:
            self._residence.trainer_is_in()

    def _make_sender(self, wiring: Wiring) -> "Sender":
        """Rank 0 publishes: its model, and a reference that follows it."""
        from streamrl.actors.transport.endpoints import make_outlet
        from streamrl.actors.weight_sender import Sender

        path = self._config.model_of(self._role)
        sent = [self._role] if self._residence is None else []
        roles = [*sent, *([MOVED] if self._keeps_reference else [])]
        outlets = {
            role: make_outlet(wiring.travel, role, path) for role in roles if self._rank == 0
        }
        weights = self._config.weights
        return Sender(
            self._trainer, self._role, outlets, weights, self._reference, residence=self._residence
        )

    @property
    def _keeps_reference(self) -> bool:
        """Whether a reference that moves is kept in this process."""
        moves = bool(self._config.reference.every)
        return moves and self._role == POLICY and self._rank == 0

    async def plan(
        self, uids: Sequence[str], micro_batches: Sequence[MicroBatch], dials: Mapping[str, float]
    ) -> None:
        """Derive what needs all groups of the step, before any of them is trained.

        `micro_batches` are this rank's, to be looked at by the policy as it is now.
        """
        async with self._computing():
            await self._plan(uids, micro_batches, dials)

    async def _plan(
        self, uids: Sequence[str], micro_batches: Sequence[MicroBatch], dials: Mapping[str, float]
    ) -> None:
        self._trainer.adopt(dials)
        row, settings = self._config.algorithm.row, self._config.settings
        groups = await self._stage.queue.read(uids, columns_derived_from(row, settings))
        with self._stage.spans.span("plan", groups=len(groups)):
            await self._in_thread(self._trainer.plan, groups)
        for picks in micro_batches:
            looked_at = await self._read(picks)
            with self._stage.spans.span("look", **sizes(looked_at, picks)):
                await self._in_thread(self._trainer.look, looked_at, picks)
        if micro_batches:
            await self._in_thread(self._trainer.settle)

    async def train(
        self, picks: Sequence[Pick], epoch: int, version: int, dials: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Forward and backward of one micro-batch of a version's step; sums for metrics."""
        self._trainer.adopt(dials)
        groups = await self._read(picks)
        async with self._computing(is_piece=True):
            with self._stage.spans.span("train", **sizes(groups, picks)):
                sums = await self._in_thread(
                    self._trainer.train_micro_batch, groups, picks, version
                )
        return {**sums, **rollout_sums(groups, picks)} if epoch == 0 else sums

    async def _read(self, picks: Sequence[Pick]) -> Mapping[str, Columns]:
        uids = dict.fromkeys(uid for uid, _ in picks)
        return await self._stage.queue.read(uids, self._columns)

    async def update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Optimizer update; its metrics."""
        if self._residence is not None:
            await self._residence.about_to_change()
        async with self._computing():
            with self._stage.spans.span("update"):
                divisor = self._trainer.normaliser(sums)
                metrics: Mapping[str, float] = await self._in_thread(self._trainer.step, divisor)
        return metrics

    async def publish(
        self, version: int, readers: Sequence[str], probes: bool
    ) -> WeightManifest | None:
        """Send the weights off as `version`; rank 0 has the manifest. All ranks must take part.

        `readers` are those who follow them now, for a transport that has to know; `probes` is
        whether the version gets a probe.
        """
        # What changes stands still, everywhere: else a generator may sample meanwhile.
        changes = self._residence is not None and self._residence.is_changing
        async with self._computing(may_release_kv=changes):
            with self._stage.spans.span("publish", version=version):
                return await self._publish(version, readers, probes)

    async def _publish(
        self, version: int, readers: Sequence[str], probes: bool
    ) -> WeightManifest | None:
        if self._trainer.gathers or (self._role == POLICY and self._config.fills_generators):
            # In one piece: between the same two micro-batches on every rank.
            whole: WeightManifest | None = await self._in_thread(
                self._probe_and_send, version, readers, probes
            )
            return whole
        # One forward pass at a time; parameters may be read beside it.
        takes_part = probes and self._rank == 0
        probe = await self._in_thread(self._probe) if takes_part else None
        sent = await self._in_thread(self._sender.model, version, readers, thread=self._beside)
        return sent and replace(sent, probe=probe)

    def _probe(self) -> Probe:
        return probe_of(self._trainer, self._config, max_length=self._max_length)

    def _probe_and_send(
        self, version: int, readers: Sequence[str], probes: bool
    ) -> WeightManifest | None:
        probe = self._probe() if probes else None
        sent = self._sender.model(version, readers)
        return sent and replace(sent, probe=probe)

    async def publish_reference(
        self, version: int, readers: Sequence[str], moves: bool
    ) -> WeightManifest | None:
        """Send the reference off as `version`, moved towards the policy before if `moves`.

        All ranks must take part; rank 0 has it, and the manifest.
        """
        thread = self._thread if self._trainer.gathers else self._beside
        with self._stage.spans.span("publish_reference", version=version):
            found: WeightManifest | None = await self._in_thread(
                partial(self._sender.reference, version, readers, moves=moves), thread=thread
            )
        return found

    async def save(self, model_dir: Path, trainer_dir: Path) -> None:
        """Write this rank's part of a checkpoint. All ranks must take part.

        Raises NoSpaceError, or CheckpointError, if the disk refuses, once all of it was tried: a
        rank that gave up would have the others wait for it where they gather the model.
        """
        parts = [
            partial(self._trainer.save, trainer_dir),
            partial(self._trainer.save_model, model_dir),
        ]
        if self._keeps_reference:
            parts.append(partial(self._reference.save, trainer_dir))
        refusals = []
        async with self._having_all():
            with self._stage.spans.span("save"):
                for part in parts:
                    try:
                        await self._in_thread(part)
                    except CheckpointError as error:
                        refusals.append(error)
        if refusals:
            raise refusals[0]

    async def drain(self) -> ActorReport:
        """What this rank did since the last call."""
        peaks_mb = self._residence.memory.drain() if self._residence is not None else {}
        spans = self._stage.spans
        return ActorReport(spans.process, spans.drain(), peaks_mb=peaks_mb)

    @contextlib.asynccontextmanager
    async def _having_all(self) -> AsyncIterator[None]:
        """Inside the whole state is here, without the pool: if a generator of this process has no
        room beside it, it stands still and makes some."""
        if self._residence is None or not self._offloads:
            yield
            return
        async with (
            self._residence.at_rest() as stands_still,
            self._computing(may_release_kv=stands_still),
        ):
            yield

    @contextlib.asynccontextmanager
    async def _computing(
        self, *, is_piece: bool = False, may_release_kv: bool = True
    ) -> AsyncIterator[None]:
        """Inside the model is computed with: a generator of this process makes room for it.

        What is freed after a piece of several stays for the next, unless room is short.
        """
        if self._residence is None:
            yield
            return
        async with self._residence.training(releases_kv=self._releases_kv and may_release_kv):
            yield
            if self._offloads:
                await self._in_thread(self._trainer.offload_optimizer)
            if self._releases_kv or not is_piece:
                await self._in_thread(give_back_freed)

    async def _in_thread(
        self, function: Any, *arguments: Any, thread: ThreadPoolExecutor | None = None
    ) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread or self._thread, function, *arguments)
