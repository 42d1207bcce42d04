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

from streamrl.distributed.process_group import set_collective_timeout
from streamrl.engines.checkpoint.sharded_state import ParameterFragment
from streamrl.engines.models.forward import get_local_device
from streamrl.engines.trainer_config import BUCKET_ELEMENTS
from streamrl.engines.training.aliased_params import make_sisters_contiguous
from streamrl.engines.training.optimizer_offload import iter_optimizer_tensors
from streamrl.errors import CheckpointError
from streamrl.resharding import TensorShard, create_whole_shard
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import order_for_fusion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig

CHECKPOINT_TAG = "zero"
FORCE_WEIGHTS_ONLY_ENV = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class DeepSpeedBackend:
    """One rank's DeepSpeed engine behind the trainer's face."""

    def __init__(self, module: "PreTrainedModel", config: "TrainerConfig") -> None:
        deepspeed = _import_deepspeed()
        self.module = module
        self._deepspeed = deepspeed
        self._grad_clip = config.grad_clip
        self._zero_stage, self._has_sharded_params = config.zero_stage, config.has_sharded_params
        make_sisters_contiguous(module)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            # From stage 1 on, ZeRO moves them into one block, in this order.
            [trained[name] for name in order_for_fusion(trained)],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
        )
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=make_deepspeed_config(module, config)
        )
        self.forward = self._engine
        if self._zero_stage == 0:
            optimizer.register_step_pre_hook(self._divide_and_clip)
        self._grad_norm = 0.0
        self._grad_divisor = 1.0
        set_collective_timeout(config.collective_timeout_s)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a summed loss. Collective in stages 2 and 3."""
        self._engine.backward(loss)

    def step(self, *, divisor: float, lr: float) -> float:
        """Update with the gradient over all ranks divided by `divisor`; its norm before clipping.

        Collective. A norm that is not finite leaves the parameters as they are.
        """
        engine, optimizer = self._engine, self._engine.optimizer
        self._grad_divisor = divisor / dist.get_world_size()
        for group in optimizer.param_groups:
            group["lr"] = lr
        if self._zero_stage == 0:
            engine.step()
            return self._grad_norm
        if _is_bf16_optimizer(optimizer):
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.div_(self._grad_divisor)
            engine.step()
        else:
            optimizer.loss_scale = self._grad_divisor
            engine.step()
            optimizer.loss_scale = 1.0
        return float(engine.get_global_grad_norm())

    def _divide_and_clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad /= self._grad_divisor
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._grad_clip or math.inf)
        if not norm.isfinite():
            optimizer.zero_grad()  # without gradients the step that follows changes nothing
        self._grad_norm = norm.item()

    @property
    def has_sharded_params(self) -> bool:
        """Whether a rank has only its part of the parameters."""
        return self._has_sharded_params

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, whole, once each. Collective in stage 3: exhaust it."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        for name in order_for_fusion(trained):
            tensor: Tensor = trained[name].detach()
            if self.has_sharded_params:
                # Copied inside, yielded outside: a reader that stops must not hold up the ranks.
                with self._deepspeed.zero.GatheredParameters([trained[name]]):
                    tensor = trained[name].detach().clone()
            yield name, tensor

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """What this rank keeps of each: in stage 3 a run of its elements, else all of it.

        Those that stage 3 leaves whole on every rank besides are kept in runs as well.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if not self.has_sharded_params:
                yield name, parameter.detach(), create_whole_shard(name, tuple(parameter.shape))
                continue
            run = create_whole_shard(name, tuple(parameter.ds_shape)).chunk_flat(rank, world_size)
            if run is not None:
                yield name, parameter.ds_tensor, run

    def alias_into(self, served: ShardStorage) -> None:
        """Nothing: DeepSpeed keeps blocks of its own, which its reductions and updates work on."""

    def iter_optimizer_state(self) -> Iterable[Tensor]:
        """Of this rank's part, with the master weights from stage 1 on."""
        yield from iter_optimizer_tensors(self._engine.basic_optimizer)
        if self.has_sharded_params:
            # Stage 3 shows them to its optimizer during a step alone.
            yield from self._engine.optimizer.fp32_partitioned_groups_flat

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        """What ZeRO has this rank update: runs of the elements of each parameter, in flat blocks.

        All of them in stage 0, which leaves them to every rank.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        optimizer = self._engine.optimizer
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if self._zero_stage == 0:
                whole = create_whole_shard(name, tuple(parameter.shape))
                yield ParameterFragment(whole, parameter, is_copy=rank != 0)
            elif self.has_sharded_params:
                shape = tuple(parameter.ds_shape)
                run = create_whole_shard(name, shape).chunk_flat(rank, world_size)
                block, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                if run is not None:
                    yield ParameterFragment(
                        run, optimizer.fp32_partitioned_groups_flat[block], start
                    )
            elif parameter._hp_mapping is not None:
                found = parameter._hp_mapping
                at, within = found.hp_fragment_address, found.lp_fragment_address
                whole = create_whole_shard(name, tuple(parameter.shape))
                run = replace(whole, flat_range=(within.start, within.start + within.numel))
                yield ParameterFragment(run, self._master_blocks[found.param_group_index], at.start)

    @property
    def _master_blocks(self) -> list[Tensor]:
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

    def refresh_params(self) -> None:
        """Gather what stage 3 leaves whole on every rank, once the ranks' parts have changed."""
        whole = self._engine.optimizer.persistent_parameters if self.has_sharded_params else []
        if whole:
            # Their whole copies go, unread; then each comes back from the ranks' parts.
            whole[0].partition(whole)
            whole[0].all_gather(whole)

    def load_legacy_state(self, directory: Path) -> None:
        """Read what DeepSpeed's own save_checkpoint wrote, which holds pickles: only plain ones.

        Collective; raises CheckpointError if there is nothing.
        """
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        known = [LossScaler, ZeroStageEnum, fragment_address]
        # DeepSpeed asks for whatever a pickle has; this outvotes it.
        with torch.serialization.safe_globals(known), _set_env_var(FORCE_WEIGHTS_ONLY_ENV, "1"):
            # What is frozen was not saved.
            path, _ = self._engine.load_checkpoint(
                str(directory), tag=CHECKPOINT_TAG, load_module_strict=False
            )
        if path is None:
            raise CheckpointError(f"{directory} holds no DeepSpeed checkpoint")

    def close(self) -> None:
        """Release the engine and leave the ranks."""
        self._engine.destroy()
        self._deepspeed.comm.destroy_process_group()


def make_deepspeed_config(module: "PreTrainedModel", config: "TrainerConfig") -> dict[str, Any]:
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
    os.environ["LOCAL_RANK"] = str(get_local_device().index or 0)
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
def _set_env_var(name: str, value: str) -> Iterator[None]:
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
