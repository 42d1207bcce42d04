"""Training backend torch: replicas, FSDP2 and tensor parallelism, on nccl and gloo.

Example: world_size 4, tensor_parallel 2.

                tensor 0   tensor 1
    data 0      rank 0     rank 1      same micro-batches, split layers
    data 1      rank 2     rank 3

Consecutive ranks are tensor parallel. Ranks that share tokens (sequence parallelism) count as data
parallel: their gradients add up, too. With FSDP2, a rank keeps a chunk of its tensor-parallel shard
of a parameter; otherwise data-parallel ranks are replicas whose gradients are summed once per
update.

The optimizer updates local shards as plain tensors, since AdamW is elementwise. Only the gradient's
norm needs communication.

In bfloat16 these local shards are float32 master weights, and gradients are summed over ranks and
micro-batches in float32. FSDP2 casts a shard before it gathers it; without FSDP2 the module has a
bfloat16 copy, which follows each update. Frozen parameters, such as those below LoRA adapters, have
no master weights.
"""

import math
from collections.abc import Iterator
from functools import partial

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

from streamrl.distributed.devices import get_local_device
from streamrl.engines.checkpoint.sharded_state import ParameterFragment, view_piece
from streamrl.engines.dtypes import resolve_trainer_dtype
from streamrl.engines.models.forward import iter_layers
from streamrl.engines.models.stored_weights import StoredWeights
from streamrl.engines.models.tensor_parallel import list_shared_norms, parallelize_layers
from streamrl.engines.trainer_config import PARAMETER_SHARDING_STAGE, TrainerConfig
from streamrl.engines.training.training_backend import TrainingBackend, make_siblings_contiguous
from streamrl.resharding.layouts import TensorShard, create_tensor_shard
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import TensorSpec

DP_DIM, TP_DIM = "data", "tensor"
CLIP_EPSILON = 1e-6
"""Added to the gradient norm before dividing by it, as torch's clip_grad_norm_ does."""


class TorchBackend(TrainingBackend):
    """A rank of the data- and tensor-parallel mesh.

    Gradients accumulate in `.grad`. `step` sums them over the data-parallel ranks, then divides
    once, then clips.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        config: TrainerConfig,
        weights: StoredWeights | None = None,
    ) -> None:
        super().__init__(module, config)
        self._dtype = resolve_trainer_dtype(config)
        shape = (config.fsdp_size, config.tensor_parallel)
        mesh = init_device_mesh(get_local_device().type, shape, mesh_dim_names=(DP_DIM, TP_DIM))
        self._dp_mesh, self._tp_mesh = mesh[DP_DIM], mesh[TP_DIM]
        self._is_sharded = (
            config.zero_stage == PARAMETER_SHARDING_STAGE and self._dp_mesh.size() > 1
        )
        if not self.has_sharded_params:
            make_siblings_contiguous(module)
        #: Parameters of which each tensor-parallel rank has a part of the gradient.
        self._shared_norms: list[str] = []
        if self._tp_mesh.size() > 1:
            self._shared_norms = list_shared_norms(module)
            parallelize_layers(module, self._tp_mesh)
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
        self.optimizer = self._make_optimizer(self._local_params.values())

    def _apply_fsdp(self) -> None:
        """Shard the parameters of the decoder layers and the rest over the data-parallel ranks."""
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for submodule in (*iter_layers(self.module), self.module):
            # By default the root stays gathered after a forward pass without a backward pass.
            sharded = fully_shard(
                submodule, mesh=self._dp_mesh, reshard_after_forward=True, mp_policy=policy
            )
            # Sum gradients instead of averaging; `step` divides.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def _read_shards(self, weights: StoredWeights) -> None:
        """Allocate this rank's shards of a model on the meta device, and read them."""
        tensors = list(weights.iter_tensors())
        for stored in tensors:
            old = stored.value
            is_frozen = isinstance(old, Parameter) and not old.requires_grad
            dtype = self._dtype if is_frozen else old.dtype
            stored.replace_value(torch.empty_like(old, dtype=dtype, device=get_local_device()))
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

    def step(self, *, divisor: float, lr: float) -> float:
        for name, parameter in self.trained_params.items():
            gradient = self._local_params[name].grad if self._has_copies else parameter.grad
            local = self._local_params[name]
            local.grad = torch.zeros_like(local) if gradient is None else _to_local(gradient)
            if not self._is_sharded:
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
            dp_replicas = 1 if self._is_sharded else self._dp_mesh.size()
            tp_replicas = self._tp_mesh.size() if _find_tp_dim(parameter) is None else 1
            total += square / (dp_replicas * tp_replicas)
        dist.all_reduce(total)
        return total.sqrt().item()

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in super().full_state():
            yield name, _gather_tensor(parameter.to(self._dtype))

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
        shard = create_tensor_shard(spec, self._tp_mesh.get_local_rank(), self._tp_mesh.size())
        if shard is None or not self._is_sharded or not isinstance(tensor, DTensor):
            return shard
        return shard.chunk(0, self._dp_mesh.get_local_rank(), self._dp_mesh.size())

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
                _get_local_tensor(self.trained_params[name]).data = view
                local.data = view

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        is_dp_replica = not self._is_sharded and self._dp_mesh.get_local_rank() != 0
        is_tp_replica = self._tp_mesh.get_local_rank() != 0
        for name, _, shard in self.iter_shards():
            is_copy = is_dp_replica or (
                is_tp_replica and _find_tp_dim(self.trained_params[name]) is None
            )
            yield ParameterFragment(shard, self._local_params[name], is_copy=is_copy)


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


def _get_local_tensor(parameter: Tensor) -> Tensor:
    """Return the local tensor object of a parameter, to set its `data`; `to_local` makes a view."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _copy_local_params(module: PreTrainedModel) -> None:
    """Copy this rank's parameters out of the memory of the whole model."""
    for parameter in module.parameters():
        local = _get_local_tensor(parameter)
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
