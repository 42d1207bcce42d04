"""Base of the training backends: gradients and optimizer of a rank.

A backend overrides what it shards.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streamrl.distributed.process_group import leave_process_group
from streamrl.engines.checkpoint.sharded_state import ParameterFragment
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.optimizer_offload import iter_optimizer_tensors
from streamrl.resharding.layouts import TensorShard, create_whole_shard
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import group_for_fusion, order_for_fusion


class TrainingBackend:
    """Gradients and optimizer of a trainer rank. All ranks must make the same collective calls.

    forward: callable that runs the model's forward pass; calls may be collective.
    has_sharded_params: whether a rank holds only a shard of the parameters; `full_state` is then
    collective.
    optimizer: AdamW over the `optimizer_tensor` of the fragments; its moments have the same layout.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, module: PreTrainedModel, config: TrainerConfig) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module
        self._config = config
        self.has_sharded_params = config.has_sharded_params

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

    def step(self, *, divisor: float, lr: float) -> float:
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
        for name, parameter in self.trained_params.items():
            yield name, parameter.detach()

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
