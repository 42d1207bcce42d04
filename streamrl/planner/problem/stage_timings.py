"""Timing coefficients of each stage of a placement, in seconds.

The cost model (`costs/`) computes them from shapes, devices and constants; `calibration` fits them
to a measured run. Steady-state estimate and simulator know models and devices only through these
coefficients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from streamrl.messages import Array


@dataclass(frozen=True)
class GeneratorTiming:
    """Timing of a generator replica with continuous batching; all replicas are equal.

    A decode step gives each running rollout one token and takes

        max(weights_s + kv_token_s * resident tokens, compute_rollout_s * running)
            + step_s + rollout_s * running

    max_running: maximum concurrent rollouts (vLLM max_num_seqs).
    kv_tokens: tokens that fit into the KV cache; further rollouts wait.
    weights_s, kv_token_s: time to read the weights once, and a token's keys and values.
    compute_rollout_s: time to compute a token.
    step_s, rollout_s: overhead per step, and per rollout in the step: communication and host work.
    prefill_token_s: time per prompt token.
    group_s: host time to pass on a finished group; sampling stops meanwhile.
    begin_s: latency from a prompt in the queue to its slot in the engine.
    recompute_token_s: time per running token when weights change; 0 if the KV cache is kept.
    """

    replicas: int
    max_running: int
    kv_tokens: float
    weights_s: float
    kv_token_s: float
    compute_rollout_s: float
    step_s: float
    rollout_s: float
    prefill_token_s: float
    begin_s: float = 0.0
    recompute_token_s: float = 0.0
    group_s: float = 0.0

    def decode_step_s(self, running: float, kv_tokens: float) -> float:
        """Return seconds of a decode step; `kv_tokens` counts the tokens of all `running`
        rollouts."""
        memory = self.weights_s + self.kv_token_s * kv_tokens
        compute = self.compute_rollout_s * running
        return max(memory, compute) + self.step_s + self.rollout_s * running

    def estimate_decode_steps_s(self, running: Array, kv_tokens: Array) -> Array:
        """Return seconds of each of several decode steps, float64 with the shape of the arguments.

        running: rollouts in each decode step.
        kv_tokens: tokens of these rollouts in the KV cache.
        """
        memory = self.weights_s + self.kv_token_s * kv_tokens
        compute = self.compute_rollout_s * running
        return np.maximum(memory, compute) + self.step_s + self.rollout_s * running

    def decode_run_s(self, running: int, kv_tokens: float, steps: int) -> float:
        """Return seconds of `steps` consecutive decode steps of the same rollouts, in closed form.

        `kv_tokens` counts the tokens in the KV cache at the start. Each rollout gains a token per
        step, so memory reads take longer from step to step: the first steps may be compute-bound,
        and all steps afterwards are memory-bound.
        """
        first = self.weights_s + self.kv_token_s * kv_tokens
        growth = self.kv_token_s * running
        computing = self.compute_rollout_s * running
        num_compute_bound = 0
        if first < computing:
            num_compute_bound = (
                math.ceil(min(steps, (computing - first) / growth)) if growth else steps
            )
        num_memory_bound = steps - num_compute_bound
        reading = num_memory_bound * (
            first + growth * (num_compute_bound + (num_memory_bound - 1) / 2)
        )
        return (
            steps * (self.step_s + self.rollout_s * running)
            + num_compute_bound * computing
            + reading
        )

    def compute_memory_bound_s(self, steps: Array, tokens: Array, kv_tokens: Array) -> Array:
        """Return seconds of memory-bound decode steps from totals over these steps.

        steps: number of decode steps.
        tokens: sampled tokens.
        kv_tokens: tokens read from the KV cache.
        """
        per_step = self.weights_s + self.step_s
        return steps * per_step + tokens * self.rollout_s + kv_tokens * self.kv_token_s


@dataclass(frozen=True)
class ScoreTiming:
    """Timing of a scoring replica, which scores at most `batch` groups at a time.

    batch_s, rollout_s, token_s: seconds per batch, and added per rollout and per token.
    """

    replicas: int
    batch: int
    batch_s: float
    rollout_s: float
    token_s: float

    def batch_duration_s(self, rollouts: float, tokens: float) -> float:
        return self.batch_s + self.rollout_s * rollouts + self.token_s * tokens


@dataclass(frozen=True)
class TrainTiming:
    """Timing of a trained model, of which `dp_size` ranks each process a micro-batch at a time.

    micro_batch_s, token_s: forward and backward pass, per micro-batch and per token.
    update_s: gradient reduction and optimizer step.
    step_s: fixed time per training step, such as planning the step.
    round_s: idle time before each round of micro-batches and each update, until the request
      arrives.
    """

    dp_size: int
    micro_batch_s: float
    token_s: float
    update_s: float
    step_s: float = 0.0
    round_s: float = 0.0


@dataclass(frozen=True)
class WeightsTiming:
    """Timing of a new version of the weights on its way from a trained model to a follower.

    publish_s: publication; overlaps the next step's passes and ends before its update.
    pull_s: from publication until the follower has the version.
    pause_s: part of pull_s in which the follower computes nothing.
    """

    publish_s: float = 0.0
    pull_s: float = 0.0
    pause_s: float = 0.0


@dataclass(frozen=True)
class StageTimings:
    """Timings of all stages of a placement: `score` and `weights` by stage, `train` by role.

    Stages of one role share its replicas.
    hop_s: latency from a stage's commit to the start of the next stage on the group.
    step_s: coordinator time between the last update of a step and the start of the next step.
    """

    generator: GeneratorTiming
    score: Mapping[str, ScoreTiming]
    train: Mapping[str, TrainTiming]
    weights: Mapping[str, WeightsTiming] = field(default_factory=dict)
    hop_s: float = 0.0
    step_s: float = 0.0
