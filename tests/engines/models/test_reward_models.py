"""Logits of reward models, by families of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from streamrl.engines.models.forward import compute_row_logits, load_reward_model
from streamrl.engines.models.packed_rows import PACKED_ATTENTION
from tests.engines.reward_ranks import compute_on_rank
from tests.rank_checks import start_ranks

ROWS = [[5, 6, 7, 8, 9], [10, 11], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def save_classifier(path: Path, family: str, **settings: int) -> Any:
    """Save a classifier with random weights, large enough that its logits differ; return it."""
    torch.manual_seed(0)
    sizes = {**WIDTHS, "intermediate_size": 64, "vocab_size": 64, "num_labels": 1, **settings}
    config = AutoConfig.for_model(family, **sizes)
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in plain.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    plain.save_pretrained(path)
    return plain


@pytest.mark.parametrize(
    ("family", "attention", "settings"),
    [
        ("qwen3", PACKED_ATTENTION, {"head_dim": 8, "num_key_value_heads": 2}),
        ("gpt2", "sdpa", {}),
        ("gemma2", "eager", {"head_dim": 8, "num_key_value_heads": 2}),
        ("bloom", "eager", {}),
        ("bert", "sdpa", {}),
        ("deberta-v2", "eager", {}),
    ],
)
def test_logits_of_rows_together_equal_transformers_logit_of_each(
    tmp_path: Path, family: str, attention: str, settings: dict[str, int]
):
    plain = save_classifier(tmp_path, family, **settings)
    model = load_reward_model(str(tmp_path), dtype=torch.float32)
    assert model.config._attn_implementation == attention
    rows = [torch.tensor(row) for row in ROWS]
    mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
    with torch.no_grad():
        logits = compute_row_logits(model, pad_sequence(rows, batch_first=True), mask)
        expected = [plain(row[None]).logits.item() for row in rows]
    assert logits.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "is_shared"),
    [
        ({"world_size": 2}, False),  # FSDP2: each rank its own rows, and once none
        ({"world_size": 2, "tensor_parallel": 2}, True),
        ({"world_size": 2, "sequence_parallel": 2}, True),
    ],
)
def test_two_ranks_compute_the_logits_of_one(
    tmp_path: Path, layout: dict[str, int], is_shared: bool
):
    save_classifier(tmp_path, "qwen3", head_dim=8, num_key_value_heads=2)
    calls = [ROWS, ROWS[:1], ROWS[1:]]
    (expected,) = start_ranks(compute_on_rank, 1, str(tmp_path), {}, calls)
    for rank, found in enumerate(start_ranks(compute_on_rank, 2, str(tmp_path), layout, calls)):
        own = expected if is_shared else [logits[rank::2] for logits in expected]
        assert found == [pytest.approx(logits, abs=1e-6, rel=0) for logits in own]
