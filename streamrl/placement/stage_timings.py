"""How long things take in one placement: a few coefficients for each stage, in seconds.

A cost model makes them of shapes, devices and constants (`costs/`); a calibration fits them to a
run that was measured. Schedule and simulator know nothing else of models and devices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.messages import Array


@dataclass(frozen=True)
class GeneratorTiming:
    """Of one replica of the generators, which sample continuously in batches; all are alike.

    max_running: most rollouts it samples at the same time. kv_tokens: tokens whose keys and values
    it has room for; rollouts beyond that wait. A decode step gives each running rollout a token:

        max(weights_s + kv_token_s * resident tokens, compute_rollout_s * running)
            + step_s + rollout_s * running

    weights_s, kv_token_s: to read the weights once, and a token's keys and values.
    compute_rollout_s: to compute a token. step_s, rollout_s: what comes on top for each step, and
    for each rollout in it: communication, and the host's own work. prefill_token_s: a token of a
    prompt. group_s: of the host, to hand on a group that is done, in which nothing is sampled.
    begin_s: from a prompt in the queue to its place in the engine. recompute_token_s: a
    token of what is running when another version comes; 0 where keys and values are kept.
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
        """One token for each of so many rollouts that have so many tokens together."""
        memory = self.weights_s + self.kv_token_s * kv_tokens
        compute = self.compute_rollout_s * running
        return max(memory, compute) + self.step_s + self.rollout_s * running

    def decode_steps_s(self, running: Array, kv_tokens: Array) -> Array:
        """The same of many steps, each by itself."""
        memory = self.weights_s + self.kv_token_s * kv_tokens
        compute = self.compute_rollout_s * running
        return np.maximum(memory, compute) + self.step_s + self.rollout_s * running

    def decode_run_s(self, running: int, kv_tokens: float, steps: int) -> float:
        """So many steps of the same rollouts, which have so many tokens together at the beginning.

        The sum in closed form: tokens grow by one a rollout and step, so that steps are bound by
        computing first, if at all, and by reading then.
        """
        first = self.weights_s + self.kv_token_s * kv_tokens
        grows = self.kv_token_s * running
        computing = self.compute_rollout_s * running
        bound = 0
        if first < computing:
            bound = math.ceil(min(steps, (computing - first) / grows)) if grows else steps
        rest = steps - bound
        reading = rest * (first + grows * (bound + (rest - 1) / 2))
        return steps * (self.step_s + self.rollout_s * running) + bound * computing + reading

    def memory_bound_s(self, steps: Array, tokens: Array, kv_tokens: Array) -> Array:
        """Steps that sample so many tokens and read so many in all, where reading bounds each."""
        per_step = self.weights_s + self.step_s
        return steps * per_step + tokens * self.rollout_s + kv_tokens * self.kv_token_s


@dataclass(frozen=True)
class ScoreTiming:
    """Of one replica of a stage that scores groups, up to `batch` of them at once."""

    replicas: int
    batch: int
    batch_s: float
    rollout_s: float
    token_s: float

    def scale_duration(self, times: float) -> "ScoreTiming":
        """Where all takes so many times as long."""
        return replace(
            self,
            batch_s=self.batch_s * times,
            rollout_s=self.rollout_s * times,
            token_s=self.token_s * times,
        )

    def batch_duration_s(self, rollouts: float, tokens: float) -> float:
        """Seconds for a batch of so many rollouts with so many tokens, prompts included."""
        return self.batch_s + self.rollout_s * rollouts + self.token_s * tokens


@dataclass(frozen=True)
class TrainTiming:
    """Of a trained model: `shares` micro-batches at the same time, one for each replica.

    micro_batch_s, token_s: a forward and backward pass of one, and of each token in it. update_s:
    reduction of gradients and the optimizer. step_s: once for each step, as to plan it. round_s:
    before each round of micro-batches and each update, to ask for it: nothing is computed.
    """

    dp_size: int
    micro_batch_s: float
    token_s: float
    update_s: float
    step_s: float = 0.0
    round_s: float = 0.0

    def passes_s(self, micro_batches: float, tokens: float) -> float:
        """Forward and backward of so many micro-batches, with so many tokens, over all shares."""
        return (self.micro_batch_s * micro_batches + self.token_s * tokens) / self.dp_size


@dataclass(frozen=True)
class WeightsTiming:
    """Of a version on its way from a trained model to one who follows it.

    publish_s: until it is on its way, beside the next step's forward and backward passes but before
    its update. pull_s: until the follower has it. pause_s: of that, how long the follower computes
    nothing.
    """

    publish_s: float = 0.0
    pull_s: float = 0.0
    pause_s: float = 0.0


def process_speed(cores: float, busy: float, *, crowding: float) -> float:
    """Of each of so many processes that are busy, where one alone has a speed of 1.

    All have the same part of a core. crowding: each slows all others down by this part, also where
    there are cores enough, as they share caches and memory.
    """
    return min(1.0, cores / max(1.0, busy)) / (1.0 + crowding * max(0.0, busy - 1.0))


@dataclass(frozen=True)
class StageTimings:
    """All stages of a placement: `score` and `weights` by stage, `train` by role.

    Stages of one role share its replicas. hop_s: from one stage's commit to where the next begins.
    step_s: between a step's last update and the next one's beginning, for the books. cores: of a
    machine that all of them share, where they compute on its cores and slow one another down, less
    what others take of them; 0 where they do not. books_s: work of the queue and the books on these
    cores, for each group. crowding: as `process_speed` has it.
    """

    generator: GeneratorTiming
    score: Mapping[str, ScoreTiming]
    train: Mapping[str, TrainTiming]
    weights: Mapping[str, WeightsTiming] = field(default_factory=dict)
    hop_s: float = 0.0
    step_s: float = 0.0
    cores: float = 0
    bookkeeping_s: float = 0.0
    crowding: float = 0.0
