"""A whole step's work of one call that has its devices for itself, in seconds."""

import math

from streamrl.placement.timings import GeneratorTiming, ScoreTiming, TrainTiming
from streamrl.placement.workload import Workload


def generate_s(timing: GeneratorTiming, workload: Workload) -> float:
    """To sample a step's rollouts, all of which are there at the beginning.

    Rollouts that have no room wait until others are done, so the steps are those of so many waves,
    and the last one lasts as long as its longest.
    """
    mean, rollouts = workload.lengths.mean, workload.rollouts / timing.replicas
    middle = workload.prompt_tokens + mean / 2
    slots = max(1.0, min(rollouts, timing.max_running, timing.kv_tokens / middle))
    longest = max(mean, workload.lengths.expected_longest(workload.rollouts))
    steps = (rollouts / slots - 1) * mean + longest
    running = rollouts * mean / steps
    prefill = timing.prefill_token_s * rollouts * workload.prompt_tokens
    return timing.begin_s + prefill + steps * timing.decode_step_s(running, running * middle)


def score_s(timing: ScoreTiming, workload: Workload) -> float:
    """To score a step's groups."""
    batches = math.ceil(workload.groups_per_step / timing.replicas / timing.batch)
    rollouts = workload.rollouts / timing.replicas
    return batches * timing.batch_s + timing.batch_of(rollouts, rollouts * workload.rollout_tokens)


def train_s(timing: TrainTiming, workload: Workload) -> float:
    """To train a step, with all its epochs and updates."""
    tokens = workload.tokens / workload.mini_batches
    each = math.ceil(tokens / timing.shares / workload.micro_batch_tokens)
    passes = timing.passes_s(each * timing.shares, tokens)
    return workload.updates * (passes + timing.update_s) + timing.step_s
