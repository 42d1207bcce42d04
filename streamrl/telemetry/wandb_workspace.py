"""Workspace and report of Weights & Biases, with the panels in the order of the stream.

    workspace = make_workspace("my-team", "streamrl")
    workspace.save()                    # needs an account

Package `wandb-workspaces`, the extra `wandb_workspaces`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from streamrl.telemetry.metric_names import (
    STALENESS_HISTOGRAM,
    WAIT_METRICS,
    MetricSpec,
    find_metric,
)
from streamrl.telemetry.wandb_sink import ROLLOUTS_TABLE

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

WORKSPACE_NAME = "streamrl"
_OPEN_SECTIONS = 4


@dataclass(frozen=True)
class PanelSpec:
    """Line chart.

    metrics: names of the metrics contract; one with a placeholder, such as queue/depth/<stage>, has
    a line for each of its metrics. plot_type: line or stacked-area.
    """

    title: str
    metrics: tuple[str, ...]
    plot_type: Literal["line", "stacked-area"] = "line"

    @property
    def specs(self) -> list[MetricSpec]:
        """Specs of the metrics. Raises ValueError for a name that no run logs."""
        return [find_metric(name) for name in self.metrics]

    @property
    def unit(self) -> str:
        return self.specs[0].unit

    @property
    def pattern(self) -> str | None:
        """Regular expression of the metrics if one has a placeholder; None otherwise."""
        if not any("<" in name for name in self.metrics):
            return None
        forms = [re.sub("<[a-z]+>", "[^/]+", re.escape(name)) for name in self.metrics]
        return f"^({'|'.join(forms)})$"


SECTIONS: dict[str, tuple[PanelSpec, ...]] = {
    "Reward and evaluation": (
        PanelSpec("Reward", ("reward/mean",)),
        PanelSpec("Evaluation", ("eval/pass_at_1", "eval/mean_at_k", "eval/pass_at_k")),
        PanelSpec("Reward by component", ("reward/<component>",)),
        PanelSpec("Length of rollouts", ("rollout/length_mean", "rollout/length_max")),
        PanelSpec("Truncated rollouts", ("rollout/truncated_frac",)),
        PanelSpec("Verdicts", ("verdicts/<verdict>",)),
    ),
    "Policy": (
        PanelSpec("Loss", ("loss/policy", "loss/kl", "loss/entropy")),
        PanelSpec("Entropy", ("policy/entropy",)),
        PanelSpec("KL to the reference", ("policy/kl_ref",)),
        PanelSpec("Gradient norm", ("policy/grad_norm", "critic/grad_norm")),
        PanelSpec("Clipped tokens", ("policy/clip_frac",)),
        PanelSpec("Effective sample size", ("policy/ess",)),
        PanelSpec("KL of sampling to trained policy", ("correction/kl",)),
        PanelSpec("Explained variance of the critic", ("critic/explained_variance",)),
    ),
    "Queue": (
        PanelSpec("Queue depth by stage", ("queue/depth/<stage>",), "stacked-area"),
        PanelSpec("Bytes", ("queue/bytes",)),
        PanelSpec("Age of the oldest group", ("queue/oldest_age_s",)),
        PanelSpec(
            "Redelivered, hedged, refused", ("queue/redelivered", "queue/hedged", "queue/refused")
        ),
    ),
    "Staleness": (
        PanelSpec("Staleness", ("staleness/mean", "staleness/max")),
        PanelSpec(
            "Where it arose",
            ("staleness/in_flight_mean", "staleness/in_queue_mean"),
            "stacked-area",
        ),
        PanelSpec("Trained tokens by staleness", (STALENESS_HISTOGRAM,)),
    ),
    "Stages": (
        PanelSpec("Idle by stage", ("idle/<stage>",)),
        PanelSpec("Step time", ("time/step_s", "time/generate_s", "time/score_s", "time/train_s")),
        PanelSpec("Waits for evaluation and checkpoint", WAIT_METRICS),
        PanelSpec("Throughput", ("throughput/tokens_per_s",)),
        PanelSpec("CPU cores", ("cpu/machine", "cpu/stages", "cpu/queue")),
        PanelSpec("Memory", ("memory/<phase>_mb",)),
    ),
    "Weights": (
        PanelSpec(
            "Publish, pull, pause", ("weights/publish_s", "weights/pull_s", "weights/pause_s")
        ),
        PanelSpec("Versions between newest and oldest in use", ("weights/skew_max",)),
        PanelSpec("Bytes moved", ("weights/bytes",)),
        PanelSpec("Logprob check", ("weights/probe_diff",)),
        PanelSpec("Faults", ("weights/faults",)),
    ),
    "Ledger and drops": (
        PanelSpec(
            "Ledger",
            ("ledger/trained", "ledger/filtered", "ledger/dropped", "ledger/in_flight"),
            "stacked-area",
        ),
        PanelSpec("Drops by cause", ("drops/<cause>",), "stacked-area"),
        PanelSpec("Filtered groups", ("filter/share",)),
        PanelSpec("Cost of the filter", ("filter/generate_s", "filter/score_s")),
    ),
    "Episodes": (
        PanelSpec("Turns", ("episode/turns",)),
        PanelSpec("Tokens", ("episode/sampled_tokens", "episode/observed_tokens")),
        PanelSpec(
            "Where their time goes",
            ("episode/decode_frac", "episode/wait_frac", "episode/environment_frac"),
            "stacked-area",
        ),
        PanelSpec(
            "Failing calls",
            ("episode/malformed_frac", "episode/tool_error_frac", "episode/tool_timeout_frac"),
        ),
        PanelSpec("Episodes at a limit", ("episode/truncated_frac", "episode/timeout_frac")),
    ),
}
"""Panels of the workspace by section."""
REPORT_PANELS = (
    "Reward",
    "Evaluation",
    "Staleness",
    "Step time",
    "Throughput",
    "Queue depth by stage",
)


def make_workspace(entity: str, project: str) -> "ws.Workspace":
    """Return the workspace, not yet saved. Raises ImportError without the extra's package."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(
            name=name, panels=[make_panel(panel) for panel in panels], is_open=i < _OPEN_SECTIONS
        )
        for i, (name, panels) in enumerate(SECTIONS.items())
    ]
    table = wr.WeavePanelSummaryTable(table_name=ROLLOUTS_TABLE)
    sections.insert(1, ws.Section(name="Rollouts", panels=[table], is_open=True))
    return ws.Workspace(entity=entity, project=project, name=WORKSPACE_NAME, sections=sections)


