"""Duration of scoring and training for a whole step, and the cuts at which results pass on."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.buffer.micro_batch_schedule import MicroBatchPacker
from streamrl.planner.problem.stage_timings import ScoreTiming, TrainTiming
from streamrl.planner.problem.workload import Workload


def score_duration_s(
    timing: ScoreTiming, workload: Workload, per_group: int, *, singly: bool = False
) -> float:
    """Return seconds of scoring for a whole step, on the replica with the most groups.

    per_group: scored rollouts per group.
    singly: groups arrive one by one, and each group is a batch of its own.
    """
    groups = -(-workload.groups_per_step // timing.replicas)
    rollouts = groups * per_group
    batches = groups if singly else -(-groups // timing.batch)
    return (
        batches * timing.batch_s
        + timing.batch_duration_s(rollouts, rollouts * workload.rollout_tokens)
        - timing.batch_s
    )


@dataclass(frozen=True)
class TrainDuration:
    """Time to train a model in a step.

    passes_s: passes and updates that may overlap the arrival of groups.
    final_s: later epochs and the last update, which follow.
    micro_batches: per rank, in the first epoch.
    """

    passes_s: float
    final_s: float
    micro_batches: int

    @property
    def total_s(self) -> float:
        return self.passes_s + self.final_s


def train_duration(timing: TrainTiming, workload: Workload) -> TrainDuration:
    """Return the training time of a step.

    The first epoch may start before all groups have arrived; the last update ends the step. Ranks
    advance round by round, at the speed of the rank with the most tokens.
    """
    rounds, slowest = pack_mini_batch(workload, timing.dp_size)
    micro_batches, tokens = rounds * workload.mini_batches, slowest * workload.mini_batches
    epoch_s = micro_batches * (timing.micro_batch_s + timing.round_s) + tokens * timing.token_s
    update_s = timing.round_s + timing.update_s
    first_s = epoch_s + (workload.mini_batches - 1) * update_s
    rest_s = (workload.epochs - 1) * epoch_s
    updates = workload.num_updates - workload.mini_batches + 1
    return TrainDuration(first_s, rest_s + updates * update_s, micro_batches)


def pack_mini_batch(workload: Workload, dp_size: int) -> tuple[int, float]:
    """Return the number of rounds of a mini-batch, and the tokens of their largest micro-batches.

    The rounds are those of a run, one micro-batch per data-parallel rank; the tokens are summed
    over rounds. Completion lengths are quantiles of the workload's length distribution; the
    workload caches results.

    Example: rollouts of 10, 6, 6, 3, 2 and 1 tokens with a budget of 12 and 2 ranks give the rounds
    ([10], [3, 2, 1]) and ([6], [6]); the result is (2, 10 + 6).
    """
    if dp_size not in workload.packing_cache:
        rollouts = math.ceil(workload.num_rollouts / workload.mini_batches)
        ranks = (np.arange(rollouts) + 0.5) / rollouts
        completions = workload.lengths.quantiles(ranks)
        lengths = np.rint(workload.prompt_tokens + completions).astype(int).tolist()
        budget = max(int(workload.micro_batch_tokens), *lengths)
        packer = MicroBatchPacker(dp_size=dp_size, micro_batch_tokens=budget)
        packer.add_group("", lengths)
        rounds = packer.take_rounds(final=True)
        tokens = sum(max(sum(lengths[i] for _, i in rows) for rows in batch) for batch in rounds)
        workload.packing_cache[dp_size] = len(rounds), tokens
    return workload.packing_cache[dp_size]


STEP_CUTS = {1: (1.0,), 2: (0.5, 1.0), 4: (0.125, 0.375, 0.625, 0.875, 1.0)}
"""Cuts of a step's work (fractions of the work), by the fewest pieces that they need.

The first and the last cut are small: they determine how fast the pipeline fills and drains.
"""


def choose_cuts(pieces: int) -> tuple[float, ...]:
    """Return the finest cuts of a step's work, as fractions, that the number of pieces allows.

    pieces: units that the work can be divided into, such as groups or micro-batches.
    """
    return STEP_CUTS[max(min_pieces for min_pieces in STEP_CUTS if min_pieces <= max(1, pieces))]


def split_seconds(total_s: float, cuts: Sequence[float]) -> Sequence[float]:
    """Divide `total_s` at `cuts`, ascending fractions; return the seconds between them."""
    return [total_s * (late - early) for early, late in itertools.pairwise((0.0, *cuts))]
