"""Metric rows and run info for tests."""

from pathlib import Path

from streamrl.telemetry.console import RunInfo
from streamrl.telemetry.metric_names import METRICS, STALENESS_HISTOGRAM, Histogram

STAGES = ("generate", "reward", "reference", "train")


def make_run_info(run_dir: Path, *, num_steps: int = 40, resume_step: int | None = None) -> RunInfo:
    return RunInfo("demo", run_dir, num_steps, 2, resume_step)


def full_row(step: int) -> dict[str, float | Histogram]:
    """Return a row with every metric of a run without episodes.

    The reward rises from 0.1 by 0.1 per step.
    """
    row: dict[str, float | Histogram] = {
        metric.name: 0.5 for metric in METRICS if not (metric.is_pattern or metric.has_episodes)
    }
    row[STALENESS_HISTOGRAM] = Histogram((0, 1, 2, 3), (100, 20, 3))
    row |= {f"idle/{stage}": 0.25 * i for i, stage in enumerate(STAGES)}
    row |= {f"queue/depth/{stage}": i + step for i, stage in enumerate(STAGES[1:])}
    row |= {"reward/correct": 0.3, "drops/reward_error": 1}
    row |= {"ledger/admitted": 20, "ledger/trained": 10, "ledger/filtered": 2}
    row |= {"ledger/dropped": 1, "ledger/in_flight": 7, "stale/lost_prompts": 0}
    row |= {"time/step_s": 2.0, "throughput/tokens_per_s": 12_345.0, "weights/version": step}
    return row | {"reward/mean": 0.1 * step, "staleness/mean": 0.61, "staleness/max": 2}
