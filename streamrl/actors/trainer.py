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

from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.liveness import PingableActor
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.transport.rendezvous import find_rendezvous
from streamrl.algorithms import list_derivation_columns
from streamrl.buffer.assembly.packing import MicroBatch, RolloutIndex
from streamrl.dataflow import EMA_REFERENCE, POLICY, ModelCall
from streamrl.engines.memory.peak_memory import release_freed_memory, release_large_blocks_eagerly
from streamrl.engines.training.rollout_sums import sum_rollouts
from streamrl.errors import CheckpointError
from streamrl.messages import Columns
from streamrl.run_dir.crash_stacks import record_crash_stacks
from streamrl.weights import WeightManifest
from streamrl.weights.logprob_probe import LogprobCheck, make_check_sequences

if TYPE_CHECKING:
    from streamrl.actors.protocols import HostedTrainerRank
    from streamrl.actors.weight_sender import WeightSender
    from streamrl.config import RunConfig


@dataclass(frozen=True)
class RendezvousInfo:
    """Where the ranks of a trainer meet, at rank 0, and what they train there."""

    call: ModelCall
    name: str
    address: str
    port: int


def measure_micro_batch(
    groups: Mapping[str, Columns], picks: Sequence[RolloutIndex]
) -> dict[str, int]:
    """Of a micro-batch, for its span: its rollouts, their tokens, and those of the longest."""
    lengths = [int(groups[uid]["lengths"][index]) for uid, index in picks]
    return {"rollouts": len(picks), "tokens": sum(lengths), "longest": max(lengths, default=0)}


def make_logprob_check(
    trainer: "HostedTrainerRank", config: "RunConfig", *, max_length: int
) -> LogprobCheck:
    """What the model says now of the sequences of a probe.

    All ranks must take part if parameters have to be gathered, and only rank 0 else.
    """
    from streamrl.engines.dtypes import is_float32_on_cpu

    sequences = make_check_sequences(vocab_size=trainer.vocab_size, max_length=max_length)
    logprobs = [trainer.compute_token_logprobs(sequence) for sequence in sequences]
    exact = is_float32_on_cpu(config.trainer, config.generator)
    return LogprobCheck(sequences, logprobs, config.weights.resolve_probe_limit(exact=exact))


