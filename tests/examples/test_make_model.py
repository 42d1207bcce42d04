"""A small model from one's own demonstrations."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.toy_models.make_model import NUM_HELD_OUT, make_model, read_conversations
from examples.toy_models.training import TrainingRecipe

UNTRAINED = TrainingRecipe(num_steps=0)


def write_demonstrations(path: Path, *others: list[dict[str, str]]) -> Path:
    """Write enough conversations, and others after them."""
    one = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    lines = [*([one] * (NUM_HELD_OUT + 1024)), *others]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return path


def test_conversations_become_a_model_that_transformers_loads(tmp_path: Path):
    out = tmp_path / "models" / "mine"
    path = write_demonstrations(tmp_path / "demos.jsonl")
    make_model(path, out, UNTRAINED, seed=0)
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "qwen2"
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    text = AutoTokenizer.from_pretrained(out).apply_chat_template(messages, tokenize=False)
    assert text == "<bos>ab\nba<eos>"
    with pytest.raises(SystemExit, match="exists"):
        make_model(path, out, UNTRAINED, seed=0)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": "Ab"}, {"role": "assistant", "content": "b"}], r"\['A'\]"),
        ([{"role": "user", "content": "a" * 300}, {"role": "assistant", "content": "b"}], "longer"),
        ([{"role": "user", "content": "ab"}], "no turn of the assistant"),
    ],
)
def test_a_conversation_that_the_model_cannot_learn_is_refused_by_its_line(
    tmp_path: Path, messages: list[dict[str, str]], problem: str
):
    path = write_demonstrations(tmp_path / "demos.jsonl", messages)
    with pytest.raises(SystemExit, match=rf"demos.jsonl:{NUM_HELD_OUT + 1025}: .*{problem}"):
        read_conversations(path)
