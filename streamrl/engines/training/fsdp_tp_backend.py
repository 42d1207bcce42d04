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

from streamrl.distributed.process_group import bound_collectives, leave_ranks
from streamrl.engines.checkpoint.legacy_pickles import load_plain
from streamrl.engines.checkpoint.sharded_state import Fragment
from streamrl.engines.models.forward import local_device
from streamrl.engines.models.tensor_parallel import layers_of, split_layers
from streamrl.engines.trainer_config import SHARDS_PARAMETERS
from streamrl.engines.training.aliased_params import place_in
from streamrl.engines.training.optimizer_offload import tensors_of
from streamrl.resharding import Shard, TensorSpec, tensor_shard
from streamrl.resharding.storage import Storage
from streamrl.weights.parameters import side_by_side

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig

DATA, TENSOR = "data", "tensor"
"""The dimensions of the mesh; ranks next to each other are tensor parallel."""
CLIP_EPSILON = 1e-6
"""As in torch's clip_grad_norm_, which the other backends clip with."""


class MeshBackend:
    """Gradients add up in `.grad`; a step divides them once, over all ranks and before clipping."""

    def __init__(self, module: "PreTrainedModel", config: "TrainerConfig") -> None:
        self.module = module
        self.forward = module
        self._clip = config.grad_clip
        shape = (config.num_shares, config.tensor_parallel)
        mesh = init_device_mesh(local_device().type, shape, mesh_dim_names=(DATA, TENSOR))
        self._data, self._tensor = mesh[DATA], mesh[TENSOR]
        self._is_sharded = config.zero_stage == SHARDS_PARAMETERS and self._data.size() > 1
        if self._tensor.size() > 1:
            split_layers(module, self._tensor)
            _lay_apart(module)
        if self._is_sharded:
            self._shard()
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._trained = {name: named[name] for name in side_by_side(named)}
        self._kept = {name: _kept(parameter) for name, parameter in self._trained.items()}
        self._optimizer = torch.optim.AdamW(
            list(self._kept.values()),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
        )
        bound_collectives(config.collective_timeout_s)

    def _shard(self) -> None:
        """Shard the parameters over the data ranks: whole only layer by layer, while computing."""
        for part in (*layers_of(self.module), self.module):
            # The outermost would stay gathered after a forward pass without a backward pass.
            sharded = fully_shard(part, mesh=self._data, reshard_after_forward=True)
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
        for name, parameter in self._trained.items():
            gradient = parameter.grad
            kept = self._kept[name]
            kept.grad = torch.zeros_like(kept) if gradient is None else _kept(gradient)
            if not self._is_sharded:
                dist.all_reduce(kept.grad, group=self._data.get_group())
            kept.grad /= divisor
        norm = self._norm()
        scale = self._clip / (norm + CLIP_EPSILON) if self._clip else 1.0
        for kept in self._kept.values():
            assert kept.grad is not None
            kept.grad *= min(scale, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.module.zero_grad()
        return norm

    def _norm(self) -> float:
        """That of the gradient, of which each element counts once, however many ranks have it."""
        total = torch.zeros((), dtype=torch.float64, device=local_device())
        for name, parameter in self._trained.items():
            gradient = self._kept[name].grad
            assert gradient is not None
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            total += square / (dist.get_world_size() // _num_parts(parameter))
        dist.all_reduce(total)
        return total.sqrt().item()

    @property
    def gathers(self) -> bool:
        """A rank has only its part of the parameters."""
        return True

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, whole, once each. Collective: exhaust it.

        What every rank has whole is a view, which the next step changes.
        """
        for name, parameter in self._trained.items():
            yield name, _whole(parameter.detach())

    def placed(self) -> Iterator[tuple[str, Tensor, Shard]]:
        """What this rank keeps of what is trained, where it lies, and which part that is.

        A parameter that has nothing left for this rank is not there. Each step changes the tensors.
        """
        for name, parameter in self._trained.items():
            spec = TensorSpec(name, tuple(parameter.shape), (0,), _tensor_dim(parameter))
            place = self._tensor.get_local_rank()
            shard: Shard | None = tensor_shard(spec, place, self._tensor.size())
            if self._is_sharded and shard is not None:
                shard = shard.chunk(0, self._data.get_local_rank(), self._data.size())
            if shard is not None:
                yield name, self._kept[name], shard

    def move_into(self, served: Storage) -> None:
        """Keep there what lies there in one piece; the rest, and what FSDP2 has, stays.

        FSDP2 has memory of its own, which it gathers from.
        """
        if self._is_sharded:
            return
        for name, kept, shard in self.placed():
            place = place_in(served, name, kept, shard)
            if place is not None:
                place.copy_(kept)
                # Whoever holds one of them holds it still: the model the one, the optimizer the
                # other.
                _local(self._trained[name]).data = place
                kept.data = place

    def optimizer_state(self) -> Iterable[Tensor]:
        """Of what this rank keeps."""
        return tensors_of(self._optimizer)

    def fragments(self) -> Iterator[Fragment]:
        """What this rank keeps; what several have, one of them saves."""
        repeats = not self._is_sharded and self._data.get_local_rank() != 0
        is_neighbour = self._tensor.get_local_rank() != 0
        for name, kept, shard in self.placed():
            is_copy = repeats or (is_neighbour and _tensor_dim(self._trained[name]) is None)
            yield Fragment(shard, kept, is_copy=is_copy)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, on what this rank keeps."""
        return self._optimizer

    def refresh(self) -> None:
        """Nothing: what the optimizer updates is computed with."""

    def load_pickled(self, directory: Path) -> None:
        """Read what this backend once wrote."""
        place = dist.get_rank() if self._is_sharded else self._tensor.get_local_rank()
        path = directory / f"torch_state_{place}.pt"
        state = load_plain(path)
        for name, kept in self._kept.items():
            kept.copy_(state["model"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Leave the ranks."""
        leave_ranks()


def _kept(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local(parameter: Tensor) -> Tensor:
    """The tensor a parameter has on this rank; `to_local` gives a view of it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _lay_apart(module: "PreTrainedModel") -> None:
    """Give what is not cut memory of its own.

    It lies in the file of the model, of which the cut parameters would stay mapped, too.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.detach().clone()


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Collective where it is cut."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Put together in the reverse order of the cuts: chunks over the data first.
    placements = list(tensor.placements)
    for mesh_dim in range(len(placements)):
        placements[mesh_dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _num_parts(parameter: Tensor) -> int:
    """Into how many parts a parameter is cut; equally many ranks have each of them."""
    return math.prod(size for _, size, _ in _cuts(parameter))


def _tensor_dim(parameter: Tensor) -> int | None:
    """Which dimension tensor parallelism cuts."""
    return next((dim for mesh_dim, _, dim in _cuts(parameter) if mesh_dim == TENSOR), None)


def _cuts(parameter: Tensor) -> list[tuple[str, int, int]]:
    """How a parameter is cut: over which dimension of the mesh, into how many, and where."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    over = zip(names, mesh.shape, parameter.placements, strict=True)
    # What both dimensions of the mesh cut is strided, which torch does not count as a shard.
    return [(name, size, at.dim) for name, size, at in over if isinstance(at, Cut | StridedCut)]
