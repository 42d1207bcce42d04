"""The reward model of the arithmetic task: its training data and its build."""

import json
import random
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from examples.arithmetic import make as arithmetic_make
from examples.arithmetic.problems import make_rows
from examples.arithmetic.training import is_right
from examples.reward_model import make, training
from examples.reward_model.training import RewardModelRecipe, compute_logits, render_conversation
from examples.toy_models import building
from examples.toy_models.small_qwen2 import make_tokenizer, make_untrained, save_model
from tests.examples.test_tasks import PRETRAINING


def test_about_half_of_the_training_answers_are_right():
    rng, rows = random.Random(0), make_rows(seed=0)["train"]
    answers = [(row, training.sample_answer(row, rng)) for row in rows]
    right = sum(is_right(row, text) for row, text in answers) / len(answers)
    assert 0.4 < right < 0.6
    assert max(len(text) for _, text in answers) <= 12


def test_a_build_is_a_classifier_of_one_label_that_reads_conversations(tmp_path: Path):
    arithmetic, out = tmp_path / "arithmetic", tmp_path / "build"
    fill = partial(arithmetic_make.write_contents, recipe=PRETRAINING)
    building.Build("arithmetic", arithmetic, format=2, fill=fill).make(arithmetic, seed=0)
    recipe = RewardModelRecipe(num_steps=2, rows_per_step=4, num_measured=4)
    fill = partial(make.write_contents, recipe=recipe, arithmetic=arithmetic)
    building.Build("reward_model", out, format=1, fill=fill).make(out, seed=0)
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


def test_layers_below_the_trained_ones_stay_the_base_models(tmp_path: Path):
    tokenizer = make_tokenizer()
    base = make_untrained(tokenizer, seed=0)
    save_model(base, tokenizer, tmp_path)
    model, hints = training.build_untrained(tmp_path, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = RewardModelRecipe(num_steps=2, rows_per_step=4)
    rows = make_rows(seed=0)["train"]
    assert (
        len(list(training.train_reward_model(model, hints, tokenizer, rows, recipe, seed=0))) == 2
    )
    moved = {name for name, value in model.state_dict().items() if (value != before[name]).any()}
    assert "score.weight" in moved
    assert any(name.startswith("model.layers.2.") for name in moved)
    frozen = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")
    assert not [name for name in moved if name.startswith(frozen)]
