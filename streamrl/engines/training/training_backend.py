"""Training backends: gradients and optimizer of a rank, by DeepSpeed or torch."""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.placement_types import _StridedShard as StridedCut
from torch.nn import Parameter
from transformers import PreTrainedModel

from streamrl.distributed.devices import get_local_device, has_local_gpu
from streamrl.distributed.process_group import leave_process_group
from streamrl.engines.checkpoint.sharded_state import (
    MOMENT_KINDS,
    MUON_MOMENT_KINDS,
    ParameterFragment,
)
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.models.activation_checkpointing import iter_chunked_mlps
from streamrl.engines.models.forward import iter_layers
from streamrl.engines.models.layer_offload import (
    get_fsdp_offload_policy,
    get_local,
    iter_writable_parameters,
)
from streamrl.engines.models.stored_weights import StoredWeights
from streamrl.engines.models.tensor_parallel import list_shared_norms, parallelize_layers
from streamrl.engines.trainer_config import (
    BUCKET_ELEMENTS,
    MUON,
    PARAMETER_SHARDING_STAGE,
    TrainerConfig,
)
from streamrl.engines.training.optimizer_offload import iter_optimizer_tensors
from streamrl.resharding.layouts import TensorShard, create_tensor_shard, create_whole_shard
from streamrl.resharding.storage import ShardStorage, view_piece
from streamrl.resharding.tensor_specs import TensorSpec
from streamrl.weights.parameters import group_for_fusion, order_for_fusion

DP_DIM, TP_DIM = "data", "tensor"
MATRIX_DIMS = 2
CLIP_EPSILON = 1e-6
"""Added to the gradient norm before dividing by it, as torch's clip_grad_norm_ does."""


class TrainingBackend:
    """Gradients and optimizer of a trainer rank. All ranks must make the same collective calls.

    forward: callable that runs the model's forward pass; calls may be collective.
    has_sharded_params: whether a rank holds only a shard of the parameters; `full_state` is then
    collective.
    optimizer: AdamW or Muon over the `optimizer_tensor` of the fragments; its moments have the same
    layout. Missing if no parameter is trained.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        module: PreTrainedModel,
        config: TrainerConfig,
        weights: StoredWeights | None = None,
        *,
        rests_on_host: bool = False,
    ) -> None:
        """Shard a model. Of one on the meta device, each rank reads its part of `weights`.

        rests_on_host: the parameters are in host memory between forward passes.
        """
        self.module = module
        self._rests_on_host = rests_on_host
        self.forward: Callable[..., Any] = module
        self._config = config
        self.has_sharded_params = config.has_sharded_params
        if not self.has_sharded_params:
            make_siblings_contiguous(module)
        self._shard_model(weights)

    def _shard_model(self, weights: StoredWeights | None) -> None:
        """Shard `module` and make the optimizer."""
        raise NotImplementedError

    @cached_property
    def trained_params(self) -> dict[str, Tensor]:
        """Trained parameters by name, tied ones once, in the order of `order_for_fusion`.

        Read it only once the module's parameters have been sharded.
        """
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        return {name: named[name] for name in order_for_fusion(named)}

    def _make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
        first, second = self._config.betas
        return torch.optim.AdamW(
            list(parameters),
            lr=self._config.lr,
            betas=(first, second),
            weight_decay=self._config.weight_decay,
            fused=self._config.offload_optimizer or None,
        )

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a summed loss to the accumulated gradient. May be collective."""
        loss.backward()

    def update(self, *, divisor: float, lr: float) -> float:
        """Divide the gradient, summed over ranks, by `divisor`; clip, update, return the norm.

        The norm is that of the divided gradient before clipping. If the norm is not finite, the
        parameters stay unchanged. Collective: no rank changes its parameters before all ranks have
        made the call.
        """
        raise NotImplementedError

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor of every trained parameter, tied ones once.

        The tensors may be views, which the next update changes. Advancing the iterator may be
        collective: exhaust it on every rank.
        """
        raise NotImplementedError

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """Yield name, local tensor and position of this rank's shard of each trained parameter.

        Local tensors are contiguous views that updates change. Not collective. Omits parameters of
        which this rank has no element.
        """
        for name, parameter in self.trained_params.items():
            yield name, parameter.detach(), create_whole_shard(name, tuple(parameter.shape))

    def iter_forward_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """Yield as `iter_shards` the values that the forward pass computes with, perhaps copies."""
        yield from self.iter_shards()

    def alias_into(self, served: ShardStorage) -> None:
        """Move this rank's shards into its generator's memory where the layout allows.

        From then on updates write into the generator's memory, so the generator must stay paused
        from an update until it activates the next version. By default nothing moves: an unsplit
        generator aliases full parameters through `load_weights`, and DeepSpeed's parameters must
        stay views of its flat blocks.
        """

    def iter_optimizer_state(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer keeps between steps; may include parameters."""
        yield from iter_optimizer_tensors(self.optimizer)

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        """Yield the parts of parameters that this rank's optimizer updates.

        Of equal parts on several ranks, only the first rank's is not a copy.
        """
        raise NotImplementedError

    def refresh_params(self) -> None:
        """Make the forward pass use tensors of `iter_shards` that a checkpoint load has filled.

        May be collective. By default the forward pass uses the tensors that the optimizer updates.
        """

    def copy_full(self, full: Mapping[str, Tensor] | None) -> None:
        """Copy this rank's part of all parameters into a model that is not trained. Collective.

        full: all parameters by name on rank 0, None on the others.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Destroy the process group."""
        leave_process_group()


