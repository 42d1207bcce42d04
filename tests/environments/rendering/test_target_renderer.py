"""Targets have the tokens that a policy would sample, and a mask that is true for these alone."""

import numpy as np
import pytest

from streamrl.data.chat_template import Conversation, decode_ids, render_text
from streamrl.data.rows import DataRow
from streamrl.environments.rendering.target_renderer import TargetRenderer
from streamrl.errors import ConfigError

FORMATS = ("qwen2_5", "qwen3", "llama3", "mistral", "gemma", "deepseek", "toy")
QUESTION = {"role": "user", "content": "1+2"}
NEXT = {"role": "user", "content": "3+4"}
FIRST, LAST = ({"role": "assistant", "content": text} for text in ("=3", "=7"))
FUNCTION = {"name": "look_up", "arguments": {"word": "sun"}}
CALL = {"id": "call00000", "type": "function", "function": FUNCTION}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "a star"}
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
LOOK_UP = {"name": "look_up", "description": "Look up a word.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": LOOK_UP}


def make_row(*completions, tools=(), **fields):
    return DataRow("rows:1", 0, (QUESTION,), "", None, {}, True, tools, completions=completions)


def render(load_renderer, name, row, gives="targets"):
    """Return the renderer's tokenizer, all token ids, and the mask, of each completion."""
    own = load_renderer(name)
    prompt, targets = TargetRenderer(own.tokenizer, own.template, gives).render_row(row)
    rollouts = []
    for ids, mask in targets:
        whole = [*prompt, *np.frombuffer(ids, np.int32).tolist()]
        rollouts.append((whole, [False] * len(prompt) + np.frombuffer(mask, bool).tolist()))
    return own, rollouts


def list_targets(tokenizer, ids, mask):
    """Return the texts of the runs of tokens that are targets."""
    texts: list[list[int]] = []
    last = False
    for token, is_target in zip(ids, mask, strict=True):
        if is_target:
            texts += [] if last else [[]]
            texts[-1].append(token)
        last = is_target
    return [decode_ids(tokenizer, text) for text in texts]


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_of_a_conversation_are_those_of_its_rendering(load_renderer, name):
    messages = (FIRST, NEXT, LAST)
    own, [(ids, mask)] = render(load_renderer, name, make_row(messages))
    conversation = Conversation("here", [QUESTION, *messages])
    whole = render_text(own.tokenizer, conversation, own.template, is_closed=True)
    text = decode_ids(own.tokenizer, ids)
    # What the template writes after the last turn's end is nobody's to sample; Qwen3's template
    # opens no thought in earlier turns.
    assert text.split() == whole.split() or (name == "qwen3" and text.split()[-1] in whole)
    end = decode_ids(own.tokenizer, ids[-1:])
    assert [t.strip() for t in list_targets(own.tokenizer, ids, mask)] == [f"=3{end}", f"=7{end}"]
    assert end.strip() in (whole.rstrip()[-len(end.strip()) :], own.tokenizer.eos_token)


def test_a_call_is_a_target_and_its_result_is_not(load_renderer):
    row = make_row((CALLING, RESULT, LAST), tools=(TOOL,))
    own, [(ids, mask)] = render(load_renderer, "qwen2_5", row)
    call, answer = list_targets(own.tokenizer, ids, mask)
    assert "look_up" in call and "sun" in call and "a star" not in call
    assert answer == "=7<|im_end|>"
    assert "a star" in decode_ids(own.tokenizer, ids)


def test_text_without_a_template_ends_with_the_end_of_sequence(load_renderer):
    own, [(ids, mask)] = render(load_renderer, "plain", make_row((FIRST,)))
    assert list_targets(own.tokenizer, ids, mask) == ["=3<eos>"]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "toy", "plain"])
def test_a_pair_has_the_tokens_that_a_reward_model_reads_and_counts_the_last(load_renderer, name):
    own, pair = render(load_renderer, name, make_row((FIRST,), (LAST,)), gives="pairs")
    for (ids, mask), said in zip(pair, (FIRST, LAST), strict=True):
        text = f"1+2{said['content']}"  # this tokenizer frames no text
        if name != "plain":
            conversation = Conversation("here", [QUESTION, said])
            text = render_text(own.tokenizer, conversation, own.template, is_closed=True)
        assert decode_ids(own.tokenizer, ids) == text
        assert (sum(mask), mask[-1]) == (1, True)


def test_a_thought_that_the_template_leaves_out_is_refused(load_renderer):
    turn = {**FIRST, "reasoning_content": "one and two"}
    with pytest.raises(ConfigError, match="leaves out reasoning_content of the assistant's"):
        render(load_renderer, "qwen2_5", make_row((turn,)))


def test_a_recorded_episode_has_its_text_with_the_policys_part_as_target(load_renderer):
    own = load_renderer("toy")
    texts = [("<bos>1+2\n", False), ("=3<eos>", True), ("4+5\n", False), ("=9<eos>", True)]
    pieces = [(text, is_target, i == 0) for i, (text, is_target) in enumerate(texts)]
    row = DataRow("rows:1", 0, (QUESTION,), "", None, {}, True, pieces=pieces)
    _, [(ids, mask)] = render(load_renderer, "toy", row)
    assert decode_ids(own.tokenizer, ids) == "".join(text for text, _ in texts)
    assert list_targets(own.tokenizer, ids, mask) == ["=3<eos>", "=9<eos>"]


def test_turns_that_follow_each_other_are_refused(load_renderer):
    with pytest.raises(ConfigError, match="rows:1: two messages of the assistant follow"):
        render(load_renderer, "toy", make_row((FIRST, LAST)))
