"""Training backend torch with FSDP2 and tensor parallelism, float32, on nccl and gloo.

Example: world_size 4, tensor_parallel 2.

                tensor 0   tensor 1
    data 0      rank 0     rank 1      same micro-batches, split layers
    data 1      rank 2     rank 3

Consecutive ranks are tensor parallel. With FSDP2, a rank keeps a chunk of its tensor-parallel shard
of a parameter; otherwise data-parallel ranks are replicas whose gradients are summed once per
update.

The optimizer updates local shards as plain tensors, since AdamW is elementwise. Only the gradient's
norm needs communication.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.placement_types import _StridedShard as StridedCut

from streamrl.distributed.process_group import leave_process_group, set_collective_timeout
from streamrl.engines.checkpoint.legacy_pickles import load_plain_pickle
from streamrl.engines.checkpoint.sharded_state import ParameterFragment
from streamrl.engines.models.forward import get_local_device
from streamrl.engines.models.tensor_parallel import iter_layers, parallelize_layers
from streamrl.engines.trainer_config import PARAMETER_SHARDING_STAGE
from streamrl.engines.training.aliased_params import find_alias_view
from streamrl.engines.training.optimizer_offload import iter_optimizer_tensors
from streamrl.resharding.layouts import TensorShard, create_tensor_shard
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import TensorSpec
from streamrl.weights.parameters import order_for_fusion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig

DP_DIM, TP_DIM = "data", "tensor"
CLIP_EPSILON = 1e-6
"""Added to the gradient norm before dividing by it, as torch's clip_grad_norm_ does."""


