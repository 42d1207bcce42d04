"""Training backend torch without sharding: every rank has all parameters and moments, float32.

Kept simple: the DeepSpeed and FSDP2 backends are tested against it.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.distributed.process_group import leave_process_group
from streamrl.engines.checkpoint.legacy_pickles import load_plain_pickle
from streamrl.engines.checkpoint.sharded_state import ParameterFragment
from streamrl.engines.training.aliased_params import make_sisters_contiguous
from streamrl.engines.training.optimizer_offload import iter_optimizer_tensors
from streamrl.resharding.layouts import TensorShard, create_whole_shard
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import order_for_fusion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig

LEGACY_STATE_FILE = "torch_state.pt"


class TorchBackend:
    """A data-parallel replica of the model as a TrainingBackend.

    `step` sums the accumulated gradients over ranks and divides.
    """

    def __init__(self, module: "PreTrainedModel", config: "TrainerConfig") -> None:
        make_sisters_contiguous(module)
        self.module = module
        self.forward = module
        self._grad_clip = config.grad_clip
        self._trained_params = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained_params,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
        )

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, *, divisor: float, lr: float) -> float:
        for parameter in self._trained_params:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= divisor
        norm = torch.nn.utils.clip_grad_norm_(self._trained_params, self._grad_clip or math.inf)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if norm.isfinite():
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()

    @property
    def has_sharded_params(self) -> bool:
        return False

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every trained parameter; the tensors are views, which the next update changes."""
        trained = {n: p.detach() for n, p in self.module.named_parameters() if p.requires_grad}
        yield from ((name, trained[name]) for name in order_for_fusion(trained))

    def iter_shards(self) -> Iterator[tuple[str, Tensor, TensorShard]]:
        for name, tensor in self.full_state():
            yield name, tensor, create_whole_shard(name, tuple(tensor.shape))

    def alias_into(self, served: ShardStorage) -> None:
        """Do nothing: neither kind of generator needs parameters to be moved.

        An unsplit generator aliases the full parameters through `load_weights`; a split generator
        holds only parts of the parameters.
        """

    def iter_optimizer_state(self) -> Iterable[Tensor]:
        return iter_optimizer_tensors(self._optimizer)

    def iter_fragments(self) -> Iterator[ParameterFragment]:
        is_copy = dist.get_rank() != 0
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                shard = create_whole_shard(name, tuple(parameter.shape))
                yield ParameterFragment(shard, parameter, is_copy=is_copy)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def refresh_params(self) -> None:
        """Do nothing: the forward pass uses the tensors that the optimizer updates."""

    def load_legacy_state(self, directory: Path) -> None:
        state = load_plain_pickle(directory / LEGACY_STATE_FILE)
        for name, parameter in self.full_state():
            parameter.copy_(state["model"][name])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        leave_process_group()
