"""Activation checkpointing of decoder layers: less memory, more time.

Each layer keeps its inputs, on the device or in host memory, and the backward pass runs the layer
once more. Then the activations of the MLP are most of a layer's memory: several vectors per token
that are five times as wide as its inputs. So the MLP runs on `MLP_CHUNK_TOKENS` tokens at a time,
and its own backward pass computes them again, a chunk at a time.

The MLP saves its inputs before it runs. torch's checkpoint stops a recomputation at the last tensor
that the backward pass needs, so the layer is recomputed up to the MLP: chunks cost no second
recomputation, except in families that need activations behind the MLP. Models that only score run
their MLPs in chunks as well.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.engines.models.chunked_head import compute_chunk_gradients
from streamrl.engines.models.forward import iter_layers

MLP_CHUNK_TOKENS = 4096
"""Tokens for which the activations of an MLP exist at the same time."""


def checkpoint_layers(module: PreTrainedModel, *, offload: bool, chunk_mlps: bool) -> None:
    """Make the backward pass recompute the activations of each decoder layer.

    offload: keep the inputs of the layers in pinned host memory; needs a GPU. chunk_mlps: run MLPs
    in chunks of tokens; needs whole matrices, so no tensor parallelism.
    """
    # transformers copies on the compute stream. That is 5 % of a layer's time at a hidden size of
    # 5120, by 50 GB/s and 400 TFLOP/s, so a stream of its own is not worth its code.
    module.gradient_checkpointing_enable({"use_reentrant": False}, offload=offload)
    _checkpoint_without_noise(module)
    if chunk_mlps:
        run_mlps_in_chunks(module)


def _checkpoint_without_noise(module: nn.Module) -> None:
    """Show training mode to the call of each layer, which then checkpoints, not to its forward."""

    def leave_training(layer: nn.Module, *_: Any) -> None:
        layer.training = False

    def enter_training(layer: nn.Module, *_: Any) -> None:
        layer.training = True

    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
            layer.register_forward_pre_hook(leave_training)
            # A recomputation ends by an exception once it has what the backward pass needs.
            layer.register_forward_hook(enter_training, always_call=True)


def run_mlps_in_chunks(module: PreTrainedModel) -> None:
    """Let activations of an MLP exist for `MLP_CHUNK_TOKENS` tokens at a time, where possible."""
    for mlp in iter_tokenwise_mlps(module):
        vars(mlp)["forward"] = functools.partial(_run_in_chunks, mlp, mlp.forward)


def iter_tokenwise_mlps(module: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the MLPs of decoder layers that map each token by itself, with linear layers only.

    Mixtures of experts hold their experts in other parameters or in lists. BLOOM's MLP adds the
    residual, a second argument.
    """
    for layer in iter_layers(module):
        mlp = layer._modules.get("mlp")
        if (
            mlp is not None
            and len(inspect.signature(mlp.forward).parameters) == 1
            and all(
                isinstance(part, nn.Linear)
                or not (part._parameters or isinstance(part, nn.ModuleList))
                for part in mlp.modules()
            )
        ):
            yield mlp


def iter_chunked_mlps(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the MLPs that run in chunks."""
    for part in module.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _run_in_chunks:
            yield part


def _run_in_chunks(
    mlp: nn.Module, forward: Callable[[Tensor], Tensor], hidden_states: Tensor
) -> Tensor:
    """Run an MLP on hidden states [B, T, H].

    Training takes chunks at any length: ZeRO 2 adds the gradients of the ranks in the order in
    which they are finished, so the order must not depend on a rank's tokens.
    """
    tokens = hidden_states.flatten(0, -2)
    has_grad = torch.is_grad_enabled()
    if not tokens.requires_grad if has_grad else len(tokens) <= MLP_CHUNK_TOKENS:
        return forward(hidden_states)

    def run_chunk(chunk: Tensor) -> Tensor:
        return forward(chunk[None])[0]

    if has_grad:
        saved = _SavedInputs.apply(tokens)

        def get_inputs() -> Tensor:
            (inputs,) = saved.grad_fn.saved_tensors
            return inputs

        output: Tensor = _ChunkedMlp.apply(run_chunk, get_inputs, tokens, *mlp.parameters())
    else:
        output = torch.cat([run_chunk(chunk) for chunk in tokens.split(MLP_CHUNK_TOKENS)])
    return output.view(*hidden_states.shape[:-1], -1)


class _SavedInputs(torch.autograd.Function):
    """Node that saves the inputs of an MLP before the MLP runs; it has no gradient.

    Keep its output: PyTorch may free what a node has saved once its output is gone.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return tokens.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise AssertionError("not part of the graph")


class _ChunkedMlp(torch.autograd.Function):
    """MLP on tokens [N, H]; the backward pass computes the chunks again.

    Parameters are read from the module's context, not saved: a tensor saved after the inputs would
    make the layer's recomputation run the MLP.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run_chunk: Callable[[Tensor], Tensor],
        get_inputs: Callable[[], Tensor],
        tokens: Tensor,
        *params: Tensor,
    ) -> Tensor:
        ctx.run_chunk, ctx.get_inputs, ctx.params = run_chunk, get_inputs, params
        return torch.cat([run_chunk(chunk) for chunk in tokens.split(MLP_CHUNK_TOKENS)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ctx.get_inputs = ctx.get_inputs(), None
        grad_tokens = torch.empty_like(tokens)
        chunks = zip(
            repeat(ctx.run_chunk),
            tokens.split(MLP_CHUNK_TOKENS),
            grad_output.split(MLP_CHUNK_TOKENS),
        )
        grads = compute_chunk_gradients(chunks, grad_tokens.split(MLP_CHUNK_TOKENS), ctx.params)
        return None, None, grad_tokens, *grads
