"""Replay of the experts that routers of a mixture chose in another pass, or in the generator.

Each family's router chooses by `torch.topk` over the experts and then weighs those chosen, by code
of its own. `ReplayedLayer` runs in a decoder layer and answers that one call with the replayed
experts and their scores: the rest of the router runs as ever, and its logits get their gradient. A
recomputation of the layer in the backward pass makes the same choice.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from streamrl.engines.models.packed_rows import RowLayout
from streamrl.engines.models.tensor_parallel_support import ExpertSizes, get_expert_sizes

ROUTING = "routing"
"""Attribute of a model whose layers replay experts: the `Routing` of the newest pass, or None."""


class Routing:
    """Experts of the tokens of one forward pass, and of its recomputations.

    chosen: uint8 [B, T, layers * k], 255 where unknown, or None. Routers take these experts if
    `replays`, and their own where unknown; in any case differences are counted.
    """

    def __init__(self, chosen: Tensor | None = None, *, replays: bool = True) -> None:
        self._chosen, self._replays = chosen, replays
        self._counts: dict[int, Tensor] = {}
        self._own: dict[int, Tensor] = {}

    def arrange(self, rows: RowLayout, sizes: ExpertSizes) -> None:
        """Arrange experts as the tokens of a forward pass are."""
        self._rows, self._sizes = rows, sizes
        self._arranged: Tensor | None = None
        if self._chosen is not None:
            # 0 is unknown, also to tokens that `RowLayout` adds.
            self._arranged = rows.arrange(self._chosen + 1).view(-1, sizes.num_layers, sizes.top_k)

    def is_choice(self, scores: Tensor, chosen: Tensor) -> bool:
        """Return whether torch.topk has chosen experts, not groups of them."""
        sizes = (*scores.shape[1:], *chosen.shape[1:])
        return sizes == (self._sizes.num_experts, self._sizes.top_k)

    def choose(self, layer: int, scores: Tensor, own: Any) -> Any:
        """Return values and indices of the experts that count, in place of torch.topk's."""
        if self._arranged is None:
            self._own[layer] = own.indices.to(torch.uint8)
            return own
        chosen = self._arranged[:, layer]
        known = (chosen > 0).any(-1, keepdim=True)
        indices = torch.where(known, (chosen - 1).long(), own.indices)
        differs = (indices.sort(-1).values != own.indices.sort(-1).values).any(-1)
        self._counts[layer] = torch.stack((differs.sum(), known.sum()))
        return type(own)((scores.gather(-1, indices), indices)) if self._replays else own

    @property
    def sums(self) -> dict[str, Tensor]:
        """Differing choices, and all, of tokens and layers; empty if nothing was compared."""
        if not self._counts:
            return {}
        differing, known = torch.stack([*self._counts.values()]).sum(0)
        return {"num_rerouted": differing, "num_routed": known}

    def get_own(self) -> Tensor:
        """Return the experts that the routers chose, in the form of `chosen`. Collective."""
        ids = self._rows.token_ids
        shape = (self._sizes.num_layers, ids.numel(), self._sizes.top_k)
        experts = torch.full(shape, 255, dtype=torch.uint8, device=ids.device)
        for layer, own in self._own.items():
            experts[layer] = own
        return self._rows.restore(experts.transpose(1, 2).reshape(-1, *ids.shape)).permute(1, 2, 0)


class ReplayedLayer(TorchFunctionMode):
    """Context in which the router of a decoder layer chooses the experts of a `Routing`."""

    def __init__(self, routing: Routing, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if (
            func in (torch.topk, Tensor.topk)
            and args
            and self._routing.is_choice(args[0], output.indices)
        ):
            return self._routing.choose(self._layer, args[0], output)
        return output


def enable_router_replay(model: PreTrainedModel, layers: Iterable[nn.Module]) -> None:
    """Make the decoder layers of a mixture of experts heed the `Routing` of each scoring pass."""
    vars(model)[ROUTING] = None
    for index, layer in enumerate(layers):
        vars(layer)["forward"] = partial(_run_layer, model, index, layer.forward)


def _run_layer(model: PreTrainedModel, index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
    routing: Routing | None = vars(model)[ROUTING]
    if routing is None:
        return forward(*args, **kwargs)
    with ReplayedLayer(routing, index):
        return forward(*args, **kwargs)


def begin_routing(model: Any, rows: RowLayout, routing: Routing | None) -> None:
    """Set the routing of a forward pass, and of its backward pass, until the next one."""
    if ROUTING not in vars(model):
        return
    if routing is not None:
        routing.arrange(rows, get_expert_sizes(model.config))
    vars(model)[ROUTING] = routing
