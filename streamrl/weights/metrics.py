"""What it took to publish and to take up versions, in figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PullStats:
    """What it took a reader to serve a version.

    pull_s: from the news of it until it is held, s. pause_s: while nothing was sampled, s.
    num_bytes: that travelled. interrupted: rollouts that ran at that moment. probe_diff: largest
    difference of a log-probability from the trainer's; NaN if none was looked at. detour: why it
    did not come the way it should have. copied_bytes: that were copied within processes, from where
    they are trained to where they are served; NaN if nobody knows. warnings: what the reader's
    engine says of weights that it did not load.
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
    """What went on around the weights of one model in some time.

    publish_s: of the longest publish, s; NaN if there was none. skew: versions that the reader
    furthest behind has to go. num_faults: publishes and pulls that failed since the run began.
    """

    pulls: Sequence[PullStats]
    publish_s: float
    max_version_lag: int
    num_faults: int


def weight_metrics(policy: SyncStats, others: Sequence[SyncStats] = ()) -> Mapping[str, float]:
    """weights/* of a run, NaN where nothing was measured.

    What sampling suffers, and what is copied, is the policy's alone; critics and references count
    in all else.
    """
    everything = (policy, *others)
    pulls = [pull for traffic in everything for pull in traffic.pulls]
    seconds = sum(pull.pull_s for pull in pulls)
    moved = sum(pull.num_bytes for pull in pulls)
    copied = sum(pull.copied_bytes for pull in policy.pulls)
    published = [t.publish_s for t in everything if not math.isnan(t.publish_s)]
    probed = [pull.logprob_diff for pull in policy.pulls if not math.isnan(pull.logprob_diff)]
    return {
        "weights/skew_max": max(traffic.max_version_lag for traffic in everything),
        "weights/publish_s": max(published, default=math.nan),
        "weights/pull_s": max((pull.pull_s for pull in pulls), default=0.0),
        "weights/pause_s": max((pull.pause_s for pull in policy.pulls), default=0.0),
        "weights/bytes": moved,
        "weights/copied_bytes": copied if policy.pulls else math.nan,
        "weights/bytes_per_s": moved / seconds if seconds else math.nan,
        "weights/interrupted": sum(pull.num_interrupted for pull in policy.pulls),
        "weights/probe_diff": max(probed, default=math.nan),
        "weights/faults": sum(traffic.num_faults for traffic in everything),
    }
