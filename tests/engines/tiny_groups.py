"""Groups of short rollouts, made from a seed in the queue's format."""

import numpy as np

from streamrl.messages import Columns, FinishReason, Rollout, rollouts_to_columns
from tests.engines.tiny_qwen import VOCABULARY


def make_rollout(rng: np.random.Generator, completion: int) -> Rollout:
    """Make a prompt of 3 to 5 tokens and a completion; long ones contain an environment's token."""
    prompt = rng.integers(0, VOCABULARY, rng.integers(3, 6)).astype(np.int32)
    rollout = Rollout.from_single_turn(
        prompt,
        rng.integers(0, VOCABULARY, completion).tolist(),
        logprobs=(-rng.uniform(2, 6, completion)).tolist(),
        versions=[0] * completion,
        finish_reason=FinishReason.STOP,
    )
    if completion > 5:
        env_index = len(prompt) + 2
        rollout.loss_mask[env_index] = False
        rollout.generator_logprobs[env_index] = 0
        rollout.policy_version[env_index] = -1
    return rollout


def make_groups(*, num_groups: int = 3, group_size: int = 4, seed: int = 0) -> dict[str, Columns]:
    """Make groups with scores and ref_logprobs, by uid."""
    rng = np.random.default_rng(seed)
    groups: dict[str, Columns] = {}
    for row in range(num_groups):
        rollouts = [make_rollout(rng, int(rng.integers(2, 11))) for _ in range(group_size)]
        columns = rollouts_to_columns(rollouts)
        columns["scores"] = rng.random(group_size).astype(np.float32)
        noise = rng.normal(0, 0.3, len(columns["token_ids"])).astype(np.float32)
        columns["ref_logprobs"] = np.where(
            columns["loss_mask"], columns["generator_logprobs"] + noise, 0
        ).astype(np.float32)
        groups[f"0:{row}:0"] = columns
    return groups
