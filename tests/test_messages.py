"""Messages between stages: prompts, columns, rollouts."""

import pickle

import numpy as np
import pytest

from streamrl.errors import ContractError
from streamrl.messages import (
    FinishReason,
    Prompt,
    Rollout,
    extract_completions,
    rollouts_to_columns,
)


@pytest.mark.parametrize("tokens", [[], [7], [2**31 - 1, -1, 0]])
def test_prompt_pickles_unchanged(tokens: list[int]):
    prompt = Prompt(
        "0:3:1",
        np.array(tokens, np.int32),
        messages=[{"role": "user", "content": "1 + 1?"}],
        data_source="sums",
        ground_truth={"answer": 2},
        extra_info={"row": np.arange(3)},
    )
    restored = pickle.loads(pickle.dumps(prompt))
    assert restored.token_ids.dtype == np.int32
    assert restored.token_ids.tolist() == tokens
    assert restored.extra_info["row"].tolist() == [0, 1, 2]
    fields = ("uid", "messages", "data_source", "ground_truth")
    assert [getattr(restored, name) for name in fields] == [
        getattr(prompt, name) for name in fields
    ]


@pytest.mark.parametrize(
    ("tokens", "described"),
    [
        (np.array([2**40]), r"int64\[1\]"),
        (np.array([0.5]), r"float64\[1\]"),
        (np.zeros((2, 3), np.int32), r"int32\[2, 3\]"),
        ([1, 2], "list"),
    ],
)
def test_prompt_rejects_wrong_token_dtype_or_shape(tokens: np.ndarray, described: str):
    with pytest.raises(
        ContractError, match=f"prompt 0:0:0: token_ids are {described}, wanted int32"
    ):
        Prompt("0:0:0", tokens)


def rollout_of(mask: list[bool], tokens: list[int]) -> Rollout:
    """Make a rollout; `mask` marks sampled tokens."""
    sampled = np.array(mask)
    versions = np.where(sampled, 0, -1).astype(np.int32)
    ended = FinishReason.STOP if sampled.any() else FinishReason.ABORT
    return Rollout(
        np.array(tokens, np.int32), sampled, np.zeros(len(mask), np.float32), versions, ended
    )


def test_completions_begin_with_the_first_sampled_token():
    prompt, tool = [False, False], [True, False, True]
    rollouts = [
        rollout_of([*prompt, True], [7, 8, 1]),
        # Tokens that a tool wrote between two turns belong to the completion.
        rollout_of([*prompt, *tool], [7, 8, 2, 50, 3]),
        # A rollout without sampled tokens.
        rollout_of(prompt, [7, 8]),
    ]
    completions = [
        completion.tolist() for completion in extract_completions(rollouts_to_columns(rollouts))
    ]
    assert completions == [[1], [2, 50, 3], []]
    assert completions == [rollout.completion_ids.tolist() for rollout in rollouts]
