"""Training backend DeepSpeed: ZeRO stages 0 to 3, on nccl and gloo.

The number of micro-batches of an update is not known in advance: gradients of summed losses
accumulate until the caller passes the divisor to `step`. The configuration leaves accumulation to
the caller, and the division happens after the reduction over ranks and before clipping:

- ZeRO 1 to 3 divide by `loss_scale` at that point. The attribute exists for fp16 and is unused in
  float32 and bfloat16. `backward` multiplies by it, so it is 1 except during a step.
- BF16_Optimizer (stage 1 in bfloat16) has no loss scale. Its float32 gradients, not yet reduced,
  are divided before its step.
- Stage 0 leaves the update to torch's optimizer and reports no norm. A hook before the optimizer's
  step divides and clips.

DeepSpeed averages over ranks; dividing by `divisor / world_size` turns the average into the sum.
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
from streamrl.resharding.layouts import TensorShard, create_whole_shard
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import order_for_fusion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig

CHECKPOINT_TAG = "zero"
FORCE_WEIGHTS_ONLY_ENV = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class DeepSpeedBackend:
    """A rank of a DeepSpeed engine as a TrainingBackend."""

    def __init__(self, module: "PreTrainedModel", config: "TrainerConfig") -> None:
        deepspeed = _import_deepspeed()
        self.module = module
        self._deepspeed = deepspeed
        self._grad_clip = config.grad_clip
        self._zero_stage, self._has_sharded_params = config.zero_stage, config.has_sharded_params
        make_sisters_contiguous(module)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            # From stage 1 on, ZeRO flattens them into a block in this order, so that siblings are
            # contiguous.
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
        self._engine.backward(loss)

    def step(self, *, divisor: float, lr: float) -> float:
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
        """Divide and clip the gradients of ZeRO stage 0 before the optimizer's step.

        Called by torch as a hook of the optimizer. Stores the gradients' norm; if the norm is not
        finite, the update is skipped.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad /= self._grad_divisor
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._grad_clip or math.inf)
        if not norm.isfinite():
            optimizer.zero_grad()  # AdamW skips parameters without gradients
        self._grad_norm = norm.item()

    @property
    def has_sharded_params(self) -> bool:
        return self._has_sharded_params

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        for name in order_for_fusion(trained):
            tensor: Tensor = trained[name].detach()
            if self.has_sharded_params:
                # Copy inside, yield outside: a suspended consumer must not keep the other ranks
                # waiting in the context's exit.
                with self._deepspeed.zero.GatheredParameters([trained[name]]):
                    tensor = trained[name].detach().clone()
            yield name, tensor

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """Yield name, local tensor and position of this rank's shard of each trained parameter.

        In stage 3 a shard is a range of the flattened parameter. Persistent parameters, which stage
        3 also keeps whole on every rank, are yielded as such ranges, too.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if not self.has_sharded_params:
                yield name, parameter.detach(), create_whole_shard(name, tuple(parameter.shape))
                continue
            flat_shard = create_whole_shard(name, tuple(parameter.ds_shape)).chunk_flat(
                rank, world_size
            )
            if flat_shard is not None:
                yield name, parameter.ds_tensor, flat_shard

    def alias_into(self, served: ShardStorage) -> None:
        """Do nothing: DeepSpeed's parameters must stay views of its flat blocks."""

    def iter_optimizer_state(self) -> Iterable[Tensor]:
        yield from iter_optimizer_tensors(self._engine.basic_optimizer)
        if self.has_sharded_params:
            # Stage 3 attaches the master weights to its optimizer only during a step.
            yield from self._engine.optimizer.fp32_partitioned_groups_flat

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        """Yield the parts of parameters that this rank's optimizer updates.

        From stage 1 on, these are ranges of flat float32 blocks. In stage 0 every rank updates all
        parameters.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        optimizer = self._engine.optimizer
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if self._zero_stage == 0:
                full_shard = create_whole_shard(name, tuple(parameter.shape))
                yield ParameterFragment(full_shard, parameter, is_copy=rank != 0)
            elif self.has_sharded_params:
                shape = tuple(parameter.ds_shape)
                flat_shard = create_whole_shard(name, shape).chunk_flat(rank, world_size)
                block, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                if flat_shard is not None:
                    yield ParameterFragment(
                        flat_shard, optimizer.fp32_partitioned_groups_flat[block], start
                    )
            elif parameter._hp_mapping is not None:
                mapping = parameter._hp_mapping
                master_range, param_range = mapping.hp_fragment_address, mapping.lp_fragment_address
                full_shard = create_whole_shard(name, tuple(parameter.shape))
                flat_shard = replace(
                    full_shard,
                    flat_range=(param_range.start, param_range.start + param_range.numel),
                )
                yield ParameterFragment(
                    flat_shard, self._master_blocks[mapping.param_group_index], master_range.start
                )

    @property
    def _master_blocks(self) -> list[Tensor]:
        """Flat float32 master weights of ZeRO stages 1 and 2, a tensor per parameter group."""
        optimizer = self._engine.optimizer
        is_bf16 = _is_bf16_optimizer(optimizer)
        name = "fp32_groups_flat_partition" if is_bf16 else "single_partition_of_fp32_groups"
        blocks: list[Tensor] = getattr(optimizer, name)
        return blocks

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._engine.basic_optimizer
        return optimizer

    def refresh_params(self) -> None:
        """Gather stage 3's persistent parameters on every rank after a checkpoint load."""
        persistent = self._engine.optimizer.persistent_parameters if self.has_sharded_params else []
        if persistent:
            # partition() drops the stale full copies without writing them to the shards.
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def load_legacy_state(self, directory: Path) -> None:
        """Load a checkpoint of DeepSpeed's save_checkpoint, accepting only plain pickles.

        Collective. Raises CheckpointError if the directory holds no such checkpoint.
        """
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        safe_classes = [LossScaler, ZeroStageEnum, fragment_address]
        # DeepSpeed passes weights_only=False to torch.load; the environment variable overrides it.
        with (
            torch.serialization.safe_globals(safe_classes),
            _set_env_var(FORCE_WEIGHTS_ONLY_ENV, "1"),
        ):
            # load_module_strict=False: frozen parameters were not saved.
            path, _ = self._engine.load_checkpoint(
                str(directory), tag=CHECKPOINT_TAG, load_module_strict=False
            )
        if path is None:
            raise CheckpointError(f"{directory} holds no DeepSpeed checkpoint")

    def close(self) -> None:
        self._engine.destroy()
        self._deepspeed.comm.destroy_process_group()


def make_deepspeed_config(module: "PreTrainedModel", config: "TrainerConfig") -> dict[str, Any]:
    """Return the configuration of deepspeed.initialize for the model and ZeRO stage."""
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
            # Parameters with fewer elements stay whole on every rank.
            "stage3_param_persistence_threshold": 10 * module.config.hidden_size,
        },
    }
    if module.dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _import_deepspeed() -> Any:
    """Import DeepSpeed with its slow or noisy parts turned off."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's launcher would set the device index.
    os.environ["LOCAL_RANK"] = str(get_local_device().index or 0)
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime import compiler
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    # DeepSpeed calls deprecated torch collectives; users cannot act on the warning.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    # Building the shared-memory collectives for CPUs on first use takes over a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Muon, imported with every optimizer, would import torch's compiler, which takes a second.
    compiler.compile = lambda: compiler.dummy_decorator
    return deepspeed


@contextlib.contextmanager
def _set_env_var(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the context; restore its value afterwards."""
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
