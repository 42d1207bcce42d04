"""Metrics of publishing and loading versions of the weights (weights/*)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PullStats:
    """Cost of one pull: a reader fetches a version of the weights and loads it.

    - pull_s: seconds from learning of the version until serving it.
    - pause_s: seconds without sampling.
    - num_bytes: bytes received.
    - num_interrupted: rollouts that ran while the version was loaded.
    - logprob_diff: largest difference of a log-probability from the trainer's; NaN if not checked.
    - fallback_reason: why the fallback transport was used; empty if not used.
    - copied_bytes: bytes copied within processes, from the trainer's to the served tensors; NaN if
      unknown.
    - warnings: the engine's warnings about weights that it did not load.
    """

    pull_s: float = 0.0
    pause_s: float = 0.0
    num_bytes: int = 0
    num_interrupted: int = 0
    logprob_diff: float = math.nan
    fallback_reason: str = ""
    copied_bytes: float = math.nan
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class SyncStats:
    """Publishes and pulls of one model's weights during an interval.

    publish_s: longest publish in seconds, NaN without any. max_version_lag: versions that the
    slowest reader is behind. num_faults: failed publishes and pulls since the run began.
    """

    pulls: Sequence[PullStats]
    publish_s: float
    max_version_lag: int
    num_faults: int


def weight_metrics(policy: SyncStats, shadows: Sequence[SyncStats] = ()) -> Mapping[str, float]:
    """Return the weights/* metrics of an interval, NaN for unmeasured ones.

    `shadows`: statistics of the other published models, critics and references. Pauses,
    interruptions, copies and logprob checks count for the policy only; the other metrics include
    the shadows.
    """
    models = (policy, *shadows)
    pulls = [pull for model in models for pull in model.pulls]
    seconds = sum(pull.pull_s for pull in pulls)
    num_bytes = sum(pull.num_bytes for pull in pulls)
    copied_bytes = sum(pull.copied_bytes for pull in policy.pulls)
    publish_times_s = [model.publish_s for model in models if not math.isnan(model.publish_s)]
    logprob_diffs = [
        pull.logprob_diff for pull in policy.pulls if not math.isnan(pull.logprob_diff)
    ]
    return {
        "weights/skew_max": max(model.max_version_lag for model in models),
        "weights/publish_s": max(publish_times_s, default=math.nan),
        "weights/pull_s": max((pull.pull_s for pull in pulls), default=0.0),
        "weights/pause_s": max((pull.pause_s for pull in policy.pulls), default=0.0),
        "weights/bytes": num_bytes,
        "weights/copied_bytes": copied_bytes if policy.pulls else math.nan,
        "weights/bytes_per_s": num_bytes / seconds if seconds else math.nan,
        "weights/interrupted": sum(pull.num_interrupted for pull in policy.pulls),
        "weights/probe_diff": max(logprob_diffs, default=math.nan),
        "weights/faults": sum(model.num_faults for model in models),
    }
