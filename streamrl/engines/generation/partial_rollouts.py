"""Partial rollouts: create, resume and extend rollouts sampled in part (arXiv 2501.12599).

A rollout may be sampled piecewise, by several versions and in several engines. Existing tokens keep
their logprobs and versions; new tokens are appended. An unfinished rollout has FinishReason.ABORT;
a rollout without sampled tokens consists of the prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from streamrl.engines.vllm.engine import SampledSequence
from streamrl.messages import Array, FinishReason, Rollout


def make_empty_rollout(prompt_ids: Array) -> Rollout:
    """Return a rollout of a prompt, int32 [P], without sampled tokens."""
    num_tokens = len(prompt_ids)
    return Rollout(
        token_ids=prompt_ids,
        loss_mask=np.zeros(num_tokens, np.bool_),
        generator_logprobs=np.zeros(num_tokens, np.float32),
        policy_version=np.full(num_tokens, -1, np.int32),
        finish_reason=FinishReason.ABORT,
    )


def resolve_partials(
    prompt_ids: Array, partial_rollouts: Sequence[Rollout], *, num_rollouts: int
) -> Sequence[Rollout]:
    """Return `partial_rollouts`, or `num_rollouts` empty rollouts of the prompt if there are none.

    Raises ValueError if the number of partial rollouts is not `num_rollouts`, or if a rollout does
    not begin with the prompt, int32 [P].
    """
    if not partial_rollouts:
        return [make_empty_rollout(prompt_ids)] * num_rollouts
    if len(partial_rollouts) != num_rollouts:
        raise ValueError(f"{len(partial_rollouts)} partial rollouts for {num_rollouts} seeds")
    if any(
        not np.array_equal(r.token_ids[: len(prompt_ids)], prompt_ids) for r in partial_rollouts
    ):
        raise ValueError("a partial rollout does not start with the prompt")
    return partial_rollouts


def count_remaining_tokens(
    rollout: Rollout, *, num_prompt: int, max_new_tokens: int, max_length: int
) -> int:
    """Return the number of tokens that may still be sampled; 0 if the rollout is finished.

    `max_new_tokens` bounds the completion, which follows the `num_prompt` tokens of the prompt.
    `max_length` bounds prompt and completion together.
    """
    if rollout.finish_reason is not FinishReason.ABORT:
        return 0
    length = len(rollout.token_ids)
    return max(0, min(max_new_tokens - (length - num_prompt), max_length - length))


def finish_by_length(rollout: Rollout) -> Rollout:
    """Set FinishReason.LENGTH on an unfinished rollout, which has reached the length limit.

    Finished rollouts are returned unchanged.
    """
    if rollout.finish_reason is not FinishReason.ABORT:
        return rollout
    return replace(rollout, finish_reason=FinishReason.LENGTH)


def extend_rollout(rollout: Rollout, sampled: SampledSequence) -> Rollout:
    """Return the rollout with the newly sampled tokens of its sequence appended."""
    return Rollout(
        token_ids=_append_values(rollout.token_ids, sampled.token_ids),
        loss_mask=_append_values(rollout.loss_mask, np.ones(len(sampled.token_ids), np.bool_)),
        generator_logprobs=_append_values(rollout.generator_logprobs, sampled.logprobs),
        policy_version=_append_values(rollout.policy_version, sampled.versions),
        finish_reason=sampled.finish_reason,
    )


def _append_values(array: Array, values: Sequence[float] | Array) -> Array:
    return np.concatenate([array, np.asarray(values, array.dtype)])
