"""Counts and means of the episodes that a driver has run, for the metrics of a step."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from streamrl.environments.episodes.episode import Episode
from streamrl.environments.interface import CallOutcome
from streamrl.messages import TRUNCATIONS, FinishReason, TokenSource
from streamrl.rewards.metric_means import MetricSums


class EpisodeMeter:
    """Sums over episodes since the last `drain_counts`, named as in the metrics contract."""

    def __init__(self) -> None:
        self._sums = MetricSums()
        self._seconds: Counter[str] = Counter()
        self._num_infra_errors = 0
        self._num_open = 0
        self._waits_since: dict[object, float] = {}
        """Start of each wait for an environment that goes on, event loop time."""

    @contextmanager
    def track_open(self) -> Iterator[None]:
        """Count an episode as open within the context."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def count_infra_error(self) -> None:
        self._num_infra_errors += 1

    def add_seconds(self, *, decode: float, wait: float) -> None:
        """Add time in which the engine sampled a turn, and in which the turn waited for it."""
        self._seconds.update({"decode": decode, "wait": wait})

    @contextmanager
    def measure_environment(self) -> Iterator[None]:
        """Measure the time in which an episode waits for its environment."""
        clock, wait = asyncio.get_running_loop().time, object()
        self._waits_since[wait] = clock()
        try:
            yield
        finally:
            self._seconds.update({"environment": clock() - self._waits_since.pop(wait)})

    def describe_waits(self) -> str:
        """Return how many open episodes wait for their environment, and how long; "" if none."""
        if not self._waits_since:
            return ""
        longest_s = asyncio.get_running_loop().time() - min(self._waits_since.values())
        return (
            f"{len(self._waits_since)} of {self._num_open} open episodes wait for their"
            f" environment, the longest for {longest_s:.0f} s"
        )

    def add_episode(self, episode: Episode, *, environment_s: float) -> None:
        """Add a finished episode and the time in which it waited for its environment, s."""
        all_sources = np.concatenate([sample.token_source for sample in episode.samples])
        sources = np.bincount(all_sources, minlength=len(TokenSource))
        reason = episode.finish_reason
        for name, value in {
            "turns": len(episode.turn_rewards),
            "samples": len(episode.samples),
            "sampled_tokens": sources[TokenSource.SAMPLED],
            "observed_tokens": sources[TokenSource.OBSERVATION],
            "calls": len(episode.call_outcomes),
            "environment_s": environment_s,
            "timeout_frac": reason is FinishReason.TIMEOUT,
            "truncated_frac": reason in TRUNCATIONS,
        }.items():
            self._sums.add(f"episode/{name}", float(value))
        num_by_outcome = Counter(episode.call_outcomes)
        num_calls = num_by_outcome.total()
        for name, count in (
            {
                "malformed_frac": episode.num_invalid_calls,
                "tool_error_frac": num_by_outcome[CallOutcome.TOOL_ERROR],
                "tool_timeout_frac": num_by_outcome[CallOutcome.TIMED_OUT],
            }.items()
            if num_calls
            else ()
        ):
            self._sums.add(f"episode/{name}", count, weight=num_calls)

    def drain_counts(self) -> dict[str, float]:
        """Return sums and counts since the last call by metric name, and reset them."""
        total_s = sum(self._seconds.values())
        for part in ("decode", "wait", "environment") if total_s else ():
            self._sums.add(f"episode/{part}_frac", self._seconds[part], weight=total_s)
        counts = self._sums.drain_sums()
        counts["episode/infra_errors"] = float(self._num_infra_errors)
        counts["episode/open"] = float(self._num_open)
        self._seconds, self._num_infra_errors = Counter(), 0
        return counts
