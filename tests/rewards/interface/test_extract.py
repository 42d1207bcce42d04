import pytest

from streamrl.rewards.interface.completion import decode_completions
from tests.rollouts import make_rollout

WORDS = ["<eos>", "<pad>", "hello", "world", "tool", "says", "."]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def decode(tokenizer, rollouts):
    return decode_completions(tokenizer, [rollout.completion_ids for rollout in rollouts])


def test_decoding_drops_prompt_and_special_tokens(tokenizer):
    rollouts = [make_rollout([2], [3, 2, 0]), make_rollout([2, 2, 2], [4, 0, 5])]
    assert decode(tokenizer, rollouts) == ["world hello", "tool says"]


def test_spaces_are_kept_as_sampled(tokenizer):
    assert decode(tokenizer, [make_rollout([2], [3, 6])]) == ["world ."]
