"""The workspace and the report of wandb: built without network, of metrics that runs log."""

import json
import re

import pytest

from streamrl.cli.main import main
from streamrl.telemetry.metric_names import METRICS
from streamrl.telemetry.wandb_workspace import REPORT_PANELS, SECTIONS, make_report, make_workspace

PANELS = [panel for panels in SECTIONS.values() for panel in panels]


def test_sections_are_in_the_order_of_the_stream() -> None:
    names = [section.name for section in make_workspace("team", "streamrl").sections]
    assert names[:5] == ["Reward and evaluation", "Rollouts", "Policy", "Queue", "Staleness"]
    assert names[-1] == "Episodes"


def test_the_library_serializes_workspace_and_report() -> None:
    view = make_workspace("team", "streamrl")._to_model()
    spec = json.loads(view.spec.model_dump_json(by_alias=True))
    assert "queue/depth" in json.dumps(spec)


def test_the_report_compares_runs_by_the_main_panels() -> None:
    # The library serializes a report's run set only with an account.
    grids = [block for block in make_report("team", "streamrl").blocks if hasattr(block, "panels")]
    panels = [panel._to_model().model_dump_json(by_alias=True) for panel in grids[0].panels]
    assert len(panels) == len(REPORT_PANELS)
    assert "reward/mean" in panels[0]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_panels_show_metrics_of_the_contract(panel) -> None:
    for metric, spec in zip(panel.metrics, panel.specs, strict=True):
        assert spec in METRICS
        if panel.pattern:
            assert re.match(panel.pattern, re.sub("<[a-z]+>", "generate", metric))


def test_panels_of_a_pattern_leave_other_metrics_out() -> None:
    (depth,) = (panel for panel in PANELS if "queue/depth/<stage>" in panel.metrics)
    others = [metric.name for metric in METRICS if not metric.name.startswith("queue/depth/")]
    assert depth.pattern
    assert not any(re.match(depth.pattern, name) for name in others)


def test_the_command_lists_the_panels_without_an_account(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["wandb-workspace", "streamrl", "--dry-run"]) == 0
    assert "Queue: Queue depth by stage" in capsys.readouterr().out


def test_the_command_needs_an_account(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/nonexistent")
    assert main(["wandb-workspace", "streamrl"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "wandb login" in printed.err
