"""Recorded rollouts as JSON and as one HTML page, which needs neither network nor server."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.telemetry.rollout_log import RecordedGroup

_FOLDER = Path(__file__).parent


def groups_to_json(groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Return groups as JSON types, with mean and relative scores; null if not finite."""
    described = []
    for group in groups:
        rollouts = [
            {
                **msgspec.to_builtins(rollout),
                "score": _to_json_number(rollout.score),
                "relative_score": _to_json_number(rollout.score - group.mean_score),
                "advantage": None
                if rollout.advantage is None
                else _to_json_number(rollout.advantage),
            }
            for rollout in group.rollouts
        ]
        mean = _to_json_number(group.mean_score)
        described.append({**msgspec.to_builtins(group), "mean_score": mean, "rollouts": rollouts})
    return {"groups": described}


def _to_json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render_page(title: str, groups: Sequence[RecordedGroup]) -> str:
    """Return an HTML page of the groups: tokens by source, version, logprob or relative score."""
    style, script = read_rollout_view()
    data = embed_json({"title": title, **groups_to_json(groups)})
    html = (_FOLDER / "episode_page.html").read_text(encoding="utf-8")
    for placeholder, text in (("@STYLE@", style), ("@SCRIPT@", script), ("@DATA@", data)):
        html = html.replace(placeholder, text, 1)
    return html


def read_rollout_view() -> tuple[str, str]:
    """Return style and script that draw rollouts, for the pages that contain them."""
    style, script = (_FOLDER / name for name in ("rollout_view.css", "rollout_view.js"))
    return style.read_text(encoding="utf-8"), script.read_text(encoding="utf-8")


def embed_json(value: object) -> str:
    """Return a value as JSON for a script element, which only "<" can end."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
