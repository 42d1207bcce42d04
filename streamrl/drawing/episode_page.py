"""Recorded rollouts as JSON and as one HTML page, which needs neither network nor server."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.telemetry.rollout_log import RecordedGroup

_TEMPLATE = Path(__file__).with_name("episode_page.html")
_DATA_PLACEHOLDER = "@DATA@"


def groups_to_json(groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Return groups as JSON types, with mean and relative scores; null if not finite."""
    described = []
    for group in groups:
        rollouts = [
            {
                **msgspec.to_builtins(rollout),
                "score": _to_json_number(rollout.score),
                "relative_score": _to_json_number(rollout.score - group.mean_score),
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
    data = json.dumps({"title": title, **groups_to_json(groups)}, allow_nan=False)
    # Only "<" can end the script element that holds the data, or begin a comment in it.
    data = data.replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_DATA_PLACEHOLDER, data, 1)
