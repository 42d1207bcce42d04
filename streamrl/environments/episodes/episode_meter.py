"""Counts and means of the episodes that a driver has run, for the metrics of a step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from streamrl.environments.episodes.episode import Episode
from streamrl.environments.interface import CallOutcome
from streamrl.messages import TRUNCATIONS, FinishReason, TokenSource
from streamrl.rewards.metric_means import MetricSums

_MALFORMED = (CallOutcome.MALFORMED, CallOutcome.UNKNOWN_TOOL, CallOutcome.WRONG_ARGUMENTS)


class EpisodeMeter:
    """Sums over episodes since the last `drain_counts`, named as in the metrics contract."""

    def __init__(self) -> None:
        self._sums = MetricSums()
        self._seconds: Counter[str] = Counter()
        self._num_infra_errors = 0
        self._num_open = 0

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

    def add_seconds(self, **seconds: float) -> None:
        """Add time that episodes spent in `decode`, in `wait` for a slot or in `environment`."""
        self._seconds.update(seconds)

    def add_episode(
        self, episode: Episode, outcomes: Sequence[CallOutcome], *, environment_s: float
    ) -> None:
        """Add a finished episode, the outcomes of its tool calls and its environment's time, s."""
        sources = np.bincount(episode.token_source, minlength=len(TokenSource))
        reason = episode.rollout.finish_reason
        for name, value in {
            "turns": len(episode.turn_ends),
            "sampled_tokens": sources[TokenSource.SAMPLED],
            "observed_tokens": sources[TokenSource.OBSERVATION],
            "calls": len(outcomes),
            "environment_s": environment_s,
            "timeout_frac": reason is FinishReason.TIMEOUT,
            "truncated_frac": reason in TRUNCATIONS,
        }.items():
            self._sums.add(f"episode/{name}", float(value))
        for name, kinds in {
            "malformed_frac": _MALFORMED,
            "tool_error_frac": (CallOutcome.TOOL_ERROR,),
            "tool_timeout_frac": (CallOutcome.TIMED_OUT,),
        }.items():
            for outcome in outcomes:
                self._sums.add(f"episode/{name}", float(outcome in kinds))

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