def make_panel(panel: PanelSpec) -> "wr.LinePlot":
    import wandb_workspaces.reports.v2 as wr

    pattern = panel.pattern
    return wr.LinePlot(
        title=panel.title,
        x="Step",
        y=[] if pattern else list(panel.metrics),
        metric_regex=pattern,
        title_y=panel.unit or None,
        plot_type=panel.plot_type,
        range_y=(0, 1) if panel.unit == "fraction" else (None, None),
    )


def make_report(entity: str, project: str) -> "wr.Report":
    """Return a report that compares the project's runs, not yet saved."""
    import wandb_workspaces.reports.v2 as wr

    by_title = {panel.title: panel for panels in SECTIONS.values() for panel in panels}
    runs = wr.Runset(entity=entity, project=project, name="runs to compare")
    blocks: Sequence[Any] = [
        wr.H1("Comparison of runs"),
        wr.P("Choose runs below. Lines of one color belong to the same run."),
        wr.PanelGrid(runsets=[runs], panels=[make_panel(by_title[t]) for t in REPORT_PANELS]),
        wr.H2("Settings that differ"),
        wr.PanelGrid(runsets=[runs], panels=[wr.RunComparer(diff_only=True)]),
    ]
    return wr.Report(
        entity=entity,
        project=project,
        title="streamrl: comparison of runs",
        blocks=list(blocks),
        width="fluid",
    )
