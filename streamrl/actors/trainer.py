"""Actor of a trainer rank.

Imports of torch happen inside functions: a process that only holds a handle loads this class too.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.actors.actor_context import ActorContext, ActorReport
from streamrl.actors.scoring_ranks import RankActor, Rendezvous, T
from streamrl.actors.shared_weights import SharedWeights
from streamrl.actors.transport.ray_calls import find_rendezvous
from streamrl.algorithms import list_derivation_columns
from streamrl.buffer.micro_batch_schedule import MicroBatch, RolloutIndex
from streamrl.dataflow import EMA_REFERENCE, POLICY, ModelCall
from streamrl.distributed.devices import has_local_gpu, make_gpu_stream, use_side_stream
from streamrl.engines.memory.peak_memory import release_large_blocks_eagerly
from streamrl.errors import CheckpointError
from streamrl.files.atomic_write import wrap_checkpoint_errors
from streamrl.files.file_proofs import FileProof, list_files, prove_files
from streamrl.messages import Columns
from streamrl.weights import WeightManifest
from streamrl.weights.rank_slices import Readers
from streamrl.weights.versions import LogprobCheck, make_check_sequences

OTHERS_FILE = re.compile(r"_\d{5}[._]|^\.")
"""Part of the names of a rank's files in a checkpoint, and of files that a rank is still writing.

