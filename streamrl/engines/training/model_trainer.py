"""A rank of a model's trainer: micro-batches in, optimizer updates out.

Micro-batches are trained as their groups arrive. Each adds the gradient of a summed (not averaged)
loss:

    train_micro_batch(...)    ->  grad += d(sum of token losses)      any number of times
    update(loss_denominator)  ->  grad / loss_denominator, clip, AdamW

The loss denominator is known once all micro-batches of the update are, and `update` divides once,
after the reduction over ranks and before clipping. The update is therefore independent of the
split into micro-batches and of the number of ranks.

The model leaves the ranks as a Hugging Face directory (`write_hf_model`), as buckets, or, in
colocated runs, straight into the generators of the same processes (`WeightResharder`).
"""

import json
import math
import shutil
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from streamrl.algorithms import AlgorithmSettings
from streamrl.algorithms.math.correction import high_entropy_limit, second_moment_limit
from streamrl.algorithms.objective import estimate_score_norms
from streamrl.buffer.micro_batch_schedule import RolloutIndex
from streamrl.data.chat_template import load_tokenizer
from streamrl.distributed.devices import (
    get_local_device,
    has_local_gpu,
    synchronize_device,
    synchronize_stream,
)
from streamrl.distributed.process_group import gather_objects
from streamrl.engines.checkpoint.sharded_state import (
    TrainerProgress,
    batch_tensors,
    load_state,
    read_progress,
    restore_rng,
    save_rng,
    save_state,
    save_tensors,
    write_progress,
)
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.memory.peak_memory import keep_heap_compact
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.models.chunked_head import EntropyMode
from streamrl.engines.models.forward import compute_token_logprobs
from streamrl.engines.models.lora import add_lora_adapters
from streamrl.engines.trainer_config import OFFLOAD, SAVE_TIMEOUT_S, TrainerConfig
from streamrl.engines.training.collate import (
    average_advantage,
    build_batch,
    derive_columns,
    find_token_slice,
)
from streamrl.engines.training.model_rank import ModelRank
from streamrl.engines.training.optimizer_offload import OptimizerOffload
from streamrl.engines.training.pretraining import PretrainingLoss
from streamrl.engines.training.rollout_sums import sum_rollouts
from streamrl.engines.training.tasks import PolicyTask, TrainingTask
from streamrl.engines.training.training_backend import TrainingBackend
from streamrl.errors import CheckpointError, DeadlineError, StreamError, WeightsError
from streamrl.files.atomic_write import wrap_checkpoint_errors, write_atomic
from streamrl.files.hf_config import GENERATION_CONFIG, WEIGHTS_FILE, WEIGHTS_INDEX
from streamrl.messages import EPISODE_COLUMN, SCORE_NORMS, Array, Columns
from streamrl.resharding.executors import (
    ReshardingExecutor,
    ReshardingStats,
    create_least_bytes_executor,
)
from streamrl.resharding.layouts import ModelLayout, TensorShard
from streamrl.resharding.plans import NodeTopology
from streamrl.resharding.storage import ShardStorage, create_from_buffers
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from streamrl.weights.parameters import LORA_SCALE, build_full_weights

PROXIMAL_COLUMN = "proximal_logprobs"
"""Derived column of the logprobs under the policy from which a training step starts."""
HIGH_ENTROPY = "high_entropy"
"""Derived column of the tokens whose policy loss is trained under `top_entropy`."""
BUCKET_BYTES = 16 * 2**20
"""Bytes that a transfer has in flight at a time; gloo buffers as much again."""


