"""Scores through the output head in chunks, against the model's own logits."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamrl.algorithms.math.losses import entropy_from_logits
from streamrl.engines.models import chunked_head
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.models.chunked_head import EntropyMode, TopWords, compute_chunk_gradients
from streamrl.engines.models.forward import compute_token_logprobs
from streamrl.engines.models.packed_rows import enable_packing
from tests.engines.tiny_families import FAMILIES, VOCABULARY, WidestTensor, make_model

TEMPERATURE = 0.7
Results = tuple[Tensor, Tensor, dict[str, Tensor]]


def make_ids(rows: int, width: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, width), generator=torch.manual_seed(1))


def weigh(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return a sum to which every token contributes differently."""
    weights = torch.arange(1, logprobs.numel() + 1).view_as(logprobs) / logprobs.numel()
    return (weights * logprobs).sum() + (weights.flip(0) * entropy).sum()


def collect_gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def score_plainly(model: PreTrainedModel, ids: Tensor, mode: EntropyMode) -> Results:
    """Score all tokens but the first from the model's logits, [B, T - 1]."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float() / TEMPERATURE
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    entropy = entropy_from_logits(logits)
    if mode != "gradient":
        entropy = entropy.detach() * (mode == "value")
    weigh(logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach(), collect_gradients(model)


def score_in_chunks(model: PreTrainedModel, ids: Tensor, mode: EntropyMode) -> Results:
    mask = torch.ones_like(ids, dtype=torch.bool)
    scores = compute_token_logprobs(model, ids, mask, temperature=TEMPERATURE, entropy_mode=mode)
    logprobs, entropy = scores.logprobs[:, 1:], scores.entropy[:, 1:]
    weigh(logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach(), collect_gradients(model)


def assert_equal_scores(model: PreTrainedModel, ids: Tensor, mode: EntropyMode) -> None:
    actual, expected = score_in_chunks(model, ids, mode), score_plainly(model, ids, mode)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_head, "HEAD_CHUNK_TOKENS", tokens)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_the_logits_of_the_family(family: str):
    with chunks_of(5):
        assert_equal_scores(make_model(family), make_ids(2, 12), "gradient")


@pytest.mark.parametrize("mode", ["none", "value", "gradient"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_entropy_mode_has_the_gradients_of_the_logits(mode: EntropyMode, tied: bool):
    model = make_model("qwen2", tie_word_embeddings=tied)
    with chunks_of(7):
        assert_equal_scores(model, make_ids(3, 9), mode)


@pytest.fixture(scope="module")
def granite() -> PreTrainedModel:
    return make_model("granite")


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 3), width=st.integers(2, 20), chunk=st.integers(1, 70))
def test_the_size_of_the_chunks_changes_nothing(
    granite: PreTrainedModel, rows: int, width: int, chunk: int
):
    with chunks_of(chunk):
        assert_equal_scores(granite, make_ids(rows, width), "gradient")


def renormalize_plainly(logits: list[float], word: int, mask: list[int]) -> tuple[float, float]:
    """Return logprob and entropy of a word among those of the mask that are ids."""
    among = [i for i in mask if i >= 0] or [*range(len(logits))]
    total = math.log(sum(math.exp(logits[i]) for i in among))
    entropy = -sum(math.exp(logits[i] - total) * (logits[i] - total) for i in among)
    return logits[word] - total, entropy


@pytest.mark.parametrize("lengths", [(9, 9), (9, 6)], ids=["whole", "packed"])
def test_scores_are_renormalized_over_the_sampling_mask(lengths: tuple[int, ...]):
    model = make_model("qwen2").double()
    enable_packing(model)
    ids = make_ids(2, 9)
    attention = torch.arange(9) < torch.tensor(lengths)[:, None]
    mask = torch.randint(3, VOCABULARY, (2, 9, 4), generator=torch.manual_seed(2))
    mask[..., 2] = ids
    mask[..., 3] = -1
    mask[:, 3] = -1
    # The token alone, and a word twice.
    mask[:, 4, :2] = -1
    mask[:, 5, 0] = mask[:, 5, 1]
    with chunks_of(5), torch.no_grad():
        scores = compute_token_logprobs(
            model,
            ids,
            attention,
            temperature=TEMPERATURE,
            entropy_mode="value",
            sampling_mask=mask.int(),
        )
        for row, length in enumerate(lengths):
            logits = model(ids[row : row + 1, :length]).logits[0] / TEMPERATURE
            for at in range(1, length):
                words = sorted({*mask[row, at].tolist()})
                expected = renormalize_plainly(logits[at - 1].tolist(), int(ids[row, at]), words)
                actual = scores.logprobs[row, at].item(), scores.entropy[row, at].item()
                assert actual == pytest.approx(expected, abs=1e-5)
    assert scores.logprobs[:, 4].tolist() == [0, 0]


def test_gradients_of_renormalized_scores_are_finite_differences():
    model = make_model("qwen2").double()
    ids, direction = make_ids(1, 6), torch.manual_seed(3)
    mask = torch.cat((ids[..., None], ids.flip(-1)[..., None]), dim=-1)
    weight = model.model.layers[0].mlp.up_proj.weight
    step = torch.randn(weight.shape, generator=direction, dtype=weight.dtype)
    start = weight.detach().clone()

    def compute(offset: float = 0.0) -> Tensor:
        with torch.no_grad():
            weight.copy_(start + offset * step)
        scores = compute_token_logprobs(
            model,
            ids,
            torch.ones_like(ids).bool(),
            temperature=TEMPERATURE,
            entropy_mode="gradient",
            sampling_mask=mask,
        )
        return scores.logprobs.sum() + scores.entropy.sum()

    with chunks_of(4):
        compute().backward()
        assert weight.grad is not None
        difference = (compute(1e-2) - compute(-1e-2)).item() / 2e-2
    assert (weight.grad * step).sum().item() == pytest.approx(difference, rel=1e-2)


@pytest.mark.parametrize("is_packed", [False, True])
def test_further_words_are_scored_in_the_place_of_each_token(is_packed: bool):
    model = make_model("qwen2")
    ids, mask = make_ids(2, 9), torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    words = torch.randint(VOCABULARY, (2, 9, 3), generator=torch.manual_seed(2))
    logits = model(input_ids=ids, use_cache=False).logits / TEMPERATURE
    plain = logits[:, :-1].log_softmax(-1).gather(-1, words[:, 1:]) * mask[:, 1:, None]
    weights = torch.arange(1.0, 4.0)
    (plain * weights).sum().backward()
    expected, best = collect_gradients(model), logits[:, :-1, :50].topk(4)
    if is_packed:
        enable_packing(model)
    with chunks_of(5):
        scores = compute_token_logprobs(model, ids, mask, temperature=TEMPERATURE, words=words)
        top = compute_token_logprobs(
            model, ids, mask, temperature=TEMPERATURE, words=TopWords(4, vocab_size=50)
        )
    assert scores.word_logprobs is not None and top.word_ids is not None
    torch.testing.assert_close(scores.word_logprobs[:, 1:], plain, atol=1e-5, rtol=1e-5)
    (scores.word_logprobs * weights).sum().backward()
    torch.testing.assert_close(collect_gradients(model), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(top.word_ids[:, 1:].long(), best.indices * mask[:, 1:, None])
    found, total = top.word_logprobs, logits[:, :-1].logsumexp(-1, keepdim=True)
    assert found is not None
    expected_top = (best.values - total) * mask[:, 1:, None]
    torch.testing.assert_close(found[:, 1:], expected_top, atol=1e-5, rtol=1e-5)


def test_gradients_of_many_chunks_are_summed_in_float32():
    """In bfloat16 the sum of ones would stay at 256."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = one.clone().requires_grad_()
    chunks = [(lambda x: x * weight, one, one)] * 300
    (gradient,) = compute_chunk_gradients(chunks, [torch.empty_like(one)] * 300, [weight])
    assert gradient is not None
    assert gradient.item() == 300


def test_the_model_is_left_as_it_was():
    model = make_model("qwen2")
    ids = make_ids(1, 6)
    before = model(ids).logits
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    score_in_chunks(model, ids, "value")
    with pytest.raises(IndexError):
        score_in_chunks(model, ids + VOCABULARY, "none")
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", ["none", "gradient"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite"])
def test_no_tensor_has_an_element_per_token_and_word(
    family: str, mode: EntropyMode, recompute: bool
):
    words, tokens = 4 * VOCABULARY, 256
    model = make_model(family, vocab_size=words)
    if recompute:
        checkpoint_layers(model, offload=False, chunk_mlps=False)
    parameters = max(parameter.numel() for parameter in model.parameters())
    assert parameters < tokens * words
    with chunks_of(16), WidestTensor() as widest:
        score_in_chunks(model, make_ids(2, tokens // 2), mode)
    assert widest.elements <= max(parameters, 2 * tokens * 4 * 128)