class TrainerActor(PingableActor):
    """One rank. What touches the model runs in one thread; the queue is read beside it."""

    def __init__(self, residence: SharedWeights | None = None) -> None:
        """`residence` is there if a generator shares this process, and the weights."""
        self._shared_weights = residence

    async def find_rendezvous(self) -> tuple[str, int]:
        """Address and free port at which the ranks of a trainer may meet, asked of rank 0."""
        return find_rendezvous()

    async def get_node_id(self) -> str:
        """The node this rank is on."""
        return str(ray.get_runtime_context().get_node_id())

    async def start(
        self, wiring: ActorContext, rank: int, meeting: RendezvousInfo, resume_dir: Path | None
    ) -> None:
        """Load the model, join the other ranks, and load the training state of a checkpoint."""
        from streamrl.engines.training.ema_reference import EmaReference

        self._config = wiring.config
        self._rank = rank
        name = f"{meeting.name}-{rank}"
        record_crash_stacks(wiring.run_dir, name)
        (self._stage,) = wiring.make_stages([meeting.call], name)
        self._columns = wiring.train_columns
        self._model_thread = ThreadPoolExecutor(1, "trainer")
        self._publish_thread = ThreadPoolExecutor(1, "publisher")
        self._role = meeting.call.role
        memory = wiring.memory
        self._should_sleep_generator = memory is not None and memory.releases_kv
        self._should_offload_optimizer = memory is not None and memory.offloads_optimizer
        if self._shared_weights is not None and self._config.placement.memory_mb is not None:
            release_large_blocks_eagerly()
        self._max_length = wiring.max_length
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting.address, str(meeting.port)
        make = wiring.engines.make_trainer
        self._trainer = await self._run_in_thread(
            make, wiring.config, self._max_length, rank, self._role
        )
        self._ema_reference = EmaReference(self._config.reference.decay)
        self._sender = self._make_sender(wiring)
        if resume_dir is not None:
            await self._run_in_thread(self._trainer.load_training_state, resume_dir)
            if self._has_reference:
                await self._run_in_thread(self._ema_reference.load, resume_dir)
        if self._should_offload_optimizer:
            await self._run_in_thread(self._trainer.offload_optimizer)
        if self._shared_weights is not None:
            self._shared_weights.mark_trainer_ready()

    def _make_sender(self, wiring: ActorContext) -> "WeightSender":
        """Rank 0 publishes: its model, and a reference that follows it."""
        from streamrl.actors.transport.endpoints import make_transport_writer
        from streamrl.actors.weight_sender import WeightSender

        path = self._config.get_model_path(self._role)
        sent = [self._role] if self._shared_weights is None else []
        roles = [*sent, *([EMA_REFERENCE] if self._has_reference else [])]
        outlets = {
            role: make_transport_writer(wiring.transport, role, path)
            for role in roles
            if self._rank == 0
        }
        weights = self._config.weights
        return WeightSender(
            self._trainer,
            self._role,
            outlets,
            weights,
            self._ema_reference,
            residence=self._shared_weights,
        )

    @property
    def _has_reference(self) -> bool:
        """Whether a reference that moves is kept in this process."""
        moves = bool(self._config.reference.every)
        return moves and self._role == POLICY and self._rank == 0

    async def plan_step(
        self, uids: Sequence[str], micro_batches: Sequence[MicroBatch], dials: Mapping[str, float]
    ) -> None:
        """Derive what needs all groups of the step, before any of them is trained.

        `micro_batches` are this rank's, to be looked at by the policy as it is now.
        """
        async with self._run_compute_phase():
            await self._plan_step(uids, micro_batches, dials)

    async def _plan_step(
        self, uids: Sequence[str], micro_batches: Sequence[MicroBatch], dials: Mapping[str, float]
    ) -> None:
        self._trainer.set_adaptive_params(dials)
        row, settings = self._config.algorithm.spec, self._config.algorithm_settings
        groups = await self._stage.queue.read_columns(uids, list_derivation_columns(row, settings))
        with self._stage.spans.record_span("plan", groups=len(groups)):
            await self._run_in_thread(self._trainer.plan_step, groups)
        for picks in micro_batches:
            looked_at = await self._read_groups(picks)
            with self._stage.spans.record_span("look", **measure_micro_batch(looked_at, picks)):
                await self._run_in_thread(self._trainer.precompute_logprobs, looked_at, picks)
        if micro_batches:
            await self._run_in_thread(self._trainer.sync_plan)

    async def train_micro_batch(
        self, picks: Sequence[RolloutIndex], epoch: int, version: int, dials: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Forward and backward of one micro-batch of a version's step; sums for metrics."""
        self._trainer.set_adaptive_params(dials)
        groups = await self._read_groups(picks)
        async with self._run_compute_phase(is_piece=True):
            with self._stage.spans.record_span("train", **measure_micro_batch(groups, picks)):
                sums = await self._run_in_thread(
                    self._trainer.train_micro_batch, groups, picks, version
                )
        return {**sums, **sum_rollouts(groups, picks)} if epoch == 0 else sums

    async def _read_groups(self, picks: Sequence[RolloutIndex]) -> Mapping[str, Columns]:
        uids = dict.fromkeys(uid for uid, _ in picks)
        return await self._stage.queue.read_columns(uids, self._columns)

    async def update(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Optimizer update; its metrics."""
        if self._shared_weights is not None:
            await self._shared_weights.invalidate_weights()
        async with self._run_compute_phase():
            with self._stage.spans.record_span("update"):
                divisor = self._trainer.compute_loss_denominator(sums)
                metrics: Mapping[str, float] = await self._run_in_thread(
                    self._trainer.step, divisor
                )
        return metrics

    async def publish_weights(
        self, version: int, readers: Sequence[str], probes: bool
    ) -> WeightManifest | None:
        """Send the weights off as `version`; rank 0 has the manifest. All ranks must take part.

        `readers` are those who follow them now, for a transport that has to know; `probes` is
        whether the version gets a probe.
        """
        # What changes stands still, everywhere: else a generator may sample meanwhile.
        changes = self._shared_weights is not None and self._shared_weights.is_changing
        async with self._run_compute_phase(may_release_kv=changes):
            with self._stage.spans.record_span("publish", version=version):
                return await self._publish_weights(version, readers, probes)

    async def _publish_weights(
        self, version: int, readers: Sequence[str], probes: bool
    ) -> WeightManifest | None:
        if self._trainer.has_sharded_params or (
            self._role == POLICY and self._config.needs_resharding
        ):
            # In one piece: between the same two micro-batches on every rank.
            whole: WeightManifest | None = await self._run_in_thread(
                self._check_and_send, version, readers, probes
            )
            return whole
        # One forward pass at a time; parameters may be read beside it.
        takes_part = probes and self._rank == 0
        probe = await self._run_in_thread(self._make_logprob_check) if takes_part else None
        sent = await self._run_in_thread(
            self._sender.send_model, version, readers, thread=self._publish_thread
        )
        return sent and replace(sent, logprob_check=probe)

    def _make_logprob_check(self) -> LogprobCheck:
        return make_logprob_check(self._trainer, self._config, max_length=self._max_length)

    def _check_and_send(
        self, version: int, readers: Sequence[str], probes: bool
    ) -> WeightManifest | None:
        probe = self._make_logprob_check() if probes else None
        sent = self._sender.send_model(version, readers)
        return sent and replace(sent, logprob_check=probe)

    async def publish_reference(
        self, version: int, readers: Sequence[str], moves: bool
    ) -> WeightManifest | None:
        """Send the reference off as `version`, moved towards the policy before if `moves`.

        All ranks must take part; rank 0 has it, and the manifest.
        """
        thread = self._model_thread if self._trainer.has_sharded_params else self._publish_thread
        with self._stage.spans.record_span("publish_reference", version=version):
            found: WeightManifest | None = await self._run_in_thread(
                partial(self._sender.send_reference, version, readers, moves=moves), thread=thread
            )
        return found

    async def save_checkpoint(self, model_dir: Path, trainer_dir: Path) -> None:
        """Write this rank's part of a checkpoint. All ranks must take part.

        Raises NoSpaceError, or CheckpointError, if the disk refuses, once all of it was tried: a
        rank that gave up would have the others wait for it where they gather the model.
        """
        parts = [
            partial(self._trainer.save_training_state, trainer_dir),
            partial(self._trainer.save_model, model_dir),
        ]
        if self._has_reference:
            parts.append(partial(self._ema_reference.save, trainer_dir))
        refusals = []
        async with self._hold_whole_state():
            with self._stage.spans.record_span("save"):
                for part in parts:
                    try:
                        await self._run_in_thread(part)
                    except CheckpointError as error:
                        refusals.append(error)
        if refusals:
            raise refusals[0]

    async def collect_report(self) -> ActorReport:
        """What this rank did since the last call."""
        peaks_mb = (
            self._shared_weights.peak_memory.drain_peaks()
            if self._shared_weights is not None
            else {}
        )
        spans = self._stage.spans
        return ActorReport(spans.process, spans.drain_spans(), peaks_mb=peaks_mb)

    @contextlib.asynccontextmanager
    async def _hold_whole_state(self) -> AsyncIterator[None]:
        """Inside the whole state is here, without the pool: if a generator of this process has no
        room beside it, it stands still and makes some."""
        if self._shared_weights is None or not self._should_offload_optimizer:
            yield
            return
        async with (
            self._shared_weights.pause_generator() as stands_still,
            self._run_compute_phase(may_release_kv=stands_still),
        ):
            yield

    @contextlib.asynccontextmanager
    async def _run_compute_phase(
        self, *, is_piece: bool = False, may_release_kv: bool = True
    ) -> AsyncIterator[None]:
        """Inside the model is computed with: a generator of this process makes room for it.

        What is freed after a piece of several stays for the next, unless room is short.
        """
        if self._shared_weights is None:
            yield
            return
        async with self._shared_weights.run_training_phase(
            releases_kv=self._should_sleep_generator and may_release_kv
        ):
            yield
            if self._should_offload_optimizer:
                await self._run_in_thread(self._trainer.offload_optimizer)
            if self._should_sleep_generator or not is_piece:
                await self._run_in_thread(release_freed_memory)

    async def _run_in_thread(
        self, function: Any, *arguments: Any, thread: ThreadPoolExecutor | None = None
    ) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread or self._model_thread, function, *arguments)
