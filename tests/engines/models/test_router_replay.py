"""Replay of experts in mixtures of experts, against a mixture computed plainly."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.models.forward import TokenScores, compute_token_logprobs, iter_layers
from streamrl.engines.models.packed_rows import enable_packing
from streamrl.engines.models.router_replay import Routing, enable_router_replay
from tests.engines.tiny_families import FAMILIES, make_model, make_rows

LENGTHS = (9, 6)
MIXTURES = [name for name, sizes in FAMILIES.items() if "num_experts_per_tok" in sizes]
UNKNOWN = 255


def make_mixture(family: str = "qwen3_moe") -> PreTrainedModel:
    model = make_model(family)
    enable_router_replay(model, iter_layers(model))
    return model


def score(model: PreTrainedModel, routing: Routing) -> TokenScores:
    ids, mask = make_rows(LENGTHS)
    return compute_token_logprobs(
        model, ids, mask, temperature=0.7, entropy_mode="gradient", routing=routing
    )


def differentiate(model: PreTrainedModel, scores: TokenScores) -> dict[str, Tensor]:
    """Return the gradients of a sum to which tokens contribute differently."""
    weights = torch.arange(1.0, scores.logprobs.numel() + 1).view_as(scores.logprobs)
    (weights * (scores.logprobs + scores.entropy)).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def draw_experts(width: int) -> Tensor:
    """Return experts of two rows and two layers, two of four each; some tokens have none."""
    random = torch.manual_seed(1)
    experts = torch.rand(2, max(LENGTHS), 2, 4, generator=random).argsort(-1)[..., :2]
    chosen = experts.flatten(2).to(torch.uint8)
    assert chosen.shape[-1] == width
    chosen[1, 2] = UNKNOWN
    return chosen


class PlainMixture(nn.Module):
    """Qwen3-MoE's mixture as a sum over all experts, with weights of those given or of its own."""

    def __init__(self, block: Any, chosen: Tensor) -> None:
        super().__init__()
        self.block, self.chosen = block, chosen

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.flatten(0, -2)
        scores = (tokens @ self.block.gate.weight.T).float().exp()
        rows = []
        for number, token in enumerate(tokens):
            experts = self.chosen[number].tolist()
            if experts[0] == UNKNOWN:
                experts = scores[number].argsort(descending=True)[:2].tolist()
            outputs = []
            for expert in experts:
                gate, up = (self.block.experts.gate_up_proj[expert] @ token).chunk(2)
                hidden = gate * torch.sigmoid(gate) * up
                down = self.block.experts.down_proj[expert] @ hidden
                outputs.append(scores[number, expert] / scores[number].sum() * down)
            rows.append(sum(outputs))
        return torch.stack(rows).view_as(states)


@pytest.mark.parametrize("way", ["padded", "packed", "recomputed"])
def test_replayed_experts_and_their_gradients_are_those_of_a_plain_mixture(way: str):
    chosen = draw_experts(4)
    model = make_mixture()
    if way == "packed":
        enable_packing(model)
    if way == "recomputed":
        checkpoint_layers(model, offload=False, chunk_mlps=True)
    scores = score(model, routing := Routing(chosen))
    grads = differentiate(model, scores)
    plain = make_model("qwen3_moe")
    for index, layer in enumerate(plain.model.layers):
        layer.mlp = PlainMixture(layer.mlp, chosen.flatten(0, 1)[:, 2 * index : 2 * index + 2])
    ids, mask = make_rows(LENGTHS)
    expected = compute_token_logprobs(plain, ids, mask, temperature=0.7, entropy_mode="gradient")
    torch.testing.assert_close(scores[:2], expected[:2], atol=1e-4, rtol=1e-4)
    plain_grads = {
        name.replace("mlp.block.", "mlp."): grad
        for name, grad in differentiate(plain, expected).items()
    }
    assert grads.keys() == plain_grads.keys()
    assert "model.layers.0.mlp.gate.weight" in grads
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain_grads[name], atol=2e-3, rtol=2e-3)
    assert 0 < routing.sums["num_rerouted"] <= routing.sums["num_routed"]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_pass_repeats_the_experts_of_another(family: str, is_packed: bool):
    model = make_mixture(family)
    if is_packed:
        enable_packing(model)
    first = score(model, recorded := Routing())
    experts = recorded.get_own()
    assert recorded.sums == {}
    ids, mask = make_rows(LENGTHS)
    experts[~mask] = UNKNOWN  # as `build_batch` pads
    known = (experts.view(*ids.shape, 2, -1) != UNKNOWN).all(-1)[mask]
    # The first layer of some families is dense.
    assert known[:, 1].all()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1." in name and ("gate.weight" in name or "router" in name):
                parameter.neg_()
    again = score(model, measured := Routing(experts, replays=False))
    assert measured.sums["num_rerouted"] > 0
    assert measured.sums["num_routed"] == known.sum()
    replayed = score(model, Routing(experts))
    assert not torch.allclose(again.logprobs, replayed.logprobs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1." in name and ("gate.weight" in name or "router" in name):
                parameter.neg_()
    same = score(model, Routing(experts))
    torch.testing.assert_close(same[:2], first[:2], atol=1e-5, rtol=1e-5)


def test_a_pass_without_routing_forgets_the_experts_of_the_last():
    model = make_mixture()
    ids, mask = make_rows(LENGTHS)
    own = compute_token_logprobs(model, ids, mask, temperature=0.7).logprobs
    assert not torch.allclose(score(model, Routing(draw_experts(4))).logprobs, own)
    again = compute_token_logprobs(model, ids, mask, temperature=0.7).logprobs
    assert torch.equal(again, own)
