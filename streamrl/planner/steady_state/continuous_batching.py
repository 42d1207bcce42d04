"""Continuous batching of a replica's rollouts of a step, counted in decode steps.

Every running rollout gets a token in every decode step, so lengths and capacity alone determine
when a rollout starts and ends. `ReplicaSchedule.compute_group_ends_s` converts decode steps to
seconds.
"""

from dataclasses import dataclass

import numpy as np

from streamrl.messages import Array
from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.planner.simulator.simulated_engine import SimulatedEngine

MIN_EDGES = 33
MAX_CHANGES = 48
"""Sampling points of a schedule: evenly spaced, and at changes of the batch."""


@dataclass(frozen=True)
class ReplicaSchedule:
    """Rollouts of a step on a replica, in decode steps from the start.

    `edges` bound m segments of decode steps.
    group_ends [groups]: when each group is complete.
    edges [m + 1]: segment borders, from 0 on.
    running_rollouts [m]: mean running rollouts.
    resident_tokens [m]: mean tokens of running rollouts, prompts included.
    prefill_tokens [m]: tokens prefilled at the start of rollouts.
    num_groups_done [m]: completed groups.
    slots: approximate concurrent rollouts when more are waiting.
    longest_tokens: tokens of the longest rollout.
    """

    group_ends: Array
    edges: Array
    running_rollouts: Array
    resident_tokens: Array
    prefill_tokens: Array
    num_groups_done: Array
    slots: float
    longest_tokens: float

    def compute_group_ends_s(self, timing: GeneratorTiming) -> Array:
        """Return when each group is complete, s after the step starts, float64 [groups]."""
        return np.interp(self.group_ends, self.edges, self._compute_elapsed_s(timing))

    def _compute_elapsed_s(self, timing: GeneratorTiming) -> Array:
        """Return the time of each segment border, s after the step starts, float64 [m + 1]."""
        segment_s = np.diff(self.edges) * timing.estimate_decode_steps_s(
            self.running_rollouts, self.resident_tokens
        )
        segment_s += self.prefill_tokens * timing.prefill_token_s
        # A group is complete before the host passes it on.
        segment_s[1:] += self.num_groups_done[:-1] * timing.group_s
        return timing.begin_s + np.concatenate(([0.0], np.cumsum(segment_s)))

    def compute_overhead_s(self, timing: GeneratorTiming) -> Array:
        """Return seconds per segment of prefill and of passing on finished groups, float64 [m]."""
        return self.prefill_tokens * timing.prefill_token_s + self.num_groups_done * timing.group_s


def schedule_replica(
    lengths: Array,
    *,
    prompt_tokens: float,
    token_capacity: float,
    num_slots: int,
    scale: float,
    slots: float,
) -> ReplicaSchedule:
    """Simulate the groups of a step on a replica; return their schedule.

    lengths: tokens of each rollout, float64 [groups, rollouts].
    token_capacity: tokens that fit into the KV cache, divided by `scale`.
    num_slots: most simulated rollouts that run together.
    scale: number of real rollouts that each simulated rollout stands for.
    slots: concurrent real rollouts, for the result.
    """
    rollouts: list[tuple[int, int, float]] = []
    group_ends = _play_groups(lengths, prompt_tokens, token_capacity, num_slots, rollouts)
    starts, ends, contexts = np.array(rollouts, np.float64).T
    changes = np.unique(np.concatenate(([0.0], starts, ends)))
    # Keep some of the changes, and even points in between, where other work may overlap.
    kept_changes = np.append(changes[:: -(-len(changes) // MAX_CHANGES)], changes[-1])
    edges = np.union1d(kept_changes, np.linspace(0.0, changes[-1], MIN_EDGES))
    # Of each rollout in each segment [segments, rollouts]: when it begins and ends to run.
    begins = np.maximum(edges[:-1, None], starts)
    widths = np.maximum(np.minimum(edges[1:, None], ends) - begins, 0.0)
    # Resident tokens grow by one per decode step.
    tokens = widths * (contexts + begins - starts + widths / 2)
    # Prefill that starts at an edge belongs to the segment after it.
    segments = np.searchsorted(edges, starts, side="right") - 1
    done = np.searchsorted(np.sort(group_ends), edges, side="right")
    per_step = scale / np.diff(edges)
    return ReplicaSchedule(
        group_ends,
        edges,
        widths.sum(axis=1) * per_step,
        tokens.sum(axis=1) * per_step,
        np.bincount(segments, contexts, len(edges) - 1) * scale,
        np.diff(done) * scale,
        slots,
        float(lengths.max()),
    )


def _play_groups(
    lengths: Array,
    prompt_tokens: float,
    token_capacity: float,
    num_slots: int,
    log: list[tuple[int, int, float]],
) -> Array:
    """Return the decode step in which each group ends, in the simulator's engine, float64 [groups].

    log: as in `SimulatedEngine`.
    """
    longest = prompt_tokens + float(lengths.max()) + 1
    timing = GeneratorTiming(
        replicas=1,
        max_running=num_slots,
        kv_tokens=max(token_capacity, longest),
        weights_s=0.0,
        kv_token_s=0.0,
        compute_rollout_s=0.0,
        step_s=1.0,
        rollout_s=0.0,
        prefill_token_s=0.0,
    )
    engine: SimulatedEngine[int] = SimulatedEngine(timing, log=log)
    group_ends = np.zeros(len(lengths))
    for group, rollouts in enumerate(lengths.astype(int).tolist()):
        engine.add_group(group, prompt_tokens, rollouts, 0.0)
    while not engine.is_empty:
        now = engine.next_event_s
        for done in engine.advance_to(now):
            group_ends[done.key] = now
    return group_ends
