"""One rank of a model's trainer: micro-batches in, one optimizer update per step out.

A step is a stream. Micro-batches are trained as their groups arrive, each adding the gradient of a
plain sum; what the sum is to be divided by is known when the step is complete, and `step` divides
once, over all ranks and before clipping. So neither the cut into micro-batches nor the number of
ranks has a say in the update.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.buffer.assembly.packing import RolloutIndex
from streamrl.distributed.process_group import join_process_group, translate_collective_errors
from streamrl.engines.checkpoint.sharded_state import ParameterFragment
from streamrl.engines.checkpoint.trainer_checkpoint import load_trainer, save_trainer
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.models.forward import (
    compute_token_logprobs,
    get_local_device,
    synchronize_device,
)
from streamrl.engines.models.lora import add_lora_adapters
from streamrl.engines.models.save_model import write_hf_model
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.collate import build_batch, derive_columns
from streamrl.engines.training.deepspeed_backend import DeepSpeedBackend
from streamrl.engines.training.fsdp_tp_backend import FsdpTpBackend
from streamrl.engines.training.in_place_update import LazyWeightResharder
from streamrl.engines.training.optimizer_offload import OptimizerOffload
from streamrl.engines.training.pretraining import PretrainingLoss
from streamrl.engines.training.step_plan import StepPlan
from streamrl.engines.training.tasks import PolicyTask, TrainingTask
from streamrl.engines.training.torch_backend import TorchBackend
from streamrl.errors import DeadlineError, StreamError, WeightsError
from streamrl.files.atomic_write import wrap_checkpoint_errors
from streamrl.messages import Array, Columns
from streamrl.resharding import TensorShard
from streamrl.resharding.executors import ReshardingStats
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.lora_merge import LORA_SCALE, build_full_weights
from streamrl.weights.parameters import ParameterSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrainingBackend(Protocol):
    """Gradients and the optimizer. What is collective has to be called by all ranks alike."""

    @property
    def module(self) -> "PreTrainedModel":
        """The model."""
        ...

    @property
    def forward(self) -> Callable[..., Any]:
        """What to call for a forward pass. May be collective."""
        ...

    @property
    def has_sharded_params(self) -> bool:
        """Whether `full_state` is collective."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a summed loss. May be collective."""
        ...

    def step(self, *, divisor: float, lr: float) -> float:
        """Update with the gradient summed over ranks and divided; its norm before clipping.

        Collective. A norm that is not finite leaves the parameters as they are.
        """
        ...

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, whole, once each: one name of those that are tied. May be collective."""
        ...

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """What this rank keeps of what is trained, where it lies, and which part of it that is.

        Contiguous from its beginning; a step changes it. Nothing is moved.
        """
        ...

    def alias_into(self, served: ShardStorage) -> None:
        """Keep in the memory of this rank's generator what can lie there, from now on.

        It holds the same values; a step changes them there. The generator stands still from the
        step on until it takes the next version up.
        """
        ...

    def iter_optimizer_state(self) -> Iterable[Tensor]:
        """What this rank's optimizer keeps from step to step; parameters may be among it."""
        ...

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        """What this rank's optimizer updates of each parameter, and where it lies."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the fragments; its state lies as their owners do."""
        ...

    def refresh_params(self) -> None:
        """Compute with what `placed` has now, after it was filled anew. May be collective."""
        ...

    def load_legacy_state(self, directory: Path) -> None:
        """Read the state that the backend once wrote by itself. May be collective."""
        ...

    def close(self) -> None:
        """Leave the ranks."""
        ...


