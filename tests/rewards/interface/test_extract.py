import numpy as np
import pytest

from streamrl.messages import FinishReason, Rollout, columns_to_rollouts, rollouts_to_columns
from streamrl.rewards.interface.extract import decode_completions
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


def test_a_completion_of_special_tokens_only_is_empty_text(tokenizer):
    assert decode(tokenizer, [make_rollout([2], [0])]) == [""]


def test_tool_tokens_between_turns_belong_to_the_completion(tokenizer):
    loss_mask = np.array([False, True, False, True])
    turns = Rollout(
        token_ids=np.array([2, 3, 4, 5], np.int32),
        loss_mask=loss_mask,
        generator_logprobs=np.zeros(4, np.float32),
        policy_version=np.where(loss_mask, 0, -1).astype(np.int32),
        finish_reason=FinishReason.STOP,
    )
    assert decode(tokenizer, [turns]) == ["world tool says"]


def test_rollouts_from_the_queue_decode_equally(tokenizer):
    rollouts = [make_rollout([2], [3, 2, 0]), make_rollout([2], [4])]
    queued = columns_to_rollouts(rollouts_to_columns(rollouts))
    assert decode(tokenizer, queued) == decode(tokenizer, rollouts)


def test_a_token_id_beyond_the_vocabulary_has_no_text(tokenizer):
    assert decode(tokenizer, [make_rollout([2], [3, 5000])]) == ["world"]
