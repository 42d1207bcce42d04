"""DeepSpeed as the training backend: ZeRO stages 0 to 3, on nccl and on gloo.

A step here is open-ended: gradients of plain sums pile up until the caller knows what to divide
them by. So DeepSpeed is told to leave the accumulation to the caller, and the division is put where
it belongs, after the reduction over the ranks and before the clipping:

- ZeRO 1 to 3 divide by `loss_scale` there, which is made for fp16 and idle in float32 and
  bfloat16. `backward` multiplies by it, so it is 1 except during a step.
- The bfloat16 optimizer that stage 1 brings has no such thing: its float32 gradients, still this
  rank's own, are scaled before it steps.
- Stage 0 leaves all of it to the torch optimizer, and reports no norm: a hook before its step
  divides and clips.

DeepSpeed averages over the ranks; dividing by `divisor / world_size` makes that the sum again.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.distributed.process_group import bound_collectives
from streamrl.engines.checkpoint.sharded_state import Fragment
from streamrl.engines.models.forward import local_device
from streamrl.engines.trainer_config import BUCKET_ELEMENTS
from streamrl.engines.training.aliased_params import lay_side_by_side
from streamrl.engines.training.optimizer_offload import tensors_of
from streamrl.errors import CheckpointError
from streamrl.resharding import Shard, whole_shard
from streamrl.resharding.storage import Storage
from streamrl.weights.parameters import side_by_side

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig

TAG = "zero"
FORCE_PLAIN = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class DeepSpeedBackend:
    """One rank's DeepSpeed engine behind the trainer's face."""

    def __init__(self, module: "PreTrainedModel", config: "TrainerConfig") -> None:
        deepspeed = _import_deepspeed()
        self.module = module
        self._deepspeed = deepspeed
        self._clip = config.grad_clip
        self._stage, self._gathers = config.zero_stage, config.gathers
        lay_side_by_side(module)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            # From stage 1 on, ZeRO moves them into one block, in this order.
            [trained[name] for name in side_by_side(trained)],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
        )
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=engine_config(module, config)
        )
        self.forward = self._engine
        if self._stage == 0:
            optimizer.register_step_pre_hook(self._divide_and_clip)
        self._norm = 0.0
        self._scale = 1.0
        bound_collectives(config.collective_timeout_s)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a summed loss. Collective in stages 2 and 3."""
        self._engine.backward(loss)

    def step(self, *, divisor: float, lr: float) -> float:
        """Update with the gradient over all ranks divided by `divisor`; its norm before clipping.

        Collective. A norm that is not finite leaves the parameters as they are.
        """
        engine, optimizer = self._engine, self._engine.optimizer
        self._scale = divisor / dist.get_world_size()
        for group in optimizer.param_groups:
            group["lr"] = lr
        if self._stage == 0:
            engine.step()
            return self._norm
        if _is_bf16_optimizer(optimizer):
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.div_(self._scale)
            engine.step()
        else:
            optimizer.loss_scale = self._scale
            engine.step()
            optimizer.loss_scale = 1.0
        return float(engine.get_global_grad_norm())

    def _divide_and_clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad /= self._scale
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._clip or math.inf)
        if not norm.isfinite():
            optimizer.zero_grad()  # without gradients the step that follows changes nothing
        self._norm = norm.item()

    @property
    def gathers(self) -> bool:
        """Whether a rank has only its part of the parameters."""
        return self._gathers

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, whole, once each. Collective in stage 3: exhaust it."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        for name in side_by_side(trained):
            tensor: Tensor = trained[name].detach()
            if self.gathers:
                # Copied inside, yielded outside: a reader that stops must not hold up the ranks.
                with self._deepspeed.zero.GatheredParameters([trained[name]]):
                    tensor = trained[name].detach().clone()
            yield name, tensor

    def placed(self) -> Iterator[tuple[str, Tensor, Shard]]:
        """What this rank keeps of each: in stage 3 a run of its elements, else all of it.

        Those that stage 3 leaves whole on every rank besides are kept in runs as well.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if not self.gathers:
                yield name, parameter.detach(), whole_shard(name, tuple(parameter.shape))
                continue
            run = whole_shard(name, tuple(parameter.ds_shape)).flat_part(rank, world_size)
            if run is not None:
                yield name, parameter.ds_tensor, run

    def move_into(self, served: Storage) -> None:
        """Nothing: DeepSpeed keeps blocks of its own, which its reductions and updates work on."""

    def optimizer_state(self) -> Iterable[Tensor]:
        """Of this rank's part, with the master weights from stage 1 on."""
        yield from tensors_of(self._engine.basic_optimizer)
        if self.gathers:
            # Stage 3 shows them to its optimizer during a step alone.
            yield from self._engine.optimizer.fp32_partitioned_groups_flat

    def fragments(self) -> Iterator[Fragment]:
        """What ZeRO has this rank update: runs of the elements of each parameter, in flat blocks.

        All of them in stage 0, which leaves them to every rank.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        optimizer = self._engine.optimizer
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if self._stage == 0:
                whole = whole_shard(name, tuple(parameter.shape))
                yield Fragment(whole, parameter, is_copy=rank != 0)
            elif self.gathers:
                shape = tuple(parameter.ds_shape)
                run = whole_shard(name, shape).flat_part(rank, world_size)
                block, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                if run is not None:
                    yield Fragment(run, optimizer.fp32_partitioned_groups_flat[block], start)
            elif parameter._hp_mapping is not None:
                found = parameter._hp_mapping
                at, within = found.hp_fragment_address, found.lp_fragment_address
                whole = whole_shard(name, tuple(parameter.shape))
                run = replace(whole, run=(within.start, within.start + within.numel))
                yield Fragment(run, self._blocks[found.param_group_index], at.start)

    @property
    def _blocks(self) -> list[Tensor]:
        """The float32 blocks of stages 1 and 2, one for each group of parameters."""
        optimizer = self._engine.optimizer
        is_bf16 = _is_bf16_optimizer(optimizer)
        name = "fp32_groups_flat_partition" if is_bf16 else "single_partition_of_fp32_groups"
        blocks: list[Tensor] = getattr(optimizer, name)
        return blocks

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, on the blocks."""
        found: torch.optim.Optimizer = self._engine.basic_optimizer
        return found

    def refresh(self) -> None:
        """Gather what stage 3 leaves whole on every rank, once the ranks' parts have changed."""
        whole = self._engine.optimizer.persistent_parameters if self.gathers else []
        if whole:
            # Their whole copies go, unread; then each comes back from the ranks' parts.
            whole[0].partition(whole)
            whole[0].all_gather(whole)

    def load_pickled(self, directory: Path) -> None:
        """Read what DeepSpeed's own save_checkpoint wrote, which holds pickles: only plain ones.

        Collective; raises CheckpointError if there is nothing.
        """
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        known = [LossScaler, ZeroStageEnum, fragment_address]
        # DeepSpeed asks for whatever a pickle has; this outvotes it.
        with torch.serialization.safe_globals(known), _environment(FORCE_PLAIN, "1"):
            # What is frozen was not saved.
            path, _ = self._engine.load_checkpoint(
                str(directory), tag=TAG, load_module_strict=False
            )
        if path is None:
            raise CheckpointError(f"{directory} holds no DeepSpeed checkpoint")

    def close(self) -> None:
        """Release the engine and leave the ranks."""
        self._engine.destroy()
        self._deepspeed.comm.destroy_process_group()


def engine_config(module: "PreTrainedModel", config: "TrainerConfig") -> dict[str, Any]:
    """DeepSpeed's configuration of a trainer."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.grad_clip if config.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            # Below this a parameter stays whole on every rank.
            "stage3_param_persistence_threshold": 10 * module.config.hidden_size,
        },
    }
    if module.dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Which device this is; a launcher would have set it.
    os.environ["LOCAL_RANK"] = str(local_device().index or 0)
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import compiler
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    # DeepSpeed calls collectives by names that torch is about to drop: nothing a user can change.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    # Its shared-memory collectives for CPUs are built with a compiler on first use: over a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It loads Muon with every optimizer, and to compile that loads torch's compiler: a second.
    compiler.compile = lambda: compiler.dummy_decorator
    return deepspeed


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _is_bf16_optimizer(optimizer: Any) -> bool:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return isinstance(optimizer, BF16_Optimizer)
