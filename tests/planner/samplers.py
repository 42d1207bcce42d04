"""Timings that tests can check by hand."""

from streamrl.planner.problem.stage_timings import GeneratorTiming


def sampler(
    decode_s: float,
    *,
    rollout_s: float = 0.0,
    replicas: int = 1,
    max_running: int = 1000,
    kv_tokens: float = 1e9,
) -> GeneratorTiming:
    """Return the timing of generators without prefill cost and with this cost per decode step."""
    return GeneratorTiming(
        replicas, max_running, kv_tokens, decode_s, 0.0, 0.0, 0.0, rollout_s, prefill_token_s=0.0
    )