Rank 0 writes all others.
"""

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.config.run_config import RunConfig
    from streamrl.engines.training.model_trainer import ModelTrainer


def measure_micro_batch(
    groups: Mapping[str, Columns], picks: Sequence[RolloutIndex]
) -> dict[str, int]:
    """Return the sizes of a micro-batch for its span: rollouts, all tokens, longest rollout."""
    lengths = [int(groups[uid]["lengths"][index]) for uid, index in picks]
    return {"rollouts": len(picks), "tokens": sum(lengths), "longest": max(lengths, default=0)}


def make_logprob_check(
    trainer: "ModelTrainer", config: "RunConfig", *, max_length: int
) -> LogprobCheck:
    """Make a logprob check: check sequences, and their log-probabilities under the trained model.

    A generator compares its own log-probabilities with these after loading the weights. A
    collective over all ranks if the parameters are sharded; otherwise rank 0 suffices.
    """
    from streamrl.engines.dtypes import is_float32_on_cpu

    sequences = make_check_sequences(vocab_size=trainer.vocab_size, max_length=max_length)
    logprobs = [trainer.compute_token_logprobs(sequence) for sequence in sequences]
    exact = is_float32_on_cpu(config.trainer, config.generator)
    return LogprobCheck(sequences, logprobs, config.weights.resolve_probe_limit(exact=exact))


def run_saves(saves: Sequence[Callable[[], None]]) -> None:
    """Write the parts of a checkpoint.

    Raises NoSpaceError or CheckpointError only after every write was attempted: saving the model is
    a collective, and a rank that returned early would leave the others waiting.
    """
    disk_errors = []
    for save in saves:
        try:
            save()
        except CheckpointError as error:
            disk_errors.append(error)
    if disk_errors:
        raise disk_errors[0]


def prove_rank_files(model_dir: Path, trainer_dir: Path, rank: int) -> dict[Path, FileProof]:
    """Return the proofs of the files that a rank has written into two folders of a checkpoint."""
    files = [*trainer_dir.glob(f"*_{rank:05d}[._]*")]
    if rank == 0:
        files += [path for path in trainer_dir.iterdir() if not OTHERS_FILE.search(path.name)]
        files += list_files(model_dir)
    with wrap_checkpoint_errors(trainer_dir):
        return prove_files(files)


class TrainerActor(RankActor):
    """Actor of a trainer rank."""

    _model: "ModelTrainer"

    def __init__(self, shared_weights: SharedWeights | None = None) -> None:
        """Create an actor without a model; `start` loads the model.

        shared_weights: weights that a generator in this process shares with the trainer, if any.
        """
        self._shared_weights = shared_weights

    async def find_rendezvous(self) -> Rendezvous:
        """Return the address and a free port of this node, where the ranks of the model meet."""
        return find_rendezvous()

    async def start(
        self,
        context: ActorContext,
        rank: int,
        names: Sequence[str],
        calls: Sequence[ModelCall],
        rendezvous: Rendezvous,
        resume_dir: Path | None,
    ) -> None:
        """Build the trainer backend of a rank, and load its state from `resume_dir` if given.

        names: of all ranks. calls: first the training, then those that the ranks score.
        """
        from streamrl.engines.training.ema_reference import EmaReference

        self._rank, self._role = rank, calls[0].role
        self._stage = self._join_ranks(context, calls, names[rank], rendezvous)
        self._columns = context.train_columns
        self._publish_thread = ThreadPoolExecutor(1, "publisher")
        if self._shared_weights is not None and self._config.placement.memory_mb is not None:
            release_large_blocks_eagerly()
        self._max_length = context.max_length
        self._model = await self._run_in_thread(
            context.engines.make_trainer, context.config, self._max_length, rank, self._role
        )
        # A generator in this process takes the parameters as they are.
        publishes_aside = self._shared_weights is None and has_local_gpu()
        self._publish_stream = (
            await self._run_in_thread(make_gpu_stream) if publishes_aside else None
        )
        self._ema_reference = EmaReference(self._config.reference.decay)
        self._reference_version = -1
        # Only rank 0 publishes: its model, unless shared in place, and the EMA reference.
        is_followed = self._role in context.config.dataflow.followed_roles
        publishes = self._shared_weights is None and is_followed
        roles = [self._role] if rank == 0 and publishes else []
        roles += [EMA_REFERENCE] if self._has_reference else []
        self._writers = {role: context.transport.make_writer(role) for role in roles}
        if resume_dir is not None:
            await self._run_in_thread(self._model.load_training_state, resume_dir)
            if self._has_reference:
                await self._run_in_thread(self._ema_reference.load, resume_dir)
        if self._shared_weights is not None:
            await self._shared_weights.attach_trainer(
                self._model, context.memory, run_in_thread=self._run_in_thread
            )

    @property
    def _has_reference(self) -> bool:
        """Whether this rank keeps the EMA reference of the policy."""
        moves = bool(self._config.reference.every)
        return moves and self._role == POLICY and self._rank == 0

    async def plan_step(
        self,
        uids: Sequence[str],
        micro_batches: Sequence[MicroBatch],
        adaptive_params: Mapping[str, float],
        version: int,
    ) -> None:
        """Compute, before the training step of `version`, everything that needs all of its groups.

        uids: groups of the step.
        micro_batches: picks of this rank that need log-probabilities under the policy before the
        step.
        """
        spec, settings = self._config.algorithm.spec, self._config.algorithm_settings
        queue, spans = self._stage.queue, self._stage.spans
        async with self._run_compute_phase():
            self._model.set_adaptive_params(adaptive_params)
            step_groups = await queue.read_columns(uids, list_derivation_columns(spec, settings))
            with spans.record_span("plan", groups=len(step_groups)):
                await self._run_in_thread(self._model.plan_step, step_groups)
            for picks in micro_batches:
                groups = await self._read_groups(picks)
                with spans.record_span("look", **measure_micro_batch(groups, picks)):
                    await self._run_in_thread(
                        self._model.precompute_logprobs, groups, picks, version
                    )
            if micro_batches:
                await self._run_in_thread(self._model.sync_plan)

    async def train_micro_batch(
        self,
        picks: Sequence[RolloutIndex],
        epoch: int,
        version: int,
        adaptive_params: Mapping[str, float],
    ) -> Mapping[str, float]:
        """Accumulate the gradients of a micro-batch; return sums for the metrics of the step.

        epoch: pass over the batch; statistics of the rollouts are returned in the first pass only.
        """
        self._model.set_adaptive_params(adaptive_params)
        groups = await self._read_groups(picks)
        async with self._run_compute_phase(is_piece=True):
            with self._stage.spans.record_span("train", **measure_micro_batch(groups, picks)):
                train = partial(self._model.train_micro_batch, epoch=epoch)
                return await self._run_in_thread(train, groups, picks, version)

    async def _read_groups(self, picks: Sequence[RolloutIndex]) -> Mapping[str, Columns]:
        uids = dict.fromkeys(uid for uid, _ in picks)
        return await self._stage.queue.read_columns(uids, self._columns)

    async def update(self, sums: Mapping[str, float], version: int) -> Mapping[str, float]:
        """Run an optimizer step on the accumulated gradients; return metrics of the update.

        sums: sums over all ranks of the update, which give the loss denominator.
        version: policy version that the training step starts from.
        """
        if self._shared_weights is not None:
            await self._shared_weights.invalidate_weights()
        async with self._run_compute_phase():
            with self._stage.spans.record_span("update"):
                loss_denominator = self._model.compute_loss_denominator(sums)
                return await self._run_in_thread(self._model.update, loss_denominator, version)

    async def publish_weights(
        self, version: int, followers: Readers, should_check: bool
    ) -> WeightManifest | None:
        """Publish the weights as `version`. All ranks must call; rank 0 returns the manifest.

        followers: the current followers, for transports that address them.
        should_check: add a logprob check to the manifest.
        """
        # The KV cache may only go while the generator is paused, that is, while weights change.
        is_changing = self._shared_weights is not None and self._shared_weights.is_changing
        config = self._config.get_trainer_config(self._role)
        # No micro-batch comes between collectives: the leader makes a call of all ranks at a time.
        computes_check = should_check and (self._rank == 0 or config.has_collective_forward)
        is_resharded = self._role == POLICY and self._config.needs_resharding
        is_collective = self._model.has_sharded_params or is_resharded
        # Reading parameters may overlap with micro-batches; the check is a forward pass.
        send = self._run_in_thread if is_collective else self._run_beside_training
        max_length = self._max_length
        make_check = partial(make_logprob_check, self._model, self._config, max_length=max_length)
        async with self._run_compute_phase(may_release_kv=is_changing):
            with self._stage.spans.record_span("publish", version=version):
                logprob_check = await self._run_in_thread(make_check) if computes_check else None
                manifest = await send(self._send_model, version, followers)
                return manifest and replace(manifest, logprob_check=logprob_check)

    async def publish_reference(self, version: int, followers: Readers) -> WeightManifest | None:
        """Update and publish the EMA reference, which rank 0 owns; rank 0 returns the manifest.

        All ranks must call.
        """
        is_collective = self._model.has_sharded_params
        send = self._run_in_thread if is_collective else self._run_beside_training
        with self._stage.spans.record_span("publish_reference", version=version):
            return await send(self._send_reference, version, followers)

    async def _run_beside_training(self, function: Callable[..., T], *arguments: Any) -> T:
        """Send weights in the publish thread while the model thread trains micro-batches.

        A GPU has a stream for it: on that of the model, the copy of each tensor to the host would
        wait for the micro-batches that are queued by then.
        """

        def send_aside() -> T:
            with use_side_stream(self._publish_stream):
                return function(*arguments)

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._publish_thread, send_aside)

    def _send_model(self, version: int, followers: Readers) -> WeightManifest | None:
        if self._shared_weights is not None:
            return self._shared_weights.publish_version(version)
        return self._send_tensors(self._role, iter(self._model.full_state()), version, followers)

    def _send_reference(self, version: int, followers: Readers) -> WeightManifest | None:
        model = iter(self._model.full_state())
        # On a retry the reference was already updated; only the send failed.
        if self._has_reference and version > self._reference_version:
            # The first version of this process is the checkpoint's reference, or the model itself.
            moves = self._reference_version >= 0
            self._ema_reference.update_from_policy(model, moves=moves)
            self._reference_version = version
        for _ in model if self._model.has_sharded_params else ():
            pass  # every rank takes part in each collective that gathers a tensor
        reference = self._ema_reference.named_tensors()
        return self._send_tensors(EMA_REFERENCE, reference, version, followers)

    def _send_tensors(
        self,
        role: str,
        tensors: "Iterator[tuple[str, Tensor]]",
        version: int,
        followers: Readers,
    ) -> WeightManifest | None:
        """Send tensors by the role's writer; a rank without a writer only takes part in gathers."""
        from streamrl.weights.buckets import publish_version

        try:
            if (writer := self._writers.get(role)) is None:
                return None
            writer.set_readers(followers)
            size = self._config.weights.bucket_bytes
            return publish_version(tensors, version=version, bucket_bytes=size, writer=writer)
        finally:
            # After a failed send the other ranks still gather the remaining tensors.
            for _ in tensors if self._model.has_sharded_params else ():
                pass

    async def save_checkpoint(self, model_dir: Path, trainer_dir: Path) -> dict[Path, FileProof]:
        """Write this rank's files of a checkpoint; return their proofs. All ranks must call.

        model_dir: folder of the Hugging Face model. trainer_dir: folder of optimizer state and
        parameters. Raises as `run_saves` does.
        """
        saves = [
            partial(self._model.save_training_state, trainer_dir),
            partial(self._model.save_model, model_dir),
        ]
        if self._has_reference:
            saves.append(partial(self._ema_reference.save, trainer_dir))
        shared_weights = self._shared_weights
        async with shared_weights.hold_whole_state() if shared_weights else nullcontext():
            with self._stage.spans.record_span("save"):
                await self._run_in_thread(run_saves, saves)
        return await asyncio.to_thread(prove_rank_files, model_dir, trainer_dir, self._rank)

    async def collect_report(self) -> ActorReport:
        spans, shared_weights = self._stage.spans, self._shared_weights
        return ActorReport(
            spans.process,
            spans.drain_spans(),
            advantages=self._model.drain_advantages() if self._role == POLICY else {},
            peaks_mb=shared_weights.peak_memory.drain_peaks() if shared_weights else {},
        )

    def _run_compute_phase(
        self, *, is_piece: bool = False, may_release_kv: bool = True
    ) -> AbstractAsyncContextManager[None]:
        """Context in which the trainer may use the memory of the generator of this process.

        Arguments are those of `SharedWeights.run_training_phase`. Does nothing without a generator
        here, and takes no device lease.
        """
        if self._shared_weights is None:
            return nullcontext()
        return self._shared_weights.run_training_phase(
            is_piece=is_piece, may_release_kv=may_release_kv
        )
