"""Page of one or several runs: its data as JSON, the HTML file that holds it, and its server.

    page = RunPage([RunReader(run_dir)], describe_bottleneck)
    html = page.render()             # a file that needs neither network nor server
    data = page.describe()           # later, for a page that follows the run

The charts are drawn by Plotly, whose script is part of the file.
"""

import json
import math
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from streamrl.errors import ConfigError
from streamrl.telemetry.metric_names import IDLE_PREFIX
from streamrl.telemetry.page.charts import draw_run_charts, draw_shared_charts
from streamrl.telemetry.page.run_record import RunReader, RunRecord
from streamrl.telemetry.progress import format_duration, format_number
from streamrl.telemetry.rollout_log import (
    ROLLOUTS_FOLDER,
    groups_to_json,
    list_recorded_steps,
    read_recorded_groups,
)
from streamrl.telemetry.sinks import EVENTS_FILE, METRICS_FILE

LOOPBACK = "127.0.0.1"
_STEP = re.compile("[0-9]{1,15}", re.ASCII)
HOST_NAMES = (LOOPBACK, "localhost")
FOLLOW_EVERY_S = 5
"""Time after which a served page asks for what the run has written since."""
MAX_ROLLOUT_BYTES = 8_000_000
"""Most JSON of rollouts in a file; a page that is served has those of all steps."""
_FOLDER = Path(__file__).parent
SHOWN_FILES = (METRICS_FILE, EVENTS_FILE, ROLLOUTS_FOLDER)
_DescribeBottleneck = Callable[[Path, int], Sequence[str]]


