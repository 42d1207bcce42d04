"""Environment time of episodes, as part of a generator's timing.

An episode takes no slot of the engine while its environment works. It advances by a sampled token
in s(b) + e seconds: a decode step with b running rollouts, and its environment's time per sampled
token. By Little's law, b = M s(b) / (s(b) + e) of M open episodes run. So a generator with M open
episodes is one with M running rollouts whose decode steps take e longer, and in which each rollout
costs only the share b / M of the reads and computations of a running one.
"""

from dataclasses import dataclass, replace

from streamrl.placement.stage_timings import GeneratorTiming
from streamrl.placement.workload import Workload

BISECTIONS = 40


@dataclass(frozen=True)
class OpenEpisodes:
    """Episodes of a workload on a generator replica.

    timing: with the time to prefill observations, spread over the sampled tokens.
    slots: rollouts that the replica samples at a time.
    context_tokens: mean tokens of a running rollout.
    token_environment_s: seconds of the environment per sampled token.
    """

    timing: GeneratorTiming
    slots: float
    context_tokens: float
    token_environment_s: float

    @classmethod
    def from_workload(
        cls, timing: GeneratorTiming, workload: Workload, *, mean_length: float, mean_age: float
    ) -> "OpenEpisodes":
        """Describe the episodes of a workload.

        mean_length: mean sampled tokens. mean_age: tokens sampled so far, mean over the time of a
            rollout.
        """
        turns = workload.turns
        # The other half of the observations is part of `context_tokens`, prefilled at the start.
        observed_per_token = turns.mean_observed_tokens / 2 / mean_length
        rollout_s = timing.rollout_s + observed_per_token * timing.prefill_token_s
        context = workload.context_tokens + mean_age
        slots = max(1.0, min(float(timing.max_running), timing.kv_tokens / context))
        return cls(
            replace(timing, rollout_s=rollout_s),
            slots,
            context,
            turns.mean_environment_s / mean_length,
        )

    def count_open(self, running: float) -> float:
        """Return how many open episodes keep so many rollouts running."""
        if not self.token_environment_s:
            return running
        step_s = self.timing.decode_step_s(running, running * self.context_tokens)
        return running * (1 + self.token_environment_s / step_s)

    @property
    def needed(self) -> float:
        """Open episodes that fill all slots."""
        return self.count_open(self.slots)

    def find_running(self, open_episodes: float) -> float:
        """Return how many rollouts run, at most `slots`, while so many episodes are open."""
        if open_episodes >= self.needed:
            return self.slots
        low, high = 0.0, min(self.slots, open_episodes)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self.count_open(middle) < open_episodes:
                low = middle
            else:
                high = middle
        return high

    def make_timing(self, open_episodes: float, max_open: float) -> GeneratorTiming:
        """Return the timing in which an open episode counts as a running rollout.

        open_episodes: episodes that the replica has. max_open: most that it keeps open.
        """
        running = self.find_running(min(open_episodes, max_open))
        timing, share = self.timing, running / self.count_open(running)
        return replace(
            timing,
            max_running=max(1, round(min(max_open, timing.max_running * self.needed / self.slots))),
            kv_tokens=timing.kv_tokens / share,
            kv_token_s=timing.kv_token_s * share,
            compute_rollout_s=timing.compute_rollout_s * share,
            step_s=timing.step_s + self.token_environment_s,
            rollout_s=timing.rollout_s * share,
        )
