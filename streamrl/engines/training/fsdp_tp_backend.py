"""Data parallelism times tensor parallelism in torch, float32, on nccl and on gloo.

Ranks are a mesh: neighbours share every layer of the model and train the same micro-batches, and
ranks at the same place of different neighbourhoods share the data. Where parameters are sharded
(FSDP2), a rank keeps only its chunk of what tensor parallelism leaves it; otherwise the data ranks
all hold the same, and gradients are summed once per step.

The optimizer works on what a rank keeps, as plain tensors: an update is elementwise. Only the
gradient's norm asks for the others.
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
from streamrl.resharding import TensorShard, TensorSpec, create_tensor_shard
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import order_for_fusion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig

DP_DIM, TP_DIM = "data", "tensor"
"""The dimensions of the mesh; ranks next to each other are tensor parallel."""
CLIP_EPSILON = 1e-6
"""As in torch's clip_grad_norm_, which the other backends clip with."""


class FsdpTpBackend:
    """Gradients add up in `.grad`; a step divides them once, over all ranks and before clipping."""

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
        """Shard the parameters over the data ranks: whole only layer by layer, while computing."""
        for part in (*iter_layers(self.module), self.module):
            # The outermost would stay gathered after a forward pass without a backward pass.
            sharded = fully_shard(part, mesh=self._dp_mesh, reshard_after_forward=True)
            # A plain sum; it is divided when the step is complete.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a summed loss. Collective."""
        loss.backward()

    def step(self, *, divisor: float, lr: float) -> float:
        """Update with the gradient over all shares of the data divided by `divisor`; its norm
        before clipping.

        Collective. A norm that is not finite leaves the parameters as they are. No rank changes
        its own before all have come here.
        """
        for name, parameter in self._trained_params.items():
            gradient = parameter.grad
            kept = self._local_params[name]
            kept.grad = torch.zeros_like(kept) if gradient is None else _to_local(gradient)
            if not self._is_sharded:
                dist.all_reduce(kept.grad, group=self._dp_mesh.get_group())
            kept.grad /= divisor
        norm = self._compute_grad_norm()
        scale = self._grad_clip / (norm + CLIP_EPSILON) if self._grad_clip else 1.0
        for kept in self._local_params.values():
            assert kept.grad is not None
            kept.grad *= min(scale, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.module.zero_grad()
        return norm

    def _compute_grad_norm(self) -> float:
        """That of the gradient, of which each element counts once, however many ranks have it."""
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
        """A rank has only its part of the parameters."""
        return True

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, whole, once each. Collective: exhaust it.

        What every rank has whole is a view, which the next step changes.
        """
        for name, parameter in self._trained_params.items():
            yield name, _gather_tensor(parameter.detach())

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        """What this rank keeps of what is trained, where it lies, and which part that is.

        A parameter that has nothing left for this rank is not there. Each step changes the tensors.
        """
        for name, parameter in self._trained_params.items():
            spec = TensorSpec(name, tuple(parameter.shape), (0,), _find_tp_dim(parameter))
            place = self._tp_mesh.get_local_rank()
            shard: TensorShard | None = create_tensor_shard(spec, place, self._tp_mesh.size())
            if self._is_sharded and shard is not None:
                shard = shard.chunk(0, self._dp_mesh.get_local_rank(), self._dp_mesh.size())
            if shard is not None:
                yield name, self._local_params[name], shard

    def alias_into(self, served: ShardStorage) -> None:
        """Keep there what lies there in one piece; the rest, and what FSDP2 has, stays.

        FSDP2 has memory of its own, which it gathers from.
        """
        if self._is_sharded:
            return
        for name, kept, shard in self.iter_shards():
            place = find_alias_view(served, name, kept, shard)
            if place is not None:
                place.copy_(kept)
                # Whoever holds one of them holds it still: the model the one, the optimizer the
                # other.
                _get_local_tensor(self._trained_params[name]).data = place
                kept.data = place

    def iter_optimizer_state(self) -> Iterable[Tensor]:
        """Of what this rank keeps."""
        return iter_optimizer_tensors(self._optimizer)

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        """What this rank keeps; what several have, one of them saves."""
        repeats = not self._is_sharded and self._dp_mesh.get_local_rank() != 0
        is_neighbour = self._tp_mesh.get_local_rank() != 0
        for name, kept, shard in self.iter_shards():
            is_copy = repeats or (is_neighbour and _find_tp_dim(self._trained_params[name]) is None)
            yield ParameterFragment(shard, kept, is_copy=is_copy)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, on what this rank keeps."""
        return self._optimizer

    def refresh_params(self) -> None:
        """Nothing: what the optimizer updates is computed with."""

    def load_legacy_state(self, directory: Path) -> None:
        """Read what this backend once wrote."""
        place = dist.get_rank() if self._is_sharded else self._tp_mesh.get_local_rank()
        path = directory / f"torch_state_{place}.pt"
        state = load_plain_pickle(path)
        for name, kept in self._local_params.items():
            kept.copy_(state["model"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Leave the ranks."""
        leave_process_group()


def _to_local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _get_local_tensor(parameter: Tensor) -> Tensor:
    """The tensor a parameter has on this rank; `to_local` gives a view of it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _copy_unsharded_params(module: "PreTrainedModel") -> None:
    """Give what is not cut memory of its own.

    It lies in the file of the model, of which the cut parameters would stay mapped, too.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.detach().clone()


def _gather_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor. Collective where it is cut."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Put together in the reverse order of the cuts: chunks over the data first.
    placements = list(tensor.placements)
    for mesh_dim in range(len(placements)):
        placements[mesh_dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _count_shards(parameter: Tensor) -> int:
    """Into how many parts a parameter is cut; equally many ranks have each of them."""
    return math.prod(size for _, size, _ in _list_shardings(parameter))


def _find_tp_dim(parameter: Tensor) -> int | None:
    """Which dimension tensor parallelism cuts."""
    return next(
        (dim for mesh_dim, _, dim in _list_shardings(parameter) if mesh_dim == TP_DIM), None
    )


def _list_shardings(parameter: Tensor) -> list[tuple[str, int, int]]:
    """How a parameter is cut: over which dimension of the mesh, into how many, and where."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    over = zip(names, mesh.shape, parameter.placements, strict=True)
    # What both dimensions of the mesh cut is strided, which torch does not count as a shard.
    return [(name, size, at.dim) for name, size, at in over if isinstance(at, Cut | StridedCut)]