def make_siblings_contiguous(module: torch.nn.Module) -> None:
    """Move the trained parameters of sibling layers (such as q, k and v) into a contiguous block.

    vLLM fuses sibling layers into a single parameter and can then alias the block instead of
    copying.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for names in group_for_fusion(trained):
        parameters = [trained[name] for name in names]
        if len({(p.dtype, p.device) for p in parameters}) > 1:
            continue
        block = torch.cat([p.detach().flatten() for p in parameters])
        views = torch.split(block, [p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view.view(parameter.shape)


class DeepSpeedBackend(TrainingBackend):
    """A rank of a DeepSpeed engine: ZeRO stages 1 to 3, on nccl and gloo.

    The number of micro-batches of an update is not known in advance: gradients of summed losses
    accumulate until the caller passes the divisor to `update`. The configuration leaves
    accumulation to the caller, and the division happens after the reduction over ranks and before
    clipping:

    - ZeRO 1 to 3 divide by `loss_scale` at that point. The attribute exists for fp16 and is unused
      in float32 and bfloat16. `backward` multiplies by it, so it is 1 except during an update.
    - BF16_Optimizer (stage 1 in bfloat16) has no loss scale. Its float32 gradients, not yet
      reduced, are divided before its step.

    DeepSpeed averages over ranks; dividing by `divisor / world_size` turns the average into the
    sum.
    """

    def _shard_model(self, weights: StoredWeights | None) -> None:
        module, config = self.module, self._config
        self._deepspeed = import_deepspeed()
        self._deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
        settings = make_deepspeed_config(module, config)
        if weights is not None:
            self._partition_weights(weights, settings)
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

    def update(self, *, divisor: float, lr: float) -> float:
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
        for name, parameter in self.trained_params.items():
            if not self.has_sharded_params:
                yield name, parameter.detach()
                continue
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
            # Stage 3 attaches the master weights to its optimizer only during an update.
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
            "overlap_comm": config.overlaps_reduction(on_gpu=has_local_gpu()),
            "reduce_bucket_size": BUCKET_ELEMENTS,
            # Parameters with fewer elements stay whole on every rank.
            "stage3_param_persistence_threshold": (
                10 * module.config.get_text_config().hidden_size
            ),
        },
    }
    if config.offload_optimizer:
        offload = {"device": "cpu", "pin_memory": has_local_gpu()}
        settings["zero_optimization"]["offload_optimizer"] = offload
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


class MuonOptimizer(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for all other parameters, as one optimizer.

    The rate of a matrix is scaled so that its updates are as large as AdamW's, so both take the
    same `lr`. Source: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982, equation 4.
    """

    def __init__(self, matrices: Sequence[Tensor], others: torch.optim.Optimizer) -> None:
        settings = others.defaults
        rate, decay = settings["lr"], settings["weight_decay"]
        self._matrices, self._others = matrices, others
        self._muon = torch.optim.Muon(
            matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        )
        super().__init__([*others.param_groups, *self._muon.param_groups], {})
        self.state = others.state = self._muon.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._muon.step()
        self._others.step()
        for matrix in self._matrices:
            state = self.state[matrix]
            state["step"] = state.get("step", torch.zeros(())) + 1


