"""Training backend DeepSpeed: ZeRO stages 1 to 3, on nccl and gloo.

The number of micro-batches of an update is not known in advance: gradients of summed losses
accumulate until the caller passes the divisor to `step`. The configuration leaves accumulation to
the caller, and the division happens after the reduction over ranks and before clipping:

- ZeRO 1 to 3 divide by `loss_scale` at that point. The attribute exists for fp16 and is unused in
  float32 and bfloat16. `backward` multiplies by it, so it is 1 except during a step.
- BF16_Optimizer (stage 1 in bfloat16) has no loss scale. Its float32 gradients, not yet reduced,
  are divided before its step.

DeepSpeed averages over ranks; dividing by `divisor / world_size` turns the average into the sum.
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from streamrl.distributed.devices import get_local_device, has_local_gpu
from streamrl.engines.checkpoint.sharded_state import ParameterFragment
from streamrl.engines.models.activation_checkpointing import iter_chunked_mlps
from streamrl.engines.models.stored_weights import StoredWeights
from streamrl.engines.trainer_config import BUCKET_ELEMENTS, TrainerConfig
from streamrl.engines.training.training_backend import TrainingBackend, make_siblings_contiguous
from streamrl.resharding.layouts import TensorShard, create_whole_shard


class DeepSpeedBackend(TrainingBackend):
    """A rank of a DeepSpeed engine."""

    def __init__(
        self,
        module: PreTrainedModel,
        config: TrainerConfig,
        weights: StoredWeights | None = None,
    ) -> None:
        super().__init__(module, config)
        self._deepspeed = import_deepspeed()
        self._deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
        settings = make_deepspeed_config(module, config)
        if weights is not None:
            self._partition_weights(weights, settings)
        elif not self.has_sharded_params:
            make_siblings_contiguous(module)
        # ZeRO flattens them into a block in this order, so that siblings are contiguous.
        self.optimizer = self._make_optimizer(self.trained_params.values())
        if self.has_sharded_params:
            # Gathered once per pass, not once per chunk.
            for mlp in iter_chunked_mlps(module):
                self._deepspeed.utils.set_z3_leaf_module(mlp, True)
        self._engine, *_ = self._deepspeed.initialize(
            model=module, optimizer=self.optimizer, config=settings
        )
        self.forward = self._engine
        bf16_optimizer = self._deepspeed.runtime.bf16_optimizer.BF16_Optimizer
        self._has_bf16_optimizer = isinstance(self._engine.optimizer, bf16_optimizer)

    def _partition_weights(self, weights: StoredWeights, settings: dict[str, Any]) -> None:
        """Read the weights of a model on the meta device; partition each before reading the next.

        Rank 0 reads a parameter, DeepSpeed broadcasts it, and each rank keeps its part.
        """
        partitioned: Any = None
        for stored in weights.iter_tensors():
            is_parameter = isinstance(stored.value, torch.nn.Parameter)
            if is_parameter and dist.get_rank():
                value = torch.empty_like(stored.value, device=get_local_device())
            else:
                value = stored.read().to(get_local_device(), stored.value.dtype)
            parameter = stored.replace_value(value)
            del value
            if not is_parameter:
                continue
            if partitioned is None:
                holder = torch.nn.ParameterList([parameter])
                self._deepspeed.zero.Init(module=holder, config_dict_or_path=settings)
                partitioned = parameter
            else:
                partitioned.convert_to_zero_parameters(param_list=[parameter])

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self, *, divisor: float, lr: float) -> float:
        engine, optimizer = self._engine, self._engine.optimizer
        grad_divisor = divisor / dist.get_world_size()
        self._set_lr(lr)
        if self._has_bf16_optimizer:
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.div_(grad_divisor)
            engine.step()
        else:
            optimizer.loss_scale = grad_divisor
            engine.step()
            optimizer.loss_scale = 1.0
        return float(engine.get_global_grad_norm())

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        if not self.has_sharded_params:
            yield from super().full_state()
            return
        for name, parameter in self.trained_params.items():
            # Copy inside, yield outside: a suspended consumer must not keep the other ranks waiting
            # in the context's exit.
            with self._deepspeed.zero.GatheredParameters([parameter]):
                tensor = parameter.detach().clone()
            yield name, tensor

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """Yield this rank's shards: in stage 3 ranges of the flattened parameters.

        Persistent parameters, which stage 3 also keeps whole on every rank, are yielded as such
        ranges, too.
        """
        if not self.has_sharded_params:
            yield from super().iter_shards()
            return
        for name, parameter in dict[str, Any](self.trained_params).items():
            shard = _make_flat_shard(name, parameter)
            if shard is not None:
                yield name, parameter.ds_tensor, shard

    def iter_optimizer_state(self) -> Iterator[Tensor]:
        yield from super().iter_optimizer_state()
        if self.has_sharded_params:
            # Stage 3 attaches the master weights to its optimizer only during a step.
            yield from self._engine.optimizer.fp32_partitioned_groups_flat

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        """Yield the parts of parameters that this rank's optimizer updates.

        These are ranges of flat float32 blocks.
        """
        optimizer = self._engine.optimizer
        for name, parameter in dict[str, Any](self.trained_params).items():
            if self.has_sharded_params:
                shard = _make_flat_shard(name, parameter)
                block, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                if shard is not None:
                    yield ParameterFragment(
                        shard, optimizer.fp32_partitioned_groups_flat[block], start
                    )
            elif parameter._hp_mapping is not None:
                mapping = parameter._hp_mapping
                master_range, param_range = mapping.hp_fragment_address, mapping.lp_fragment_address
                flat_range = (param_range.start, param_range.start + param_range.numel)
                yield ParameterFragment(
                    replace(
                        create_whole_shard(name, tuple(parameter.shape)), flat_range=flat_range
                    ),
                    self._master_blocks[mapping.param_group_index],
                    master_range.start,
                )

    @property
    def _master_blocks(self) -> list[Tensor]:
        """Flat float32 master weights of ZeRO stages 1 and 2, a tensor per parameter group."""
        optimizer = self._engine.optimizer
        is_bf16 = self._has_bf16_optimizer
        name = "fp32_groups_flat_partition" if is_bf16 else "single_partition_of_fp32_groups"
        blocks: list[Tensor] = getattr(optimizer, name)
        return blocks

    def refresh_params(self) -> None:
        """Gather stage 3's persistent parameters on every rank after a checkpoint load."""
        persistent = self._engine.optimizer.persistent_parameters if self.has_sharded_params else []
        if persistent:
            # partition() drops the stale full copies without writing them to the shards.
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def close(self) -> None:
        self._engine.destroy()
        self._deepspeed.comm.destroy_process_group()


