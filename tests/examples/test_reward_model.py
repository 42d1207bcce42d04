"""The reward model of the arithmetic task: its training data and its build."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from examples.arithmetic import make as arithmetic_make
from examples.reward_model import make
from examples.reward_model.training import compute_logits, render_conversation
from examples.toy_models import building
from examples.toy_models.training import TrainingRecipe
from tests.examples.test_tasks import UNTRAINED


@pytest.mark.parametrize("num_steps", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_build_is_a_classifier_of_one_label_that_reads_conversations(
    tmp_path: Path, num_steps: int
):
    arithmetic, out = tmp_path / "arithmetic", tmp_path / "build"
    fill = partial(arithmetic_make.write_contents, recipe=UNTRAINED)
    build = replace(arithmetic_make.BUILD, fill=fill)
    build.make(arithmetic, seed=0)
    recipe = TrainingRecipe(num_steps=num_steps, rows_per_step=4, num_measured=4)
    fill = partial(make.write_contents, recipe=recipe, arithmetic=arithmetic)
    building.Build("reward_model", out, format=2, fill=fill).make(out, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arithmetic", "build"]
    measured = json.loads((out / "made.json").read_text())["measured"]
    assert measured.keys() == {"train_ranking", "eval_ranking"}
    model = AutoModelForSequenceClassification.from_pretrained(out / "model").eval()
    assert (model.config.num_labels, model.config.model_type) == (1, "qwen2")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "model")
    row = {"prompt": [{"role": "user", "content": "7+5-3"}]}
    text = render_conversation(row, "12-3=9", tokenizer)
    assert text == "<bos>7+5-3=12-3=9<eos>"
    with torch.inference_mode():
        logits = compute_logits(model, tokenizer, [text])
        batched = compute_logits(model, tokenizer, [text, render_conversation(row, "9", tokenizer)])
    assert torch.isfinite(logits).all()
    assert torch.allclose(logits, batched[:1], atol=1e-5), "rows of a batch are independent"
