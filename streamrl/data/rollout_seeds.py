"""Sampling seeds of rollouts: weights, prompt and seed determine a rollout."""

import hashlib


def make_rollout_seeds(run_seed: int, uid: str, count: int) -> list[int]:
    """Return `count` sampling seeds in [0, 2^31), one per rollout of the prompt `uid`."""
    digests = (
        hashlib.blake2b(f"{run_seed}/{uid}/{i}".encode(), digest_size=4) for i in range(count)
    )
    return [int.from_bytes(digest.digest(), "big") >> 1 for digest in digests]
