"""Rows packed without padding, against the same rows padded."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from streamrl.engines.models import packed_rows
from streamrl.engines.models.forward import TokenScores, compute_token_logprobs
from streamrl.engines.models.packed_rows import (
    PACKED_ATTENTION,
    enable_packing,
    explain_padding,
)
from streamrl.errors import StreamError
from tests.engines.models.test_chunked_head import collect_gradients, weigh
from tests.engines.tiny_families import COMMON, FAMILIES, SLOW, make_model, make_rows

TEMPERATURE = 0.7
LENGTHS = (3, 24, 1, 9)
"""Lengths of rows, some above the sliding window of 16 of FAMILIES."""
PADDED = {
    "gpt_oss": "its attention function, eager",
    "gptj": "cannot be replaced",
    "falcon_h1": "state from token to token",
    "granitemoehybrid": "state from token to token",
    "mamba2": "state from token to token",
    "llama4_text": "of type chunked_attention mix tokens",
}
"""Families of FAMILIES whose rows are padded, and the reason."""


def score(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> TokenScores:
    return compute_token_logprobs(
        model, ids, mask, temperature=TEMPERATURE, entropy_mode="gradient"
    )


def differentiate(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Any, ...]:
    """Return logprobs, entropies and the gradient of a sum to which tokens add differently."""
    scores = score(model, ids, mask)
    weigh(scores.logprobs, scores.entropy).backward()
    return scores.logprobs.detach(), scores.entropy.detach(), collect_gradients(model)


def pack(model: PreTrainedModel) -> PreTrainedModel:
    enable_packing(model)
    assert model.config._attn_implementation == PACKED_ATTENTION
    return model


def pad(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("sdpa")
    return model


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return make_model("qwen2")


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple))
def test_any_lengths_have_the_scores_and_gradients_of_padded_rows(
    qwen: PreTrainedModel, lengths: tuple[int, ...]
):
    rows = make_rows(lengths)
    expected = differentiate(pad(qwen), *rows)
    torch.testing.assert_close(differentiate(pack(qwen), *rows), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW and name != "mistral"))
        for name in FAMILIES
        if name not in PADDED
    ],
)
def test_every_family_has_the_scores_and_gradients_of_padded_rows(family: str):
    model, rows = make_model(family), make_rows(LENGTHS)
    expected = differentiate(pad(model), *rows)
    torch.testing.assert_close(differentiate(pack(model), *rows), expected, atol=1e-4, rtol=1e-4)


def test_the_model_computes_no_padding(qwen: PreTrainedModel):
    ids, mask = make_rows(LENGTHS)
    shapes = []
    handle = (
        pack(qwen)
        .get_output_embeddings()
        .register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape[:2]))
    )
    score(qwen, ids, mask)
    score(pad(qwen), ids, mask)
    handle.remove()
    assert shapes == [(1, sum(LENGTHS)), (len(LENGTHS), max(LENGTHS))]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        *((family, {}, reason) for family, reason in PADDED.items()),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            "of type conv mix tokens",
        ),
        ("nemotron", {}, "drop arguments of attention"),
        ("gemma3", {}, "more than text"),
        ("phimoe", {"sliding_window": 16}, "do not pass on their sliding window"),
        ("bloom", {}, "cannot be replaced"),
    ],
)
def test_families_that_mix_the_tokens_of_rows_are_padded(
    family: str, changes: dict[str, Any], reason: str
):
    config = AutoConfig.for_model(family, **changes)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    assert reason in explain_padding(model_class, config, attention)


def test_layers_that_drop_the_bounds_of_rows_raise_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_rows, "DROPPING_FAMILIES", ())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron", **COMMON))
    with pytest.raises(StreamError, match=r"set trainer\.attention=eager"):
        score(pack(model), *make_rows(LENGTHS))


def attend_by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    _: Tensor,
    longest: int,
    __: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute torch's variable-length attention, with the same arguments, row by row."""
    assert offsets.dtype == torch.int32 and longest == offsets.diff().max()
    before, after = window_size
    outputs = []
    for row in zip(
        *(x.tensor_split(offsets[1:-1].long()) for x in (query, key, value)), strict=True
    ):
        length = len(row[0])
        ahead = torch.arange(length) - torch.arange(length)[:, None]
        seen = (ahead <= after) & (ahead >= (-before if before >= 0 else -length))
        queries, keys, values = (x.transpose(0, 1)[None] for x in row)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3_text", "granite", "deepseek_v2"])
def test_arguments_of_the_gpus_kernel_mean_the_same(family: str, monkeypatch: pytest.MonkeyPatch):
    model, rows = pack(make_model(family)), make_rows(LENGTHS)
    expected = differentiate(model, *rows)
    monkeypatch.setattr(packed_rows, "_fits_kernel", lambda _: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_definition)
    torch.testing.assert_close(differentiate(model, *rows), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "mistral", "deepseek_v2"])
def test_the_gpus_kernel_computes_the_same(family: str, monkeypatch: pytest.MonkeyPatch):
    model = pack(make_model(family)).to("cuda", torch.bfloat16)
    ids, mask = (rows.to("cuda") for rows in make_rows((300, 5, 90)))
    packed = score(model, ids, mask).logprobs
    monkeypatch.setattr(packed_rows, "_fits_kernel", lambda _: False)
    torch.testing.assert_close(packed, score(model, ids, mask).logprobs, atol=0.1, rtol=0.05)