def _make_flat_shard(name: str, parameter: Any) -> TensorShard | None:
    """Return this rank's range of a parameter that stage 3 shards; None if it has no element."""
    whole = create_whole_shard(name, tuple(parameter.ds_shape))
    return whole.chunk_flat(dist.get_rank(), dist.get_world_size())


class TorchBackend(TrainingBackend):
    """A rank of backend torch: replicas, FSDP2 and tensor parallelism, on nccl and gloo.

    Example: world_size 4, tensor_parallel 2.

                    tensor 0   tensor 1
        data 0      rank 0     rank 1      same micro-batches, split layers
        data 1      rank 2     rank 3

    Consecutive ranks are tensor parallel. Ranks that share tokens (sequence parallelism) count as
    data parallel: their gradients add up, too. With FSDP2, a rank keeps a chunk of its
    tensor-parallel shard of a parameter; otherwise data-parallel ranks are replicas whose gradients
    are summed once per update.

    The optimizer updates local shards as plain tensors, since AdamW is elementwise. Only the
    gradient's norm needs communication.

    In bfloat16 these local shards are float32 master weights, and gradients are summed over ranks
    and micro-batches in float32. FSDP2 casts a shard before it gathers it; without FSDP2 the module
    has a bfloat16 copy, which follows each update. Frozen parameters, such as those below LoRA
    adapters, have no master weights.

    Gradients accumulate in `.grad`. `update` sums them over the data-parallel ranks, then divides
    once, then clips.
    """

    def _shard_model(self, weights: StoredWeights | None) -> None:
        module, config = self.module, self._config
        self._dtype = resolve_trainer_dtype(config)
        self._dp_rank = self._tp_rank = 0
        self._dp_size, self._tp_size = shape = (config.fsdp_size, config.tensor_parallel)
        if config.world_size > 1:
            mesh = init_device_mesh(get_local_device().type, shape, mesh_dim_names=(DP_DIM, TP_DIM))
            self._dp_mesh, self._tp_mesh = mesh[DP_DIM], mesh[TP_DIM]
            self._dp_rank, self._tp_rank = divmod(dist.get_rank(), self._tp_size)
        self._is_sharded = config.zero_stage == PARAMETER_SHARDING_STAGE and self._dp_size > 1
        #: Parameters of which each tensor-parallel rank has a part of the gradient.
        self._shared_norms: list[str] = []
        if self._tp_size > 1:
            self._shared_norms = list_shared_norms(module, config.section)
            parallelize_layers(module, self._tp_mesh, config.section)
            if weights is None:
                _copy_local_params(module)
        if self._is_sharded:
            self._apply_fsdp()
        if weights is not None:
            self._read_shards(weights)
        self._local_params = {
            name: _to_local(parameter) for name, parameter in self.trained_params.items()
        }
        self._has_copies = self._dtype != torch.float32 and not self._is_sharded
        if self._has_copies:
            self._cast_module()
        if self._local_params:
            others = [p for name, p in self._local_params.items() if name not in self._matrices]
            self.optimizer = self._make_optimizer(others)
            if self._matrices:
                self.optimizer = MuonOptimizer([*self._matrices.values()], self.optimizer)

    @cached_property
    def _matrices(self) -> dict[str, Tensor]:
        """Parameters that Muon updates, by name: the matrices of the layers."""
        if self._config.optimizer != MUON:
            return {}
        of_layers = {id(p) for layer in iter_layers(self.module) for p in layer.parameters()}
        return {
            name: self._local_params[name]
            for name, parameter in self.trained_params.items()
            if parameter.ndim == MATRIX_DIMS and id(parameter) in of_layers
        }

    def _apply_fsdp(self) -> None:
        """Shard the parameters of the decoder layers and the rest over the data-parallel ranks."""
        offload = get_fsdp_offload_policy(keeps_on_host=self._rests_on_host)
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        # A value head returns a view; nothing writes into it.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        for submodule in (*iter_layers(self.module), self.module):
            # By default the root stays gathered after a forward pass without a backward pass.
            sharded = fully_shard(
                submodule,
                mesh=self._dp_mesh,
                reshard_after_forward=True,
                mp_policy=policy,
                offload_policy=offload,
            )
            # Sum gradients instead of averaging; `update` divides.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def _read_shards(self, weights: StoredWeights) -> None:
        """Allocate this rank's shards of a model on the meta device, and read them."""
        tensors = list(weights.iter_tensors())
        device = torch.device("cpu") if self._rests_on_host else get_local_device()
        for stored in tensors:
            old = stored.value
            is_frozen = isinstance(old, Parameter) and not old.requires_grad
            dtype = self._dtype if is_frozen else old.dtype
            stored.replace_value(torch.empty_like(old, dtype=dtype, device=device))
        # FSDP2 pads the new shards; it looks for them in its own _apply.
        self.module._apply(lambda tensor: tensor)
        for stored in tensors:
            local, shard = _to_local(stored.value), self._find_shard("", stored.value)
            for piece in shard.pieces if shard is not None else ():
                view_piece(local, piece).copy_(stored.read_box(piece.box))

    def _cast_module(self) -> None:
        """Give the module bfloat16 copies of its parameters; local shards collect the gradients."""
        self.module._apply(
            lambda tensor: tensor.to(self._dtype) if isinstance(tensor, Parameter) else tensor
        )
        for name, parameter in self.trained_params.items():
            parameter.register_post_accumulate_grad_hook(
                partial(_move_gradient, self._local_params[name])
            )

    def update(self, *, divisor: float, lr: float) -> float:
        for name, parameter in self.trained_params.items():
            gradient = self._local_params[name].grad if self._has_copies else parameter.grad
            local = self._local_params[name]
            local.grad = torch.zeros_like(local) if gradient is None else _to_local(gradient)
            if not self._is_sharded and self._dp_size > 1:
                dist.all_reduce(local.grad, group=self._dp_mesh.get_group())
            if name in self._shared_norms:
                dist.all_reduce(local.grad, group=self._tp_mesh.get_group())
            local.grad /= divisor
        norm, max_norm = self._compute_grad_norm(), self._config.grad_clip
        scale = max_norm / (norm + CLIP_EPSILON) if max_norm else 1.0
        for local in self._local_params.values():
            assert local.grad is not None
            local.grad *= min(scale, 1.0)
        self._set_lr(lr)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.module.zero_grad()
        if self._has_copies:
            for name, parameter in self.trained_params.items():
                _to_local(parameter).copy_(self._local_params[name])
        return norm

    def _compute_grad_norm(self) -> float:
        """Return the norm of the full gradient, counting replicated elements once."""
        total = torch.zeros((), dtype=torch.float64, device=get_local_device())
        for name, parameter in self.trained_params.items():
            gradient = self._local_params[name].grad
            assert gradient is not None
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            dp_replicas = 1 if self._is_sharded else self._dp_size
            tp_replicas = self._tp_size if _find_tp_dim(parameter) is None else 1
            total += square / (dp_replicas * tp_replicas)
        dist.all_reduce(total)
        return total.sqrt().item()

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained_params.items():
            yield name, _gather_tensor(parameter.detach().to(self._dtype))

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        for name, parameter in self.trained_params.items():
            shard = self._find_shard(name, parameter)
            if shard is not None:
                local = _to_local(parameter) if self._has_copies else self._local_params[name]
                yield name, local, shard

    def iter_forward_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        for name, local, shard in self.iter_shards():
            yield name, local.to(self._dtype), shard

    def _find_shard(self, name: str, tensor: Tensor) -> TensorShard | None:
        """Return this rank's part of a parameter or buffer; None if it has no element."""
        spec = TensorSpec(name, tuple(tensor.shape), (0,), _find_tp_dim(tensor))
        shard = create_tensor_shard(spec, self._tp_rank, self._tp_size)
        if shard is None or not self._is_sharded or not isinstance(tensor, DTensor):
            return shard
        return shard.chunk(0, self._dp_rank, self._dp_size)

    @torch.no_grad()
    def copy_full(self, full: Mapping[str, Tensor] | None) -> None:
        for name, parameter in iter_writable_parameters(self.module):
            if full is not None:
                value = full[name]
            else:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
            if self._config.world_size > 1:
                # One parameter at a time, so that no rank holds the whole model.
                value = value.to(get_local_device(), parameter.dtype).contiguous()
                dist.broadcast(value, 0)
            local, shard = _to_local(parameter), self._find_shard(name, parameter)
            for piece in shard.pieces if shard is not None else ():
                view_piece(local, piece).copy_(value[piece.box.slices])

    def alias_into(self, served: ShardStorage) -> None:
        # FSDP2 gathers from buffers of its own; a generator aliases whole parameters itself.
        if self._is_sharded or not self.has_sharded_params:
            return
        for name, local, shard in self.iter_shards():
            view = find_alias_view(served, name, local, shard)
            if view is not None:
                view.copy_(local)
                # Rebind both in place: the model refers to the parameter's local tensor, the
                # optimizer to `local`.
                get_local(self.trained_params[name]).data = view
                local.data = view

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        is_dp_replica = not self._is_sharded and self._dp_rank != 0
        is_tp_replica = self._tp_rank != 0
        for name, _, shard in self.iter_shards():
            is_copy = is_dp_replica or (
                is_tp_replica and _find_tp_dim(self.trained_params[name]) is None
            )
            moments = MUON_MOMENT_KINDS if name in self._matrices else MOMENT_KINDS
            local = self._local_params[name]
            yield ParameterFragment(shard, local, is_copy=is_copy, moments=moments)


