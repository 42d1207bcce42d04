"""Recorded rollouts as JSON and as one HTML page, which needs neither network nor server."""

import json
import math
import re
from collections.abc import Mapping, Sequence
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
    data = embed_json({"title": title, **groups_to_json(groups)})
    return fill_template(_FOLDER / "episode_page.html", {**read_rollout_view(), "@DATA@": data})


def read_rollout_view() -> dict[str, str]:
    """Return style, controls and script that draw rollouts, by their places in a template."""
    files = {"@STYLE@": "css", "@CONTROLS@": "html", "@SCRIPT@": "js"}
    return {
        place: (_FOLDER / f"rollout_view.{suffix}").read_text(encoding="utf-8")
        for place, suffix in files.items()
    }


def fill_template(path: Path, parts: Mapping[str, str]) -> str:
    """Return the text of a template with each part in its place.

    What stands in a part is never taken for a place: the template is cut at its own places first.
    """
    pattern = "|".join(map(re.escape, parts))
    return re.sub(pattern, lambda place: parts[place[0]], path.read_text(encoding="utf-8"))


def embed_json(value: object) -> str:
    """Return a value as JSON for a script element, which only "<" can end."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