def make_deepspeed_config(module: PreTrainedModel, config: TrainerConfig) -> dict[str, Any]:
    """Return the configuration of deepspeed.initialize for the model and ZeRO stage."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.grad_clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            # Parameters with fewer elements stay whole on every rank.
            "stage3_param_persistence_threshold": (
                10 * module.config.get_text_config().hidden_size
            ),
        },
    }
    if config.offload_optimizer:
        pin_memory = has_local_gpu()
        settings["zero_optimization"]["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": pin_memory,
        }
        # DeepSpeed's own AdamW for CPUs needs a compiler; torch's fused one does not.
        settings["zero_force_ds_cpu_optimizer"] = False
    if module.dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        # DeepSpeed's default, bfloat16, rounds each rank's gradients before they are summed: with
        # stage 1 those of all micro-batches of an update, also on a single rank.
        settings["communication_data_type"] = "fp32"
    return settings


def import_deepspeed() -> Any:
    """Import DeepSpeed with its slow or noisy parts turned off."""
    if not has_local_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's launcher would set the device index.
    os.environ["LOCAL_RANK"] = str(get_local_device().index or 0)
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    # DeepSpeed calls deprecated torch collectives; users cannot act on the warning.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    # Building the shared-memory collectives for CPUs on first use takes over a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Muon, imported with every optimizer, would import torch's compiler, which takes a second.
    compiler = deepspeed.runtime.compiler
    compiler.compile = lambda: compiler.dummy_decorator
    return deepspeed


def _make_flat_shard(name: str, parameter: Any) -> TensorShard | None:
    """Return this rank's range of a parameter that stage 3 shards; None if it has no element."""
    whole = create_whole_shard(name, tuple(parameter.ds_shape))
    return whole.chunk_flat(dist.get_rank(), dist.get_world_size())