def find_alias_view(
    served: ShardStorage, name: str, local: Tensor, shard: TensorShard
) -> Tensor | None:
    """Return the part of the generator's storage that can replace a trainer rank's local tensor.

    The part is a contiguous view with the elements of `shard` of parameter `name`. Returns None if
    dtype or device differ or the elements are strided in the generator's storage, such as columns
    of an unsplit matrix.
    """
    if len(shard.boxes) != 1:
        return None
    try:
        view = served.get_view(name, shard.boxes[0])
    except KeyError:
        return None
    is_compatible = (view.dtype, view.device) == (local.dtype, local.device)
    return view if is_compatible and view.is_contiguous() else None


def _move_gradient(master: Tensor, parameter: Tensor) -> None:
    """Add the gradient of a parameter's copy to that of its master weights."""
    assert parameter.grad is not None
    gradient = _to_local(parameter.grad).to(master.dtype)
    master.grad = gradient if master.grad is None else master.grad + gradient
    parameter.grad = None


def _to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, detached; a plain tensor is returned whole."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy_local_params(module: PreTrainedModel) -> None:
    """Copy this rank's parameters out of the memory of the whole model."""
    for parameter in module.parameters():
        local = get_local(parameter)
        local.data = local.detach().clone()


def _gather_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective if the tensor is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Undo the sharding in reverse order: FSDP's chunks were cut last, and data is mesh dimension 0.
    placements = list(tensor.placements)
    for mesh_dim in range(len(placements)):
        placements[mesh_dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _find_tp_dim(parameter: Tensor) -> int | None:
    """Return the dimension by which tensor-parallel ranks split a parameter, None if unsplit."""
    if not isinstance(parameter, DTensor):
        return None
    mesh_dims = parameter.device_mesh.mesh_dim_names or ()
    for name, placement in zip(mesh_dims, parameter.placements, strict=True):
        # A dimension sharded by both mesh dimensions is a _StridedShard, no subclass of Shard.
        if name == TP_DIM and isinstance(placement, Cut | StridedCut):
            return placement.dim % parameter.ndim
    return None


def make_backend(
    module: PreTrainedModel,
    config: TrainerConfig,
    weights: StoredWeights | None = None,
    *,
    rests_on_host: bool = False,
) -> TrainingBackend:
    """Shard a model as configured.

    If it is on the meta device, which needs `has_sharded_params`, each rank reads its part of
    `weights`. rests_on_host: as in `TrainingBackend`.
    """
    # DeepSpeed's stage 0 would shard nothing and leave the update to torch's optimizer.
    is_deepspeed = config.backend == "deepspeed" and config.zero_stage
    backend = DeepSpeedBackend if is_deepspeed else TorchBackend
    return backend(module, config, weights, rests_on_host=rests_on_host)