class RunPage:
    """Page of runs that may be under way.

    describe_bottleneck: function of a run directory and its number of steps that returns lines of
    text, or why there are none. Construction raises ConfigError for a run that is given twice.
    """

    def __init__(
        self, readers: Sequence[RunReader], describe_bottleneck: _DescribeBottleneck
    ) -> None:
        names = name_runs([reader.run_dir for reader in readers])
        self._readers = dict(zip(names, readers, strict=True))
        self._describe_bottleneck = describe_bottleneck

    def compute_state(self) -> str:
        """Return a text that changes when a run writes something that the page shows."""
        files = [reader.run_dir / name for reader in self._readers.values() for name in SHOWN_FILES]
        stats = [file.stat() if file.exists() else None for file in files]
        return "-".join(f"{s.st_size:x}.{s.st_mtime_ns:x}" if s else "" for s in stats)

    def describe(
        self, *, with_rollouts: bool = False, follow_every_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the data of the page as JSON types.

        with_rollouts: with the rollouts of as many of the latest steps as MAX_ROLLOUT_BYTES hold.
        follow_every_s: time between two requests of a served page, s; 0: it does not follow.
        Raises ConfigError for a damaged file.
        """
        records = [reader.read(name) for name, reader in self._readers.items()]
        return {
            "title": ", ".join(record.name for record in records),
            "followEvery": follow_every_s,
            "charts": list(map(vars, draw_shared_charts(records))),
            "runs": [self._describe_run(record, with_rollouts) for record in records],
        }

    def _describe_run(self, run: RunRecord, with_rollouts: bool) -> dict[str, Any]:
        steps = list_recorded_steps(run.run_dir)
        rollouts = collect_rollouts(run.run_dir, steps) if with_rollouts else {}
        note = "" if steps else "This run has recorded no rollouts."
        if with_rollouts and len(steps) > len(rollouts):
            note = f"Of {len(steps)} recorded steps, the last {len(rollouts)} are in this file."
        return {
            "name": run.name,
            "state": describe_state(run),
            "tiles": [{"label": label, "value": value} for label, value in list_tiles(run)],
            "charts": list(map(vars, draw_run_charts(run))),
            "advice": list(self._describe_bottleneck(run.run_dir, int(max(run.steps, default=0)))),
            "config": run.config_text,
            "rollouts": rollouts,
            "rolloutSteps": list(rollouts) if with_rollouts else steps,
            "rolloutsNote": note,
        }

    def describe_rollouts(self, run_name: str, step: int) -> dict[str, Any] | None:
        """Return the recorded groups of a run's step as JSON types; None for an unknown run."""
        reader = self._readers.get(run_name)
        if reader is None:
            return None
        return groups_to_json(read_recorded_groups(reader.run_dir, step))

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


def load_plotly_script() -> str:
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def name_runs(run_dirs: Sequence[Path]) -> list[str]:
    """Return the folder names of runs, or their paths if names are equal.

    Raises ConfigError for a run that is given twice.
    """
    paths = [path.resolve() for path in run_dirs]
    for path, given in zip(paths, run_dirs, strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"{given}: given twice; name each run once")
    names = [path.name for path in paths]
    return names if len({*names}) == len(names) else list(map(str, paths))


def collect_rollouts(run_dir: Path, steps: Sequence[int]) -> dict[str, list[Any]]:
    """Return the groups of the latest recorded steps as JSON types, up to MAX_ROLLOUT_BYTES."""
    collected: dict[str, list[Any]] = {}
    size = 0
    for step in reversed(steps):
        groups = groups_to_json(read_recorded_groups(run_dir, step))["groups"]
        size += len(json.dumps({str(step): groups}))
        if collected and size > MAX_ROLLOUT_BYTES:
            break
        collected[str(step)] = groups
    return dict(reversed(collected.items()))


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
    tiles.append(("time", format_duration(run.total_s)))
    idle = {
        name.removeprefix(IDLE_PREFIX): float(run.get_column(name)[-20:].mean())
        for name in run.select_names(IDLE_PREFIX)
    }
    if idle:
        stage = min(idle, key=lambda name: idle[name])
        tiles.append(("busiest stage", f"{stage}, {1 - idle[stage]:.0%}"))
    dropped = last.get("ledger/dropped")
    if dropped:
        tiles.append(("groups dropped", str(dropped)))
    return tiles


# Server: loopback only, with a random token in the address.


class PageServer(ThreadingHTTPServer):
    """HTTP server of a page; `address` is what to open.

    port: 0 picks a free one. Construction raises ConfigError if the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, page: RunPage, *, port: int = 0) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(16)
        # Reading a run changes what its reader remembers: one request at a time.
        self.page_lock = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), PageHandler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}; leave it out to take a free one") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing for a connection that its browser closed, as by a reload."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop `serve_forever`, which another thread runs, and free the port."""
        self.shutdown()
        self.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """Answers a request that has the token."""

    server: PageServer
    server_version = "streamrl"
    sys_version = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not self._is_allowed(query.get("token", "")):
            self._send("open the address that streamrl view prints", HTTPStatus.FORBIDDEN)
            return
        try:
            with self.server.page_lock:
                self._answer(parts.path, query)
        except ConfigError as error:
            self._send(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)

    def _is_allowed(self, token: str) -> bool:
        # A page of another site, whose name resolves to this machine, names its own host.
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        is_token = secrets.compare_digest(token.encode(), self.server.token.encode())
        return host in HOST_NAMES and is_token

    def _answer(self, path: str, query: dict[str, str]) -> None:
        page = self.server.page
        match path:
            case "/":
                self._send(page.render(is_served=True), content_type="text/html")
            case "/data":
                state = page.compute_state()
                if query.get("state") == state:
                    self._send("", HTTPStatus.NO_CONTENT)
                else:
                    data = page.describe(follow_every_s=FOLLOW_EVERY_S)
                    self._send_json({**data, "state": state})
            case "/rollouts" if _STEP.fullmatch(query.get("step", "")):
                groups = page.describe_rollouts(query.get("run", ""), int(query["step"]))
                self._send_json(groups or {"groups": []})
            case _:
                self._send("no such page", HTTPStatus.NOT_FOUND)

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value, allow_nan=False), content_type="application/json")

    def _send(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, *, content_type: str = "text/plain"
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal shows the address."""
