"""Rollouts written by hand."""

from collections.abc import Sequence

import numpy as np

from streamrl.messages import Array, FinishReason, Rollout


def make_rollout(
    prompt: Sequence[int] | Array,
    completion: Sequence[int],
    *,
    version: int = 0,
    logprob: float = -1.0,
    finish_reason: FinishReason = FinishReason.STOP,
) -> Rollout:
    """Make a rollout of one turn, all of whose tokens have this version and logprob."""
    return Rollout.from_single_turn(
        np.array(prompt, np.int32),
        list(completion),
        logprobs=[logprob] * len(completion),
        versions=[version] * len(completion),
        finish_reason=finish_reason,
    )
