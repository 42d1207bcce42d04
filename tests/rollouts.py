"""Rollouts and groups written by hand."""

from collections.abc import Sequence

import numpy as np

from streamrl.messages import (
    Array,
    Experience,
    FinishReason,
    GroupInfo,
    GroupLease,
    GroupOutcome,
    Rollout,
)


def make_rollout(
    prompt: Sequence[int] | Array,
    completion: Sequence[int],
    *,
    version: int = 0,
    versions: Sequence[int] | None = None,
    logprob: float = -1.0,
    finish_reason: FinishReason = FinishReason.STOP,
) -> Rollout:
    """Make a rollout of one turn, whose tokens have this logprob, and this version or these."""
    return Rollout.from_single_turn(
        np.array(prompt, np.int32),
        list(completion),
        logprobs=[logprob] * len(completion),
        versions=[version] * len(completion) if versions is None else versions,
        finish_reason=finish_reason,
    )


def make_ready_group(
    uid: str, admitted: int = 0, *, sampled: int | None = None, outcome: GroupOutcome | None = None
) -> Experience:
    """Make a group as the trainer leases it: sampled from one version, or ended untrained."""
    version = admitted if sampled is None else sampled
    info = None if outcome else GroupInfo((4,), 2, ((version, 2),))
    lease = GroupLease(1, uid, "train", 1, float("inf"))
    return Experience(lease, admitted, info=info, ready_version=admitted, outcome=outcome)
