"""A rank of a role's model, which scores groups; `ModelTrainer` is a rank that trains as well.

A model that only scores (a reference, a shadow critic, a reward model) is loaded, sharded and
packed like a trained one, by the same code, and has no optimizer.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from streamrl.buffer.micro_batch_schedule import MicroBatch, pack_rollouts
from streamrl.dataflow import REF_LOGPROBS
from streamrl.distributed.devices import get_local_device, has_run_gpus
from streamrl.distributed.process_group import (
    allow_slow_ranks,
    gather_objects,
    join_process_group,
    translate_collective_errors,
)
from streamrl.engines.dtypes import resolve_loading_dtype, resolve_trainer_dtype
from streamrl.engines.memory.peak_memory import keep_heap_compact
from streamrl.engines.models.activation_checkpointing import run_mlps_in_chunks
from streamrl.engines.models.layer_offload import keep_layers_on_host
from streamrl.engines.models.lora import disable_adapters
from streamrl.engines.models.packed_rows import join_sequence_group, share_tokens
from streamrl.engines.models.stored_weights import StoredWeights
from streamrl.engines.trainer_config import LOAD_TIMEOUT_S, TrainerConfig
from streamrl.engines.training.collate import build_batch, find_token_slice
from streamrl.engines.training.tasks import ModelTask
from streamrl.engines.training.training_backend import TrainingBackend, make_backend
from streamrl.messages import COLUMN_SPECS, Array, Columns
from streamrl.weights.parameters import ParameterSet, build_full_weights


class ModelRank:
    """A rank of a model. All ranks must call the same methods in the same order, except `close`.

    With several ranks, MASTER_ADDR and MASTER_PORT in the environment are rank 0's host and a free
    port. A collective raises DeadlineError after `collective_timeout_s`; the rank is unusable
    afterwards. A model that only scores on one rank runs no collective, so its process may be one
    of the ranks of another model.
    """

    _is_trained = False

    def __init__(self, task: ModelTask, *, config: TrainerConfig, rank: int = 0) -> None:
        """Join the process group, if there are several ranks or it trains, and load the model."""
        torch.set_num_threads(config.resolve_threads(on_gpu=has_run_gpus()))
        if config.world_size > 1 or self._is_trained:
            join_process_group(
                rank=rank, world_size=config.world_size, timeout_s=config.collective_timeout_s
            )
        self.rank = rank
        self._task = task
        self._config = config
        with self._allow_slow_ranks(LOAD_TIMEOUT_S), keep_heap_compact():
            self._backend = self._load_model()

    def _load_model(self) -> TrainingBackend:
        """Load the task's model and shard it."""
        config, is_sharded = self._config, self._config.has_sharded_params
        resolve_dtype = resolve_loading_dtype if self._is_trained else resolve_trainer_dtype
        module = self._task.load_model(resolve_dtype(config), on_meta=is_sharded)
        weights = StoredWeights(module, self._task.model_path) if is_sharded else None
        self._parameters = ParameterSet.from_module(module)
        if config.sequence_parallel > 1:
            share_tokens(
                module,
                join_sequence_group(
                    world_size=config.world_size,
                    size=config.sequence_parallel,
                    tensor_parallel=config.tensor_parallel,
                ),
            )
        self._prepare_module(module)
        rests_on_host = self._task.options.keeps_layers_on_host
        backend = make_backend(module, config, weights, rests_on_host=rests_on_host)
        if rests_on_host:
            keep_layers_on_host(module)
        return backend

    def _prepare_module(self, module: PreTrainedModel) -> None:
        """Change the model before it is sharded: one that only scores gets no gradients."""
        module.requires_grad_(False)
        if self._config.tensor_parallel == 1:
            run_mlps_in_chunks(module)

    @property
    def is_first_of_batch(self) -> bool:
        """Whether this rank is the first of those that compute the same micro-batches."""
        return self.rank % self._config.ranks_per_batch == 0

    def find_common(self, keys: Sequence[Any]) -> Sequence[Any]:
        """Return those keys that all ranks of the same micro-batches have, in this rank's order.

        A collective if there are several such ranks.
        """
        size = self._config.ranks_per_batch
        if size == 1:
            return keys
        first = self.rank - self.rank % size
        keys_by_rank = self.gather_objects(list(keys), "their groups")
        others = keys_by_rank[first : first + size]
        return [key for key in keys_by_rank[first] if all(key in rank_keys for rank_keys in others)]

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Return the values of all ranks; a collective. name: of the values, for errors."""
        with self._limit_wait(name):
            return gather_objects(value)

    @property
    def has_sharded_params(self) -> bool:
        return self._backend.has_sharded_params

    def compute_columns(
        self, groups: Sequence[Columns], column: str, *, micro_batch_tokens: int
    ) -> list[Array]:
        """Compute one column of each group, see `score_groups`."""
        scored = self.score_groups(groups, (column,), micro_batch_tokens=micro_batch_tokens)
        return [columns[column] for columns in scored]

    def score_groups(
        self, groups: Sequence[Columns], names: Sequence[str], *, micro_batch_tokens: int
    ) -> list[Columns]:
        """Compute the columns of a scoring call, with entries per token, of each group.

        names: ref_logprobs, at the sampling temperature and with LoRA adapters switched off,
        perhaps with those of the likeliest words, or a critic's values. Entries are 0 where
        loss_mask is false. The columns of a group must include token_ids, loss_mask and lengths. On
        CPUs micro-batches have the rollouts of one group, so the result does not depend on the
        other groups. Ranks may have different groups, or none. A collective if the parameters are
        sharded. Raises ValueError if a rollout exceeds `micro_batch_tokens`.
        """
        forward, module = self._backend.forward, self._backend.module
        columns_of = {str(number): columns for number, columns in enumerate(groups)}
        results: dict[str, dict[str, Array]] = {uid: {} for uid in columns_of}
        rounds = self._pack_groups(columns_of, micro_batch_tokens)
        without_adapters = disable_adapters(module) if REF_LOGPROBS in names else nullcontext()
        # Not inference_mode: gathered parameters stay cached, and training reuses them.
        with self._limit_wait(names[0]), without_adapters, torch.no_grad():
            dummies: list[MicroBatch] = [()] * (self._find_most_rounds(len(rounds)) - len(rounds))
            for picks in [*rounds, *dummies]:
                derived: dict[str, Columns] = {uid: {} for uid, _ in picks}
                batch = build_batch(
                    columns_of, picks, derived=derived, token_columns=("token_ids",)
                ).to(get_local_device())
                for name, tensor in self._task.compute_columns(forward, batch, names).items():
                    values = tensor.cpu().numpy()
                    if name in COLUMN_SPECS:
                        values = values.astype(COLUMN_SPECS[name].dtype, copy=False)
                    # A dummy micro-batch has a row but no pick.
                    for (uid, index), row in zip(picks, values, strict=bool(picks)):
                        mask = columns_of[uid]["loss_mask"]
                        if name not in results[uid]:
                            shape = (len(mask), *row.shape[1:])
                            results[uid][name] = np.zeros(shape, row.dtype)
                        column = results[uid][name]
                        tokens = find_token_slice(columns_of[uid]["lengths"], index)
                        row = row[: tokens.stop - tokens.start]
                        column[tokens][mask[tokens]] = row[mask[tokens]]
        return [{name: column.ravel() for name, column in c.items()} for c in results.values()]

    def _pack_groups(
        self, columns_of: Mapping[str, Columns], micro_batch_tokens: int
    ) -> list[MicroBatch]:
        """Return micro-batches of rollouts of the groups: of several groups only on a GPU.

        Many groups of one rollout would take as many passes, and gather a sharded model as often.
        """
        rollouts = [
            [(uid, index, int(length)) for index, length in enumerate(columns["lengths"])]
            for uid, columns in columns_of.items()
        ]
        parts = [list(chain(*rollouts))] if has_run_gpus() else rollouts
        return [
            picks
            for part in parts
            for (picks,) in pack_rollouts(part, dp_size=1, micro_batch_tokens=micro_batch_tokens)
        ]

    def compute_logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Compute a reward model's logit of each row of token ids, in one forward pass.

        Ranks may have different rows; a rank without rows computes a dummy. A collective if the
        parameters are sharded.
        """
        module, device = self._backend.module, get_local_device()
        tensors = [torch.tensor(row) for row in rows or [[0]]]
        pad_id = module.config.get_text_config().pad_token_id
        token_ids = pad_sequence(tensors, batch_first=True, padding_value=pad_id)
        lengths = torch.tensor([len(row) for row in tensors])
        mask = torch.arange(token_ids.shape[1]) < lengths[:, None]
        batch = TensorDict({"token_ids": token_ids, "attention_mask": mask}, device=device)
        with torch.no_grad(), self._limit_wait("logits"):
            logits = self._task.compute_column(self._backend.forward, batch, "logits")
        return logits.tolist()[: len(rows)]

    def _find_most_rounds(self, num_rounds: int) -> int:
        """Return the most forward passes of any rank if they are collectives, else this rank's."""
        if not self.has_sharded_params:
            return num_rounds
        most = torch.tensor(num_rounds, device=get_local_device())
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def build_full(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return all parameters of the model, by name, from the published tensors of a version.

        LoRA adapters are merged, on access, into the weights of the model's directory. Raises
        WeightsError if the parameters belong to another model.
        """
        own = {name: value for name, value in tensors.items() if self._task.is_own(name)}
        return build_full_weights(
            own, self._parameters, model_path=self._task.model_path, device=get_local_device()
        )

    def copy_weights(self, full: Mapping[str, Tensor] | None) -> None:
        """Copy this rank's part of all parameters into a model that is not trained. Collective.

        full: those of `build_full` on rank 0, which sends each to the other ranks; None elsewhere.
        """
        with self._limit_wait("a version"):
            self._backend.copy_full(full)

    def close(self) -> None:
        self._backend.close()

    def _allow_slow_ranks(self, wait_s: float) -> AbstractContextManager[None]:
        return allow_slow_ranks(wait_s, timeout_s=self._config.collective_timeout_s)

    def _limit_wait(self, operation: str) -> AbstractContextManager[None]:
        """Raise DeadlineError or RankLostError if a collective in the context misses other ranks.

        `operation` names the collective in the message.
        """
        timeout_s = self._config.collective_timeout_s
        return translate_collective_errors(
            f"rank {self.rank} waited {timeout_s:g} s for the other ranks in {operation}"
        )
