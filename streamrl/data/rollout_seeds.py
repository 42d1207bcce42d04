"""Sampling seeds: a rollout is a function of the weights, the prompt and its seed."""

import hashlib


def make_rollout_seeds(run_seed: int, uid: str, count: int) -> list[int]:
    """Return one sampling seed in [0, 2^31) per rollout of the prompt `uid`."""
    digests = (
        hashlib.blake2b(f"{run_seed}/{uid}/{i}".encode(), digest_size=4) for i in range(count)
    )
    return [int.from_bytes(digest.digest(), "big") >> 1 for digest in digests]