class ModelTrainer:
    """One rank. Every method but `close` has to be called by all ranks alike.

    With more than one rank, MASTER_ADDR and MASTER_PORT in the environment name rank 0's machine
    and a free port on it. What waits for other ranks raises DeadlineError after
    `collective_timeout_s`; the trainer is of no use after that.
    """

    def __init__(
        self,
        task: TrainingTask,
        *,
        config: TrainerConfig,
        rank: int = 0,
        pretraining: PretrainingLoss | None = None,
        num_steps: int | None = None,
    ) -> None:
        """`num_steps`: those of the run, which a schedule of the learning rate goes over."""
        torch.manual_seed(0)
        torch.set_num_threads(config.threads)
        join_process_group(
            rank=rank, world_size=config.world_size, timeout_s=config.collective_timeout_s
        )
        self.rank = rank
        self.num_updates = 0
        self._task = task
        self._config = config
        self._pretraining = pretraining
        self._num_steps = num_steps
        self._plan: StepPlan | None = None
        self._resharder = LazyWeightResharder(config.collective_timeout_s)
        module = task.load_model(resolve_trainer_dtype(config))
        self._parameters = ParameterSet.from_module(module)
        if config.lora_rank:
            add_lora_adapters(module, config)
        if config.gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        self._backend = _build_backend(module, config)
        self._optimizer_offload = OptimizerOffload(
            self._backend.iter_optimizer_state,
            not_of=lambda: (tensor for _, tensor, _ in self._backend.iter_shards()),
        )

    def set_adaptive_params(self, dials: Mapping[str, float]) -> None:
        """Train with these in the place of the settings of their names."""
        settings = self._task.settings.with_adaptive_params(dials)
        if settings != self._task.settings:
            self._task = self._task.with_settings(settings)

    def plan_step(
        self, groups: Mapping[str, Columns], derived: Mapping[str, Columns] | None = None
    ) -> None:
        """Derive advantages from all groups of the step, for a row that needs the whole of it.

        `derived` is what `derive_columns` made of them, where somebody has called it already.
        """
        task = self._task
        if derived is None:
            derived = derive_columns(task.spec, task.settings, groups)
        self._plan = StepPlan(task.settings, derived)

    def precompute_logprobs(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex]
    ) -> None:
        """Note what the policy as it is now says of the picked rollouts of the plan."""
        assert isinstance(self._task, PolicyTask)
        derived: dict[str, Columns] = {uid: {} for uid in groups}
        batch = build_batch(groups, picks, derived=derived, token_columns=("token_ids",))
        with self._limit_wait("a look ahead"), torch.no_grad():
            scores = self._task.score_batch(self._backend.forward, batch.to(get_local_device()))
        self._current_plan.add_proximal_logprobs(groups, picks, scores.logprobs.cpu().numpy())

    def sync_plan(self) -> None:
        """Agree with the other ranks on the plan, once all have looked at their rollouts."""
        with self._limit_wait("agreeing on a plan"):
            self._current_plan.sync_near_mask(tensor_parallel=self._config.tensor_parallel)

    def train_micro_batch(
        self, groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], version: int = 0
    ) -> dict[str, float]:
        """Forward and backward of the picked rollouts; sums for the step's metrics.

        `groups` holds the columns of every group picked from, whole: advantages compare all of its
        rollouts. `version` is that of the step. Without picks the rank only keeps the others
        company.
        """
        batch = build_batch(
            groups, picks, derived=self._get_derived(groups), token_columns=self._task.token_columns
        ).to(get_local_device())
        with self._limit_wait("a micro-batch"):
            if picks:
                loss, sums = self._task.compute_loss(self._backend.forward, batch, version=version)
            else:
                loss, sums = self._task.compute_zero_loss(self._backend.forward, batch), {}
            self._backend.backward(loss)
        if not sums:
            return {}
        values = torch.stack([value.double().cpu() for value in sums.values()]).tolist()
        return dict(zip(sums, values, strict=True))

    def _get_derived(self, groups: Mapping[str, Columns]) -> Mapping[str, Columns]:
        if self._plan is not None or self._task.settings.scope == "step":
            return self._current_plan.get_derived(groups)
        return derive_columns(self._task.spec, self._task.settings, groups)

    def compute_loss_denominator(self, sums: Mapping[str, float]) -> float:
        """What the summed loss of an update is divided by, from the sums of all ranks."""
        return self._task.compute_loss_denominator(sums)

    def step(self, normaliser: float) -> dict[str, float]:
        """Update with the gradient of the step's summed loss over `normaliser`, on all ranks.

        Reports the gradient's norm before clipping and the learning rate. A normaliser of 0 is a
        step in which no token counted, so the gradient is 0: no update, whose momentum would move
        the parameters all the same. Raises StreamError if the gradient is not finite, before it has
        touched the parameters.
        """
        name = self._task.name
        step = self.num_updates // self._task.settings.num_updates
        lr = self._config.compute_lr(step, self._num_steps)
        if normaliser == 0:
            return {f"{name}/grad_norm": 0.0, f"{name}/lr": lr}
        metrics = self._add_pretraining_loss(normaliser)
        self._optimizer_offload.restore_state()
        with self._limit_wait("the optimizer"):
            norm = self._backend.step(divisor=normaliser, lr=lr)
        if not math.isfinite(norm):
            raise StreamError(f"update {self.num_updates}: the gradient's norm is {norm}; not made")
        self.num_updates += 1
        return {**metrics, f"{name}/grad_norm": norm, f"{name}/lr": lr}

    def _add_pretraining_loss(self, normaliser: float) -> dict[str, float]:
        """Add the gradient of the pretraining loss, which the division to come must not touch."""
        if self._pretraining is None:
            return {}
        total = torch.zeros((), device=get_local_device())
        with self._limit_wait("pretraining"):
            for loss in self._pretraining.compute_losses(
                self.num_updates,
                self._backend.forward,
                share=self._config.get_dp_rank(self.rank),
                num_shares=self._config.dp_size,
            ):
                self._backend.backward(loss * normaliser)
                total += loss.detach()
            dist.all_reduce(total)
        # Ranks that are tensor parallel have the same texts.
        return {"loss/ptx": total.item() / self._config.tensor_parallel}

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, each parameter once, in the order of `side_by_side`.

        These are the whole parameters, or adapters and their scale. Exhaust it on every rank. A
        tensor may be a view, which the next step changes.
        """
        with self._limit_wait("gathering the parameters"):
            yield from self._backend.full_state()
            if self._config.lora_rank:
                yield LORA_SCALE, torch.tensor(self._config.lora_alpha / self._config.lora_rank)
            # A generator that is given these copies them on a stream of its own.
            synchronize_device()

    def reshard_to_generator(
        self, served: ShardStorage | None, version: int
    ) -> ReshardingStats | None:
        """Fill the parameters of this rank's generator with these, as `version`. Collective.

        `served` is where they lie, the same at every call; nothing is computed there meanwhile, nor
        from a step on until the switch after it: what the rank keeps may lie there, too. None if
        they cannot be filled from what the ranks keep; `full_state` has them then. Raises
        DeadlineError if a rank does not answer in time.
        """
        if self._config.lora_rank:
            return None
        with self._limit_wait("resharding the parameters"):
            try:
                moved = self._resharder.run(self._backend, served, version)
                # The generator computes on a stream of its own.
                synchronize_device()
                return moved
            except WeightsError as error:
                # Ranks that have lost each other cannot try again.
                raise DeadlineError(str(error)) from error

    def count_received_bytes(self, gathered: Mapping[str, Tensor]) -> int:
        """What came from other ranks of a `full_state` that this rank has exhausted."""
        if not self.has_sharded_params:
            return 0
        kept = sum(tensor.nbytes for _, tensor, _ in self._backend.iter_shards())
        return sum(t.nbytes for name, t in gathered.items() if name != LORA_SCALE) - kept

    @property
    def has_sharded_params(self) -> bool:
        """Whether `full_state` takes all ranks: nobody may do anything else meanwhile."""
        return self._backend.has_sharded_params

    @property
    def forward(self) -> Callable[..., Any]:
        """The model as it is, to be called for a forward pass.

        May be collective, see `has_sharded_params`.
        """
        return self._backend.forward

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows."""
        size: int = self._backend.module.config.get_text_config().vocab_size
        return size

    def compute_token_logprobs(self, token_ids: Array) -> Array:
        """What the policy says of the tokens of a sequence, int32 [T]: float32 [T], 0 first."""
        ids = torch.from_numpy(token_ids).long()[None].to(get_local_device())
        with self._limit_wait("a probe"), torch.no_grad():
            scores = compute_token_logprobs(
                self._backend.forward, ids, torch.ones_like(ids, dtype=torch.bool), temperature=1.0
            )
        found: Array = scores.logprobs[0].cpu().numpy()
        return found

    def offload_optimizer(self) -> None:
        """Give up the memory of the optimizer's state until it is needed.

        Raises StreamError if there is no room for it elsewhere.
        """
        self._optimizer_offload.offload_state()

    def save_training_state(self, directory: Path) -> None:
        """Write all that training needs to go on as if it had not stopped.

        Raises NoSpaceError, or CheckpointError, if the disk refuses; the trainer can go on.
        """
        self._optimizer_offload.restore_state()
        save_trainer(directory, self.rank, self._backend, self._config, self.num_updates)

    def load_training_state(self, directory: Path) -> None:
        """Go on from what `save` wrote, on any backend, in any stage, on any number of ranks.

        Raises CheckpointError if it is of another model or other adapters. Gradients since the last
        step have to be none.
        """
        self._optimizer_offload.restore_state()
        with self._limit_wait("loading"):
            self.num_updates = load_trainer(directory, self.rank, self._backend, self._config)

    def save_model(self, directory: Path) -> None:
        """Write the model, whole, and its tokenizer as a Hugging Face directory; rank 0 writes."""
        trained = self._gather_on_cpu()
        if self.rank == 0:
            state = dict(self._iter_merged(trained))
            path = self._task.model_path
            with wrap_checkpoint_errors(directory):
                write_hf_model(directory, self._backend.module, state, tokenizer_from=path)

    def merged_state(self) -> Iterator[tuple[str, Tensor]]:
        """As `full_state`, but the whole model also where adapters are trained: these are merged.

        Rank 0 has it then, on the CPU, one parameter after the other.
        """
        if not self._config.lora_rank:
            yield from self.full_state()
            return
        trained = self._gather_on_cpu()
        if self.rank == 0:
            yield from self._iter_merged(trained, self._parameters.unique_names)

    def _gather_on_cpu(self) -> dict[str, Tensor]:
        """What is trained, on the CPU of rank 0."""
        trained = {}
        for name, tensor in self.full_state():
            if self.rank == 0:
                trained[name] = tensor.cpu()
        return trained

    def _iter_merged(
        self, trained: Mapping[str, Tensor], names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """These parameters, or all, of the model others load, in the dtype they are trained in."""
        cpu, path = torch.device("cpu"), self._task.model_path
        full = build_full_weights(trained, self._parameters, model_path=path, device=cpu)
        dtype = resolve_trainer_dtype(self._config)
        for name in full if names is None else names:
            if self._task.is_saved(name):
                yield name, full[name] if name in trained else full[name].to(dtype)

    @property
    def _current_plan(self) -> StepPlan:
        assert self._plan is not None, "a step of scope step is planned first"
        return self._plan

    def close(self) -> None:
        """Release the engine and leave the ranks."""
        self._backend.close()

    def _limit_wait(self, doing: str) -> AbstractContextManager[None]:
        timeout_s = self._config.collective_timeout_s
        return translate_collective_errors(
            f"rank {self.rank} waited {timeout_s:g} s for the other ranks in {doing}"
            f" of update {self.num_updates}"
        )


def _build_backend(module: "PreTrainedModel", config: TrainerConfig) -> TrainingBackend:
    if config.backend == "deepspeed":
        return DeepSpeedBackend(module, config)
    return (
        FsdpTpBackend(module, config) if config.has_sharded_params else TorchBackend(module, config)
    )
