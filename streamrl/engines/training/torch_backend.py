"""Training backend torch without sharding: every rank has all parameters and moments, float32."""

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from streamrl.engines.training.training_backend import TrainingBackend, make_siblings_contiguous

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.engines.trainer_config import TrainerConfig


class TorchBackend(TrainingBackend):
    """A data-parallel replica of the model. Kept simple: the other backends are tested against it.

    `step` sums the accumulated gradients over ranks and divides.
    """

    def __init__(self, module: "PreTrainedModel", config: "TrainerConfig") -> None:
        make_siblings_contiguous(module)
        super().__init__(module, config)
        self.optimizer = self._make_optimizer(p for p in module.parameters() if p.requires_grad)

    def step(self, *, divisor: float, lr: float) -> float:
        parameters = self.optimizer.param_groups[0]["params"]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= divisor
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.grad_clip or math.inf)
        return self._apply_update(norm.item(), lr)
