"""Checkpointed layers: MLPs in chunks of tokens, and layer inputs in host memory."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.memory import LiveBytes, offload_uncounted
from streamrl.engines.models import activation_checkpointing
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from tests.engines.models.test_chunked_head import Results, make_ids, score_in_chunks
from tests.engines.tiny_families import make_model

ROWS, WIDTH, CHUNK = 3, 9, 4
NUM_CHUNKS = 7


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(activation_checkpointing, "MLP_CHUNK_TOKENS", CHUNK)
    yield


def score(model: PreTrainedModel) -> Results:
    return score_in_chunks(model, make_ids(ROWS, WIDTH), "gradient")


def count_calls(model: PreTrainedModel, name: str) -> list[int]:
    """Return a list that grows by the tokens of each call of a submodule."""
    calls: list[int] = []
    model.get_submodule(name).register_forward_hook(
        lambda _, __, output: calls.append(output.flatten(0, -2).shape[0])
    )
    return calls


@pytest.mark.parametrize(
    ("family", "linear", "forwards"),
    [
        ("qwen2", "model.layers.0.mlp.up_proj", 2),
        ("phi3", "model.layers.1.mlp.gate_up_proj", 2),
        ("gpt_neox", "gpt_neox.layers.0.mlp.dense_h_to_4h", 2),
        # Gemma 2 norms the output of the MLP, so the layer's recomputation needs the output.
        ("gemma2", "model.layers.0.mlp.up_proj", 3),
    ],
)
def test_chunks_change_no_gradient_and_cost_no_second_recomputation(
    family: str, linear: str, forwards: int
):
    model = make_model(family)
    expected = score(model)
    checkpoint_layers(model, offload=False, chunk_mlps=True)
    calls = count_calls(model, linear)
    torch.testing.assert_close(score(model), expected, atol=1e-4, rtol=1e-4)
    assert calls == [*([CHUNK] * (NUM_CHUNKS - 1)), ROWS * WIDTH % CHUNK] * forwards


def test_mixtures_of_experts_are_not_chunked():
    model = make_model("qwen3_moe")
    checkpoint_layers(model, offload=False, chunk_mlps=True)
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_mlp_with_a_second_argument_is_not_chunked():
    """BLOOM's MLP takes the residual, too."""
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **sizes))
    checkpoint_layers(model.train(), offload=False, chunk_mlps=True)
    model(input_ids=make_ids(2, 8)).logits.sum().backward()


def test_offloaded_layer_inputs_change_no_gradient_and_take_no_memory():
    layers, hidden = 8, 64
    model = make_model("qwen2", num_hidden_layers=layers, hidden_size=hidden)
    kept, results = [], []
    for offload in (False, True):
        checkpoint_layers(model, offload=offload, chunk_mlps=False)
        with LiveBytes() as counter, offload_uncounted(counter):
            logits = model(make_ids(ROWS, WIDTH)).logits
            kept.append(counter.live)
            del logits
            results.append(score(model))
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)
    assert kept[0] - kept[1] >= (layers - 1) * ROWS * WIDTH * hidden * 4
