"""Rollouts that are begun and not finished: what they are, and how they go on.

A rollout may be sampled in several goes, by several versions and in several engines. What is there
keeps its tokens, logprobs and versions; what comes is appended. An unfinished rollout ends with
FinishReason.ABORT, and one of which nothing is sampled yet is its prompt.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from streamrl.messages import Array, FinishReason, Rollout


def make_empty_rollout(prompt_ids: Array) -> Rollout:
    """The rollout of a prompt, int32 [P], of which nothing is sampled yet."""
    num_tokens = len(prompt_ids)
    return Rollout(
        token_ids=prompt_ids,
        loss_mask=np.zeros(num_tokens, np.bool_),
        generator_logprobs=np.zeros(num_tokens, np.float32),
        policy_version=np.full(num_tokens, -1, np.int32),
        finish_reason=FinishReason.ABORT,
    )


def resolve_partials(
    prompt_ids: Array, begun: Sequence[Rollout], *, num_rollouts: int
) -> Sequence[Rollout]:
    """What there is of each of the rollouts of a prompt; `begun` may be empty.

    Raises ValueError if it is not one per rollout, or begins with another prompt.
    """
    if not begun:
        return [make_empty_rollout(prompt_ids)] * num_rollouts
    if len(begun) != num_rollouts:
        raise ValueError(f"{len(begun)} begun rollouts for {num_rollouts} seeds")
    if any(not np.array_equal(r.token_ids[: len(prompt_ids)], prompt_ids) for r in begun):
        raise ValueError("a begun rollout does not begin with the prompt")
    return begun


def count_remaining_tokens(
    rollout: Rollout, *, num_prompt: int, max_new_tokens: int, max_length: int
) -> int:
    """Tokens a rollout may still be given; 0 if it is finished.

    `max_new_tokens` bounds what follows the prompt of `num_prompt` tokens, `max_length` all of it.
    """
    if rollout.finish_reason is not FinishReason.ABORT:
        return 0
    length = len(rollout.token_ids)
    return max(0, min(max_new_tokens - (length - num_prompt), max_length - length))


def finish_by_length(rollout: Rollout) -> Rollout:
    """The rollout, which can be given no more tokens: if it is not finished, its length ends it."""
    if rollout.finish_reason is not FinishReason.ABORT:
        return rollout
    return replace(rollout, finish_reason=FinishReason.LENGTH)


def derive_continuation_seed(seed: int, num_begun: int) -> int:
    """The seed that samples on after `num_begun` tokens; 0 to 2^63 - 1.

    With the rollout's own seed the draws would be those of its first tokens once more. It follows
    from that seed and the number of tokens, so the same break gives the same tokens again.
    """
    if num_begun == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{num_begun}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 1


def extend_rollout(
    rollout: Rollout,
    token_ids: Sequence[int],
    *,
    logprobs: Sequence[float],
    versions: Sequence[int],
    finish_reason: FinishReason,
) -> Rollout:
    """A rollout and the tokens that were sampled after it."""
    return Rollout(
        token_ids=_append_values(rollout.token_ids, token_ids),
        loss_mask=_append_values(rollout.loss_mask, np.ones(len(token_ids), np.bool_)),
        generator_logprobs=_append_values(rollout.generator_logprobs, logprobs),
        policy_version=_append_values(rollout.policy_version, versions),
        finish_reason=finish_reason,
    )


def _append_values(array: Array, values: Sequence[float] | Array) -> Array:
    return np.concatenate([array, np.asarray(values, array.dtype)])
