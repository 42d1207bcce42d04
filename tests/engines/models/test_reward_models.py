"""Logits of reward models, by families of transformers."""

from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from streamrl.engines.models.forward import compute_row_logits, load_reward_model
from streamrl.engines.models.packed_rows import PACKED_ATTENTION

ROWS = [[5, 6, 7, 8, 9], [10, 11], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("family", "attention", "settings"),
    [
        ("qwen3", PACKED_ATTENTION, {"head_dim": 8, "num_key_value_heads": 2}),
        ("gpt2", PACKED_ATTENTION, {}),
        ("gemma2", "eager", {"head_dim": 8, "num_key_value_heads": 2}),
        ("bloom", "eager", {}),  # its attention cannot be replaced
        ("bert", PACKED_ATTENTION, {}),  # not a decoder: padded all the same
        ("deberta-v2", "eager", {}),
    ],
)
def test_logits_of_rows_together_equal_transformers_logit_of_each(
    tmp_path: Path, family: str, attention: str, settings: dict[str, int]
):
    torch.manual_seed(0)
    sizes = {**WIDTHS, "intermediate_size": 64, "vocab_size": 64, "num_labels": 1, **settings}
    config = AutoConfig.for_model(family, **sizes)
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in plain.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    plain.save_pretrained(tmp_path)
    model = load_reward_model(str(tmp_path), dtype=torch.float32)
    assert model.config._attn_implementation == attention
    rows = [torch.tensor(row) for row in ROWS]
    mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
    with torch.no_grad():
        logits = compute_row_logits(model, pad_sequence(rows, batch_first=True), mask)
        expected = [plain(row[None]).logits.item() for row in rows]
    assert logits.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1