class ModelTrainer(ModelRank):
    """A rank of a trained model; the calls of all ranks are those of `ModelRank`."""

    _task: TrainingTask
    _is_trained = True

    def __init__(
        self,
        task: TrainingTask,
        *,
        config: TrainerConfig,
        rank: int = 0,
        pretraining: PretrainingLoss | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Join the process group and load the model.

        `num_steps` is the number of training steps of the run, for learning rate schedules.
        `pretraining` adds a loss on pretraining texts.
        """
        torch.manual_seed(0)
        super().__init__(task, config=config, rank=rank)
        self.num_updates = 0
        self._pretraining = pretraining
        self._num_steps = num_steps
        self._plan: StepPlan | None = None
        self._resharder = WeightResharder(config.collective_timeout_s)
        self._advantages: dict[str, dict[int, float]] = {}
        self._optimizer_offload = OptimizerOffload(
            self._backend.iter_optimizer_state,
            excluding=lambda: (tensor for _, tensor, _ in self._backend.iter_shards()),
        )

    def _prepare_module(self, module: PreTrainedModel) -> None:
        config = self._config
        if config.lora_rank:
            add_lora_adapters(module, config)
        if config.gradient_checkpointing:
            offload = config.gradient_checkpointing == OFFLOAD
            checkpoint_layers(
                module,
                # On a CPU the inputs are in host memory anyway.
                offload=offload and has_local_gpu(),
                chunk_mlps=config.tensor_parallel == 1,
            )

    def set_adaptive_params(self, params: Mapping[str, float]) -> None:
        """Override algorithm settings, by name, with the values of adaptive parameters."""
        settings = self._task.settings.with_adaptive_params(params)
        if settings != self._task.settings:
            self._task = replace(self._task, settings=settings)

    def plan_step(
        self, groups: Mapping[str, Columns], derived: Mapping[str, Columns] | None = None
    ) -> None:
        """Derive columns from all groups of a training step before training on any of them.

        Required before `precompute_logprobs`, and for algorithms of scope "step", whose advantages
        compare all groups of the step. `derived` gives the columns if the caller has run
        `derive_columns` already.
        """
        task = self._task
        # Derived again by `sync_plan` if the correction takes out whole rollouts.
        self._planned_groups = groups if derived is None else {}
        if derived is None:
            derived = derive_columns(task.spec, task.settings, groups)
        self._plan = StepPlan(task.settings, derived)

    def precompute_logprobs(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], version: int = 0
    ) -> None:
        """Compute and keep the current policy's logprobs of picked rollouts for the training step.

        Call it after `plan_step`. The logprobs serve as proximal logprobs in all updates of the
        step. `version` is the policy version that the step starts from. If the columns passed to
        `plan_step` include the logprobs, only what depends on them is computed.
        """
        task, plan = self._task, self._current_plan
        assert isinstance(task, PolicyTask)
        names = ("loss_mask", PROXIMAL_COLUMN) if plan.has_proximal_logprobs else ("loss_mask",)
        derived = {uid: {n: c[n] for n in names} for uid, c in plan.get_derived(groups).items()}
        batch = build_batch(groups, picks, derived=derived, token_columns=task.token_columns)
        batch = batch.to(get_local_device())
        by_mode: dict[EntropyMode, Tensor] = {}
        routing = None
        logprobs = batch[PROXIMAL_COLUMN] if plan.has_proximal_logprobs and picks else None
        for mode in task.precomputed_modes or (() if plan.has_proximal_logprobs else ("none",)):
            with self._limit_wait("the logprob precomputation"), torch.no_grad():
                scores = task.score_batch(self._backend.forward, batch, mode)
            by_mode[mode], routing = scores.entropy, scores.routing
            logprobs = scores.logprobs if logprobs is None else logprobs
        if logprobs is None or not picks:
            return
        weights, near, weight_sums = task.correct_before_updates(
            logprobs, batch.to_dict(), version=version
        )
        columns = {PROXIMAL_COLUMN: logprobs}
        if routing is not None and task.settings.router_replay == "r2":
            columns["routed_experts"] = routing.get_own()
        if task.settings.corrects_before_updates:
            columns["near"] = near
        if task.settings.correction.normalize_weights:
            columns["policy_weights"] = weights
        if "value" in by_mode:
            columns[HIGH_ENTROPY] = by_mode["value"]
        if "collision" in by_mode:
            columns[SCORE_NORMS] = estimate_score_norms(
                logprobs, by_mode["collision"], weights, batch["loss_mask"]
            )
        arrays = {name: column.cpu().numpy() for name, column in columns.items()}
        plan.add_columns(groups, picks, arrays, weight_sums.cpu().numpy())

    def sync_plan(self) -> None:
        """Exchange masks with the other ranks after the last `precompute_logprobs`. Collective.

        Rollouts of which the correction keeps no token are excluded: all columns that `plan_step`
        derived are derived without them, and with the norms of scores that advantages read.
        """
        task, groups, self._planned_groups = self._task, self._planned_groups, {}
        with self._limit_wait("the synchronization of the step plan"):
            ranks_per_batch = self._config.ranks_per_batch
            rejected = self._current_plan.sync_correction(ranks_per_batch=ranks_per_batch)
            norms = self._current_plan.gather_score_norms(ranks_per_batch=ranks_per_batch)
        if rejected or norms:
            groups = {uid: {**columns, **norms.get(uid, {})} for uid, columns in groups.items()}
            derived = derive_columns(task.spec, task.settings, groups, rejected)
            self._current_plan.replace_derived(derived)

    def train_micro_batch(
        self,
        groups: Mapping[str, Columns],
        picks: Sequence[RolloutIndex],
        version: int = 0,
        *,
        epoch: int = 0,
    ) -> dict[str, float]:
        """Run forward and backward on the picked rollouts; return sums for the step's metrics.

        `picks` are (uid, index of the rollout in its group). `groups` must hold complete groups,
        because advantages compare all rollouts of a group. `version` is the policy version that the
        step starts from. Sums over rollouts are returned in the first `epoch` only. Without picks,
        the rank only takes part in the collectives.
        """
        derived = self._get_derived(groups)
        batch = build_batch(groups, picks, derived=derived, token_columns=self._task.token_columns)
        batch = batch.to(get_local_device())
        for uid, index in picks:
            advantage = average_advantage(groups[uid], derived[uid], index)
            self._advantages.setdefault(uid, {})[index] = advantage
        with self._limit_wait("a micro-batch"):
            if picks:
                loss, sums = self._task.compute_loss(self._backend.forward, batch, version=version)
            else:
                loss, sums = self._task.compute_zero_loss(self._backend.forward, batch), {}
            self._backend.backward(loss)
        if not sums:
            return {}
        # A single copy from the GPU, since each waits for the queued work.
        values = torch.stack([value.double() for value in sums.values()]).tolist()
        of_rollouts = sum_rollouts(groups, picks, derived) if epoch == 0 else {}
        return dict(zip(sums, values, strict=True)) | of_rollouts

    def drain_advantages(self) -> dict[str, dict[int, float]]:
        """Return the mean advantage of the rollouts trained since the last call, by uid and row."""
        advantages, self._advantages = self._advantages, {}
        return advantages

    def _get_derived(self, groups: Mapping[str, Columns]) -> Mapping[str, Columns]:
        """Return the derived columns of groups by uid, from the step's plan if a plan exists."""
        if self._plan is not None or self._task.settings.scope == "step":
            return self._current_plan.get_derived(groups)
        return derive_columns(self._task.spec, self._task.settings, groups)

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        """Return the loss denominator of an update, given the sums of its micro-batches."""
        return self._task.compute_loss_denominator(sums)

    def update(self, loss_denominator: float, version: int = 0) -> dict[str, float]:
        """Update with the gradient of all ranks' summed losses divided by `loss_denominator`.

        Returns the gradient norm before clipping and the learning rate, that of the training step
        of `version`, whatever its updates had to train. A denominator of 0 means
        that all tokens were masked: the update is skipped, since AdamW's momentum would move the
        parameters even with a zero gradient. Raises StreamError, leaving the parameters unchanged,
        if the gradient is not finite.
        """
        name = self._task.name
        lr = self._config.compute_lr(version, self._num_steps)
        if loss_denominator == 0:
            return {f"{name}/grad_norm": 0.0, f"{name}/lr": lr}
        metrics = self._add_pretraining_loss(loss_denominator)
        self._optimizer_offload.restore_state()
        with self._limit_wait("the optimizer"):
            norm = self._backend.update(divisor=loss_denominator, lr=lr)
        if not math.isfinite(norm):
            raise StreamError(
                f"update {self.num_updates}: the gradient's norm is {norm}; skipped the update"
            )
        self.num_updates += 1
        return {**metrics, f"{name}/grad_norm": norm, f"{name}/lr": lr}

    def _add_pretraining_loss(self, loss_denominator: float) -> dict[str, float]:
        """Add the gradient of the pretraining loss to the update; return the metric loss/ptx.

        The gradient is multiplied by `loss_denominator`, by which `update` divides.
        """
        if self._pretraining is None:
            return {}
        total = torch.zeros((), device=get_local_device())
        with self._limit_wait("pretraining"):
            for loss in self._pretraining.compute_losses(
                self.num_updates,
                self._backend.forward,
                dp_rank=self._config.get_dp_rank(self.rank),
                dp_size=self._config.dp_size,
            ):
                self._backend.backward(loss * loss_denominator)
                total += loss.detach()
            dist.all_reduce(total)
        # Ranks of the same micro-batches train the same texts, so the sum counts each that often.
        return {"loss/ptx": total.item() / self._config.ranks_per_batch}

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each trained parameter once, in the order of `order_for_fusion`.

        With LoRA these are the adapters and their scale. Exhaust the iterator on every rank.
        Tensors may be views that the next update changes.
        """
        with self._limit_wait("gathering the parameters"):
            yield from self._backend.full_state()
            if self._config.lora_rank:
                yield LORA_SCALE, torch.tensor(self._config.lora_alpha / self._config.lora_rank)
            # The generator copies these tensors on another CUDA stream. Micro-batches that another
            # thread has queued meanwhile need not be waited for.
            synchronize_stream()

    def reshard_to_generator(
        self, served: ShardStorage | None, version: int
    ) -> ReshardingStats | None:
        """Write the trained parameters into this rank's generator as `version`. Collective.

        `served` is the generator's storage, the same at every call; None if it cannot be written
        into. Pause the generator before each update and until the call for that update returns,
        because trained shards may live in its storage (`alias_into`). Returns None, on all ranks
        and at every call, if a rank cannot reshard; use `full_state` then. Raises DeadlineError if
        a rank times out.
        """
        if self._config.lora_rank:
            return None
        with self._limit_wait("resharding the parameters"):
            try:
                stats = self._resharder.run(self._backend, served, version)
                # The generator uses another CUDA stream.
                synchronize_device()
                return stats
            except WeightsError as error:
                # After a failed collective the ranks are out of sync and cannot retry.
                raise DeadlineError(str(error)) from error

    def count_received_bytes(self, gathered: Mapping[str, Tensor]) -> int:
        """Return the bytes of gathered parameters that came from other ranks.

        `gathered` are the tensors of an exhausted `full_state`.
        """
        if not self.has_sharded_params:
            return 0
        local_bytes = sum(tensor.nbytes for _, tensor, _ in self._backend.iter_forward_shards())
        return sum(t.nbytes for name, t in gathered.items() if name != LORA_SCALE) - local_bytes

    @property
    def vocab_size(self) -> int:
        size: int = self._backend.module.config.get_text_config().vocab_size
        return size

    def compute_token_logprobs(self, token_ids: Array) -> Array:
        """Compute the logprob of each token of a sequence, int32 [T]; returns float32 [T].

        The first logprob is 0.
        """
        ids = torch.from_numpy(token_ids).long()[None].to(get_local_device())
        with self._limit_wait("a logprob check"), torch.no_grad():
            scores = compute_token_logprobs(
                self._backend.forward, ids, torch.ones_like(ids, dtype=torch.bool), temperature=1.0
            )
        logprobs: Array = scores.logprobs[0].cpu().numpy()
        return logprobs

    def offload_optimizer(self) -> None:
        """Free the memory of the optimizer's state until the next update or checkpoint.

        The state moves to host memory or disk, unless it stays in a GPU's host memory anyway.
        Raises StreamError if there is no space for it.
        """
        if not (self._config.offload_optimizer and has_local_gpu()):
            self._optimizer_offload.offload_state()

    def save_training_state(self, directory: Path) -> None:
        """Write parameters, optimizer state and random state for resuming.

        Raises NoSpaceError if the disk is full, else CheckpointError; training can go on.
        """
        self._optimizer_offload.restore_state()
        backend, adapters = self._backend, _describe_adapters(self._config)
        with self._allow_slow_ranks(SAVE_TIMEOUT_S), wrap_checkpoint_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            step = save_state(directory, self.rank, backend.iter_fragments(), backend.optimizer)
            save_rng(directory, self.rank)
            if self.rank == 0:
                write_progress(directory, TrainerProgress(2, self.num_updates, step, adapters))

    def load_training_state(self, directory: Path) -> None:
        """Load a state saved by any backend, ZeRO stage and number of ranks.

        Call it only between updates, without accumulated gradients. Raises CheckpointError if the
        state belongs to another model or other adapters.
        """
        self._optimizer_offload.restore_state()
        progress, backend = read_progress(directory), self._backend
        adapters = _describe_adapters(self._config)
        if progress.adapters != adapters:
            texts = [text or "no adapters" for text in (progress.adapters, adapters)]
            raise CheckpointError(f"{directory} was written with {texts[0]}, not {texts[1]}")
        with self._limit_wait("loading"):
            load_state(
                *(directory, progress.step, backend.iter_fragments(), backend.optimizer),
                backend.iter_shards(),
            )
            backend.refresh_params()
            restore_rng(directory, self.rank)
        self.num_updates = progress.num_updates

    def save_model(self, directory: Path) -> None:
        """Write the full model and its tokenizer as a Hugging Face directory, on rank 0.

        Parameters are gathered one at a time. All ranks must call it, since gathering may be
        collective.
        """
        with self._allow_slow_ranks(SAVE_TIMEOUT_S), keep_heap_compact():
            state = self.merged_state()
            try:
                if self.rank == 0:
                    self._write_model(directory, state)
            finally:
                # Other ranks gather, too, whatever happens here.
                for _ in state:
                    pass

    def _write_model(self, directory: Path, state: Iterator[tuple[str, Tensor]]) -> None:
        saved = ((n, tensor.cpu()) for n, tensor in state if self._task.is_own(n))
        with wrap_checkpoint_errors(directory):
            write_hf_model(
                directory,
                self._backend.module,
                saved,
                tokenizer_from=self._task.model_path,
                dtype=resolve_trainer_dtype(self._config),
            )

    def merged_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of the full model's parameters, LoRA adapters merged.

        Without LoRA this is `full_state`. With LoRA only rank 0 yields parameters, on the CPU.
        Exhaust the iterator on every rank.
        """
        if not self._config.lora_rank:
            yield from self.full_state()
            return
        trained = {}
        for name, tensor in self.full_state():
            if self.rank == 0:
                trained[name] = tensor.cpu()
        if self.rank:
            return
        cpu, path = torch.device("cpu"), self._task.model_path
        full = build_full_weights(trained, self._parameters, model_path=path, device=cpu)
        dtype = resolve_trainer_dtype(self._config)
        for name in self._parameters.unique_names:
            if self._task.is_own(name):
                yield name, full[name] if name in trained else full[name].to(dtype)

    @property
    def _current_plan(self) -> "StepPlan":
        assert self._plan is not None, "call plan_step first: the algorithm has scope step"
        return self._plan

    def _limit_wait(self, operation: str) -> AbstractContextManager[None]:
        return super()._limit_wait(f"{operation} of update {self.num_updates}")


def _describe_adapters(config: TrainerConfig) -> str:
    settings = ("lora_rank", "lora_alpha") if config.lora_rank else ()
    return " ".join(f"{name}={vars(config)[name]}" for name in settings)


class StepPlan:
    """Columns computed ahead for a training step: derived columns, proximal logprobs and a mask.

    Derived columns cover all groups of the step. Proximal logprobs, those of the policy at the
    start of the step, and the mask `near` of the tokens that the correction keeps cover only this
    rank's rollouts; a rank keeps its rollouts through all epochs.
    """

    def __init__(self, settings: AlgorithmSettings, derived: Mapping[str, Columns]) -> None:
        self._derived = {uid: dict(columns) for uid, columns in derived.items()}
        self._settings, self._correction = settings, settings.correction
        self._weight_sums = np.zeros(2)
        self._squared_log_ratios: list[tuple[RolloutIndex, slice, Array]] = []
        self.has_proximal_logprobs = any(PROXIMAL_COLUMN in columns for columns in derived.values())

    def get_derived(self, uids: Iterable[str]) -> dict[str, Columns]:
        """Return the columns computed so far for these groups, by uid."""
        return {uid: self._derived[uid] for uid in uids}

    def add_columns(
        self,
        groups: Mapping[str, Columns],
        picks: Sequence[RolloutIndex],
        new_columns: Mapping[str, Array],
        weight_sums: Array,
    ) -> None:
        """Store columns [B, T] of picked rollouts, found before the step's first update.

        `picks` are (uid, index of the rollout in its group), in the order of the rows. The columns
        are proximal logprobs, results of `correct_before_updates`, norms of scores, and entropies,
        as HIGH_ENTROPY until `sync_correction`.
        """
        self._weight_sums += weight_sums
        for i, (uid, index) in enumerate(picks):
            columns = groups[uid]
            tokens = find_token_slice(columns["lengths"], index)
            rows = {name: x[i][: tokens.stop - tokens.start] for name, x in new_columns.items()}
            for name, row in rows.items():
                self._fill_column(uid, name, tokens, row)
            if self._settings.corrects_before_updates:
                log_ratio = rows[PROXIMAL_COLUMN] - columns["generator_logprobs"][tokens]
                episode = (
                    int(columns[EPISODE_COLUMN][index]) if EPISODE_COLUMN in columns else index
                )
                self._squared_log_ratios.append(
                    ((uid, episode), tokens, np.square(log_ratio, dtype=np.float64))
                )

    def sync_correction(self, *, ranks_per_batch: int) -> set[RolloutIndex]:
        """Finish weights and the mask `near`; return episodes of which it keeps no token.

        Collective; call it after the last `add_columns`. With `second_moment_threshold`,
        the mask loses tokens whose log ratio, proximal minus generator logprob, exceeds a limit
        that `second_moment_limit` computes from the squares of all ranks. Those of
        `ranks_per_batch` consecutive ranks are equal and count once. With `normalize_weights`,
        weights are divided by their mean over all ranks. With `top_entropy`, HIGH_ENTROPY becomes
        the mask of the tokens of highest entropy. Episodes, of all ranks, are (uid, index).
        """
        if not self._settings.corrects_before_updates:
            return set()
        if (share := self._settings.top_entropy) is not None:
            own = [np.zeros(0, np.float32)]
            for (uid, _), tokens, _ in self._squared_log_ratios:
                columns = self._derived[uid]
                own.append(columns[HIGH_ENTROPY][tokens][columns["loss_mask"][tokens]])
            entropies = np.concatenate(gather_objects(np.concatenate(own))[::ranks_per_batch])
            limit = high_entropy_limit(torch.from_numpy(entropies), share=share)
            for columns in self._derived.values():
                if HIGH_ENTROPY in columns:
                    columns[HIGH_ENTROPY] = columns[HIGH_ENTROPY] >= limit
        if self._correction.second_moment_threshold is not None:
            unmasked = [
                squares[self._derived[uid]["loss_mask"][tokens]]
                for (uid, _), tokens, squares in self._squared_log_ratios
            ]
            rank_squares = gather_objects(np.concatenate([np.zeros(0), *unmasked]))[
                ::ranks_per_batch
            ]
            limit = second_moment_limit(
                torch.from_numpy(np.concatenate(rank_squares)),
                threshold=self._correction.second_moment_threshold,
            )
            for (uid, _), tokens, squares in self._squared_log_ratios:
                self._derived[uid]["near"][tokens] &= squares <= limit
        if self._correction.normalize_weights:
            total, count = sum(gather_objects(self._weight_sums)[::ranks_per_batch])
            # Weights of 0 stay 0.
            mean = total / count if total else 1.0
            for (uid, _), tokens, _ in self._squared_log_ratios:
                self._derived[uid]["policy_weights"][tokens] /= mean
        trained, kept = (
            {
                (uid, episode)
                for (uid, episode), tokens, _ in self._squared_log_ratios
                if self._derived[uid][name][tokens].any()
            }
            for name in ("loss_mask", "near")
        )
        rejected: list[set[RolloutIndex]] = gather_objects(trained - kept)
        return set[RolloutIndex]().union(*rejected)

    def gather_score_norms(self, *, ranks_per_batch: int) -> dict[str, Columns]:
        """Return the norms of scores of all ranks' rollouts by uid, if any. Collective."""
        if not self._settings.reads_score_norms:
            return {}
        own = {
            uid: columns.pop(SCORE_NORMS)
            for uid, columns in self._derived.items()
            if SCORE_NORMS in columns
        }
        norms: dict[str, Columns] = {}
        for part in gather_objects(own)[::ranks_per_batch]:
            for uid, column in part.items():
                # A rank has 0 for the rollouts of others.
                norms[uid] = {SCORE_NORMS: norms.get(uid, {SCORE_NORMS: 0})[SCORE_NORMS] + column}
        return norms

    def replace_derived(self, derived: Mapping[str, Columns]) -> None:
        """Replace derived columns, by uid; keep the columns computed since."""
        for uid, columns in derived.items():
            self._derived[uid] |= columns

    def _fill_column(self, uid: str, name: str, tokens: slice, values: Array) -> None:
        """Write values for the tokens of a rollout into a column of its group."""
        shape = (len(self._derived[uid]["loss_mask"]), *values.shape[1:])
        zeros = np.zeros(shape, values.dtype)
        self._derived[uid].setdefault(name, zeros)[tokens] = values


def write_hf_model(
    directory: Path,
    module: PreTrainedModel,
    parameters: Iterable[tuple[str, Tensor]],
    *,
    tokenizer_from: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a Hugging Face directory of a trained model.

    `parameters` are names and trained values on the CPU, tied ones once; they are written as they
    come, at most a file at a time in memory. Buffers and config come from `module`, tokenizer and
    generation_config.json from the directory `tokenizer_from`. The latter file is copied because
    transformers refuses to save a generation config with contradictions, such as a temperature with
    greedy decoding. `dtype` is that of the values, by default the module's.
    """
    with _reset_generation_config(module):
        module.save_pretrained(directory, state_dict={})
    if dtype not in (None, module.dtype):
        module.config.dtype = dtype
        module.config.save_pretrained(directory)
    # state_dict() omits non-persistent buffers, such as those of rotary embeddings.
    module_state, buffers = module.state_dict(), dict(module.named_buffers())
    saved_buffers = ((name, module_state[name].cpu()) for name in module_state.keys() & buffers)
    _write_weights(directory, _restore_layout(module, chain(parameters, saved_buffers)))
    defaults = Path(tokenizer_from) / GENERATION_CONFIG
    if module.can_generate() and defaults.is_file():
        shutil.copyfile(defaults, directory / GENERATION_CONFIG)
    load_tokenizer(tokenizer_from).save_pretrained(directory)


def _restore_layout(
    module: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with the names and shapes of the files that the module was loaded from.

    Tensors that make up a stored one, such as the parts of a fused matrix, wait for each other.
    """
    loaded_by: list[Any] = vars(module).get("_weight_conversions") or []
    reverse = [conversion.reverse_transform() for conversion in reversed(loaded_by)]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]

    def find_stored_name(name: str) -> str:
        stored_name: str = rename_source_key(name, renamings, converters, reverse=True)[0]
        return stored_name

    # Adapters move a layer's weight into base_layer.
    names = (name.replace(".base_layer.", ".") for name in module.state_dict())
    num_parts = Counter(map(find_stored_name, names))
    waiting = defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in tensors:
        stored_name = find_stored_name(name)
        waiting[stored_name][name] = tensor
        if not loaded_by:
            yield from waiting.pop(stored_name).items()
        elif len(waiting[stored_name]) >= num_parts[stored_name]:
            yield from revert_weight_conversion(module, waiting.pop(stored_name)).items()
    for parts in waiting.values():
        yield from revert_weight_conversion(module, parts).items()


def _write_weights(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors into model.safetensors, or into several files and their index."""
    files, total_bytes = list[Path](), 0
    weight_map: dict[str, int] = {}
    for batch in batch_tensors((name, tensor.contiguous()) for name, tensor in tensors):
        weight_map |= dict.fromkeys(batch, len(files))
        total_bytes += sum(tensor.nbytes for tensor in batch.values())
        files.append(directory / f"model-{len(files) + 1:05d}.partial")
        save_tensors(files[-1], batch, {"format": "pt"})
    single, index = directory / WEIGHTS_FILE, directory / WEIGHTS_INDEX
    for stale in (single, index):
        stale.unlink(missing_ok=True)
    if len(files) == 1:
        files[0].rename(single)
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, file_name in zip(files, names, strict=True):
        file.rename(directory / file_name)
    content = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: names[number] for name, number in weight_map.items()},
    }
    write_atomic(index, json.dumps(content, indent=2, sort_keys=True) + "\n")


@contextmanager
def _reset_generation_config(module: PreTrainedModel) -> Iterator[None]:
    if not module.can_generate():
        yield
        return
    original = module.generation_config
    module.generation_config = type(original)()
    try:
        yield
    finally:
        module.generation_config = original


@dataclass(frozen=True)
class _RankShards:
    """Facts about a rank that all ranks exchange for planning the transfer.

    `train_shards` and `serve_shards` are the rank's parts of parameters in training and generation;
    `dtypes` are those of generation.
    """

    train_shards: Mapping[str, TensorShard]
    serve_shards: Mapping[str, TensorShard]
    dtypes: Mapping[str, torch.dtype]
    node: str


class WeightResharder:
    """Writes versions from the trainer ranks into this rank's generator, by one plan for all.

    Used in colocated runs where the layouts of training and generation differ, or several ranks
    share a generator (HybridFlow). Shards that a rank trains and serves stay in place; missing
    shards are received once, in buckets, without staging a full model. The transfer is planned
    once, from the shards that each rank trains and serves, and executed for every version. After
    planning, ranks move their trained shards into the generator's memory where the layout allows,
    which saves those copies. If the dtypes differ, each rank casts its shards first.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_planned = False
        self._executor: ReshardingExecutor | None = None
        self._dtypes: Mapping[str, torch.dtype] = {}

    def run(
        self, backend: TrainingBackend, served: ShardStorage | None, version: int
    ) -> ReshardingStats | None:
        """Fill the generator's parameters with `version` while it is paused. Collective.

        `served` is the storage of this rank's generator, the same at every call, or None if
        resharding cannot write into the generator. The first call plans. Returns None at every call
        if any rank passes None, or if trained and served parameters differ. Raises WeightsError if
        the ranks pass different versions or a rank times out.
        """
        if not self._is_planned:
            self._plan_transfer(backend, served)
            self._is_planned = True
            if self._executor is not None and served is not None:
                backend.alias_into(served)
        if self._executor is None or served is None:
            return None
        buffers, shards = {}, {}
        for name, tensor, shard in backend.iter_forward_shards():
            buffers[name], shards[name] = tensor.to(self._dtypes[name]), shard
        return self._executor.run(create_from_buffers(buffers, shards, version=version), served)

    def _plan_transfer(self, backend: TrainingBackend, served: ShardStorage | None) -> None:
        """Make the executor of the transfer, if resharding is possible. Collective."""
        local_shards = {name: (tensor, shard) for name, tensor, shard in backend.iter_shards()}
        descriptions: list[_RankShards | None] = gather_objects(
            _describe_rank(local_shards, served)
        )
        ranks = [rank_shards for rank_shards in descriptions if rank_shards is not None]
        if len(ranks) < len(descriptions):
            return
        model = _merge_served_specs(ranks)
        trained_names = {name for rank_shards in ranks for name in rank_shards.train_shards}
        if {spec.name for spec in model.tensors} != trained_names:
            return
        for rank_shards in ranks:
            self._dtypes = {**self._dtypes, **rank_shards.dtypes}
        self._executor = create_least_bytes_executor(
            ModelLayout(model, {i: r.train_shards for i, r in enumerate(ranks)}),
            ModelLayout(model, {i: r.serve_shards for i, r in enumerate(ranks)}),
            cluster=make_nodes([rank_shards.node for rank_shards in ranks]),
            bucket_bytes=BUCKET_BYTES,
            timeout_s=self._timeout_s,
        )


def _describe_rank(
    local_shards: Mapping[str, tuple[Tensor, TensorShard]], served: ShardStorage | None
) -> _RankShards | None:
    """Return this rank's shards for planning; None if it trains and serves on different devices."""
    if served is None or any(tensor.device != served.device for tensor, _ in local_shards.values()):
        return None
    return _RankShards(
        train_shards={name: shard for name, (_, shard) in local_shards.items()},
        serve_shards={
            name: TensorShard(name, box.shape, ((box, (0,) * len(box.shape)),))
            for name, box, _ in served
        },
        dtypes={name: view.dtype for name, _, view in served},
        node=socket.gethostname(),
    )


def make_nodes(nodes: Sequence[str]) -> NodeTopology:
    """Return the topology of the ranks; `nodes` names the node of each rank.

    If nodes have unequal numbers of ranks, all ranks count as a single node, so that planning
    minimizes the number of bytes only.
    """
    sizes = [len(list(ranks)) for _, ranks in groupby(nodes)]
    return NodeTopology(sizes[0] if len(set(sizes)) == 1 else len(nodes))


def _merge_served_specs(ranks: Sequence[_RankShards]) -> ModelSpec:
    """Return names, shapes and item sizes of the full model, inferred from all served shards."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for rank_shards in ranks:
        for name, shard in rank_shards.serve_shards.items():
            (box,) = shard.boxes
            shapes[name] = tuple(map(max, shapes.get(name, box.stop), box.stop))
            sizes[name] = rank_shards.dtypes[name].itemsize
    specs = (TensorSpec(name, shape, (0,), itemsize=sizes[name]) for name, shape in shapes.items())
    return ModelSpec(tuple(specs), 1)