class FsdpTpBackend:
    """A rank of the FSDP2 and tensor-parallel mesh as a TrainingBackend.

    Gradients accumulate in `.grad`. `step` sums them over the data-parallel ranks, then divides
    once, then clips.
    """

    def __init__(self, module: "PreTrainedModel", config: "TrainerConfig") -> None:
        self.module = module
        self.forward = module
        self._grad_clip = config.grad_clip
        shape = (config.dp_size, config.tensor_parallel)
        mesh = init_device_mesh(get_local_device().type, shape, mesh_dim_names=(DP_DIM, TP_DIM))
        self._dp_mesh, self._tp_mesh = mesh[DP_DIM], mesh[TP_DIM]
        self._is_sharded = (
            config.zero_stage == PARAMETER_SHARDING_STAGE and self._dp_mesh.size() > 1
        )
        if self._tp_mesh.size() > 1:
            parallelize_layers(module, self._tp_mesh)
            _copy_unsharded_params(module)
        if self._is_sharded:
            self._apply_fsdp()
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._trained_params = {name: named[name] for name in order_for_fusion(named)}
        self._local_params = {
            name: _to_local(parameter) for name, parameter in self._trained_params.items()
        }
        self._optimizer = torch.optim.AdamW(
            list(self._local_params.values()),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
        )
        set_collective_timeout(config.collective_timeout_s)

    def _apply_fsdp(self) -> None:
        """Shard the parameters of the decoder layers and the rest over the data-parallel ranks."""
        for submodule in (*iter_layers(self.module), self.module):
            # By default the root stays gathered after a forward pass without a backward pass.
            sharded = fully_shard(submodule, mesh=self._dp_mesh, reshard_after_forward=True)
            # Sum gradients instead of averaging; `step` divides.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, *, divisor: float, lr: float) -> float:
        """Divide the gradient, summed over ranks, by `divisor`; clip, update, return the norm.

        Collective. No rank changes its parameters before all ranks have made the call.
        """
        for name, parameter in self._trained_params.items():
            gradient = parameter.grad
            local = self._local_params[name]
            local.grad = torch.zeros_like(local) if gradient is None else _to_local(gradient)
            if not self._is_sharded:
                dist.all_reduce(local.grad, group=self._dp_mesh.get_group())
            local.grad /= divisor
        norm = self._compute_grad_norm()
        scale = self._grad_clip / (norm + CLIP_EPSILON) if self._grad_clip else 1.0
        for local in self._local_params.values():
            assert local.grad is not None
            local.grad *= min(scale, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.module.zero_grad()
        return norm

    def _compute_grad_norm(self) -> float:
        """Return the norm of the full gradient, counting replicated elements once."""
        total = torch.zeros((), dtype=torch.float64, device=get_local_device())
        for name, parameter in self._trained_params.items():
            gradient = self._local_params[name].grad
            assert gradient is not None
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            total += square / (dist.get_world_size() // _count_shards(parameter))
        dist.all_reduce(total)
        return total.sqrt().item()

    @property
    def has_sharded_params(self) -> bool:
        return True

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every trained parameter in full, tied ones once.

        Replicated parameters are views, which the next update changes.
        """
        for name, parameter in self._trained_params.items():
            yield name, _gather_tensor(parameter.detach())

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """Yield name, local tensor and position of this rank's shard of each trained parameter.

        Omits parameters of which FSDP2 has given this rank no element.
        """
        for name, parameter in self._trained_params.items():
            spec = TensorSpec(name, tuple(parameter.shape), (0,), _find_tp_dim(parameter))
            tp_rank = self._tp_mesh.get_local_rank()
            shard: TensorShard | None = create_tensor_shard(spec, tp_rank, self._tp_mesh.size())
            if self._is_sharded and shard is not None:
                shard = shard.chunk(0, self._dp_mesh.get_local_rank(), self._dp_mesh.size())
            if shard is not None:
                yield name, self._local_params[name], shard

    def alias_into(self, served: ShardStorage) -> None:
        """Move this rank's shards into its generator's memory where the layout allows.

        Does nothing with FSDP2, which gathers from buffers of its own.
        """
        if self._is_sharded:
            return
        for name, local, shard in self.iter_shards():
            view = find_alias_view(served, name, local, shard)
            if view is not None:
                view.copy_(local)
                # Rebind both in place: the model refers to the parameter's local tensor, the
                # optimizer to `local`.
                _get_local_tensor(self._trained_params[name]).data = view
                local.data = view

    def iter_optimizer_state(self) -> Iterable[Tensor]:
        return iter_optimizer_tensors(self._optimizer)

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        """Yield the parts of parameters that this rank's optimizer updates.

        Of equal shards on several ranks, only the first rank's is not a copy.
        """
        is_dp_replica = not self._is_sharded and self._dp_mesh.get_local_rank() != 0
        is_tp_replica = self._tp_mesh.get_local_rank() != 0
        for name, local, shard in self.iter_shards():
            is_copy = is_dp_replica or (
                is_tp_replica and _find_tp_dim(self._trained_params[name]) is None
            )
            yield ParameterFragment(shard, local, is_copy=is_copy)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def refresh_params(self) -> None:
        """Do nothing: the forward pass uses the tensors that the optimizer updates."""

    def load_legacy_state(self, directory: Path) -> None:
        index = dist.get_rank() if self._is_sharded else self._tp_mesh.get_local_rank()
        path = directory / f"torch_state_{index}.pt"
        state = load_plain_pickle(path)
        for name, local in self._local_params.items():
            local.copy_(state["model"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        leave_process_group()


def _to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, detached; a plain tensor is returned whole."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _get_local_tensor(parameter: Tensor) -> Tensor:
    """Return the local tensor object of a parameter; `to_local` would return a new view of it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _copy_unsharded_params(module: "PreTrainedModel") -> None:
    """Copy the replicated parameters out of the memory-mapped model file.

    Otherwise the file, with the full matrices that were split, would stay mapped.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.detach().clone()


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


def _count_shards(parameter: Tensor) -> int:
    """Return the number of distinct shards of a parameter; all have equally many replicas."""
    return math.prod(size for _, size, _ in _list_shardings(parameter))


def _find_tp_dim(parameter: Tensor) -> int | None:
    """Return the dimension by which tensor-parallel ranks split a parameter, None if unsplit."""
    return next(
        (dim for mesh_dim, _, dim in _list_shardings(parameter) if mesh_dim == TP_DIM), None
    )


def _list_shardings(parameter: Tensor) -> list[tuple[str, int, int]]:
    """Return how a DTensor is sharded: (mesh dimension, number of shards, tensor dimension) each.

    A plain tensor has no shardings.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    axes = zip(names, mesh.shape, parameter.placements, strict=True)
    # A dimension sharded by both mesh dimensions is a _StridedShard, which is no Shard in torch.
    return [
        (name, size, placement.dim)
        for name, size, placement in axes
        if isinstance(placement, Cut | StridedCut)
    ]
