"""Page of one or several runs: its data as JSON, and the HTML file that holds it.

    page = RunPage([RunReader(run_dir)], describe_bottleneck)
    html = page.render()             # a file that needs neither network nor server
    data = page.describe()           # later, for a page that follows the run

The charts are drawn by Plotly, whose script is part of the file.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.drawing.episode_page import (
    embed_json,
    fill_template,
    groups_to_json,
    read_rollout_view,
)
from streamrl.run_page.run_charts import draw_run_charts
from streamrl.run_page.run_record import RunReader, RunRecord
from streamrl.run_page.shared_charts import draw_shared_charts
from streamrl.telemetry.chrome_trace import TRACE_FILE, read_recent_spans
from streamrl.telemetry.metric_names import WAIT_METRICS
from streamrl.telemetry.progress import IDLE_PREFIX, format_duration, format_number
from streamrl.telemetry.rollout_log import list_recorded_steps, read_recorded_groups

FOLLOW_EVERY_S = 5
"""Time after which a served page asks for what the run has written since."""
MAX_ROLLOUT_BYTES = 8_000_000
"""Most JSON of rollouts in a file; a page that is served has those of all steps."""
_FOLDER = Path(__file__).parent
_DescribeBottleneck = Callable[[Path], Sequence[str]]


class RunPage:
    """Page of runs that may be under way.

    describe_bottleneck: function of a run directory that returns lines of text, or why there are
    none.
    """

    def __init__(
        self, readers: Sequence[RunReader], describe_bottleneck: _DescribeBottleneck
    ) -> None:
        self._readers = readers
        self._describe_bottleneck = describe_bottleneck

    def describe(
        self, *, with_rollouts: bool = False, follow_every_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the data of the page as JSON types.

        with_rollouts: with the rollouts of as many steps as MAX_ROLLOUT_BYTES hold, spread over the
        run. follow_every_s: time between two requests of a served page, s; 0: it does not follow.
        Raises ConfigError for a damaged file.
        """
        records = [reader.read() for reader in self._readers]
        return {
            "title": ", ".join(record.name for record in records),
            "followEvery": follow_every_s,
            "charts": [chart.to_json() for chart in draw_shared_charts(records)],
            "runs": [self._describe_run(record, with_rollouts) for record in records],
        }

    def _describe_run(self, run: RunRecord, with_rollouts: bool) -> dict[str, Any]:
        steps = list_recorded_steps(run.run_dir)
        rollouts = collect_rollouts(run.run_dir, steps) if with_rollouts else {}
        left_out = len(steps) - len(rollouts) if with_rollouts else 0
        note = (
            f"Of {len(steps)} recorded steps, {len(rollouts)} are in this file." if left_out else ""
        )
        spans = read_recent_spans(run.run_dir / TRACE_FILE)
        return {
            "name": run.name,
            "state": describe_state(run),
            "tiles": [{"label": label, "value": value} for label, value in list_tiles(run)],
            "charts": [chart.to_json() for chart in draw_run_charts(run, spans)],
            "advice": list(self._describe_bottleneck(run.run_dir)),
            "config": run.config_text,
            "rollouts": rollouts,
            "rolloutSteps": list(rollouts) if with_rollouts else steps,
            "rolloutsNote": note if steps else "This run has recorded no rollouts.",
        }

    def describe_rollouts(self, run_name: str, step: int) -> dict[str, Any] | None:
        """Return the recorded groups of a run's step as JSON types; None for an unknown run."""
        for reader in self._readers:
            if reader.run_dir.name == run_name:
                return groups_to_json(read_recorded_groups(reader.run_dir, step))
        return None

    def render(self, *, is_served: bool = False) -> str:
        """Return the page as HTML. is_served: it asks its server for rollouts and new steps."""
        data = self.describe(
            with_rollouts=not is_served, follow_every_s=FOLLOW_EVERY_S if is_served else 0.0
        )
        parts = {
            **read_rollout_view(),
            "@PAGE_SCRIPT@": (_FOLDER / "page.js").read_text(encoding="utf-8"),
            "@DATA@": embed_json(data),
            "@PLOTLY@": load_plotly_script(),
        }
        return fill_template(_FOLDER / "page.html", parts)


def load_plotly_script() -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def collect_rollouts(run_dir: Path, steps: Sequence[int]) -> dict[str, list[Any]]:
    """Return the groups of recorded steps as JSON types, by step, up to MAX_ROLLOUT_BYTES.

    If they are too large, those of every second step are left out, until they fit; the last step's
    stay.
    """
    chosen = list(steps)
    collected: dict[int, list[Any]] = {}
    while chosen:
        collected, size = {}, 0
        for step in chosen:
            groups = groups_to_json(read_recorded_groups(run_dir, step))["groups"]
            size += len(json.dumps(groups))
            if size > MAX_ROLLOUT_BYTES and len(chosen) > 1:
                break
            collected[step] = groups
        else:
            break
        chosen = chosen[::-2][::-1]
    return {str(step): groups for step, groups in collected.items()}


def describe_state(run: RunRecord) -> str:
    """Return whether a run is under way, finished or failed, in words."""
    closings = [event for event in run.events if event.get("event") == "close"]
    starts = [event for event in run.events if event.get("event") == "machine"]
    if closings and (not starts or closings[-1]["time"] >= starts[-1]["time"]):
        return str(closings[-1].get("outcome", "ended"))
    return "under way, or killed"


def list_tiles(run: RunRecord) -> list[tuple[str, str]]:
    """Return labels and values of the numbers at the top of the page."""
    if not run.rows:
        return [("step", "0")]
    last = run.rows[-1]
    rewards = run.get_column("reward/mean")
    rewards = rewards[np.isfinite(rewards)]
    tiles = [("step", str(last["step"]))]
    if len(rewards):
        tiles.append(("reward", f"{format_number(rewards[0])} \u2192 {format_number(rewards[-1])}"))
    for name in ("mean_at_k", "pass_at_1"):
        steps, values = run.get_evaluations(f"eval/{name}")
        if steps:
            change = f"{format_number(values[0])} \u2192 {format_number(values[-1])}"
            tiles.append((f"evaluation, {name}", change))
            break
    staleness = run.get_column("staleness/max")
    tiles.append(("largest staleness", format_number(float(staleness.max()), 0)))
    tiles.append(("tokens/s", format_number(last.get("throughput/tokens_per_s") or math.nan, 0)))
    step_s = run.get_column("time/step_s")
    tiles.append(("time", format_duration(float(np.nansum(step_s)))))
    idle = {
        name.removeprefix(IDLE_PREFIX): float(run.get_column(name)[-20:].mean())
        for name in run.select_names(IDLE_PREFIX)
    }
    if idle:
        stage = min(idle, key=lambda name: idle[name])
        tiles.append(("busiest stage", f"{stage}, {1 - idle[stage]:.0%}"))
    waited_s = sum(np.nansum(run.get_column(n)) for n in WAIT_METRICS)
    if waited_s:
        tiles.append(
            ("evaluations, checkpoints", f"{waited_s / np.nansum(step_s):.0%} of the time")
        )
    dropped = last.get("ledger/dropped")
    if dropped:
        tiles.append(("groups dropped", str(dropped)))
    return tiles
