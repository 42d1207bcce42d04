"""Trackio sink: metrics and alerts in a local database, with wandb's calls.

    trackio show --project streamrl

Package `trackio`, the extra `trackio`. Nothing leaves the machine: TRACKIO_SPACE_ID and similar
variables, which would upload the run, are ignored.
"""

import contextlib
import io
import math
import os
from collections.abc import Mapping
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.optional_package import import_optional
from streamrl.telemetry.metric_names import Histogram, MetricsRow
from streamrl.telemetry.sinks import ALERT_EVENTS, EventFields

UPLOAD_VARIABLES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


class TrackioSink:
    """Sink that logs every metrics row to a Trackio run, and ALERT_EVENTS as alerts.

    A resumed run continues the run of the same name.
    """

    def __init__(self, project: str, *, run_name: str, is_resumed: bool) -> None:
        self._project = project
        self._run_name = run_name
        self._is_resumed = is_resumed
        self._trackio: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the run. Raises ConfigError without the package, or if Trackio does not start."""
        setting = "telemetry.sinks=trackio"
        trackio = import_optional("trackio", setting=setting, extra="trackio")
        for name in UPLOAD_VARIABLES:
            os.environ.pop(name, None)
        try:
            with _silence_stdout():
                trackio.init(
                    project=self._project,
                    name=self._run_name,
                    config=dict(config),
                    resume="allow" if self._is_resumed else "never",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{setting}: Trackio did not start: {error}") from error
        self._trackio = trackio

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Log the values of a step; metrics without a value are left out."""
        values = {
            name: self._trackio.Histogram(np_histogram=(value.counts, value.edges))
            if isinstance(value, Histogram)
            else float(value)
            for name, value in row.items()
            if isinstance(value, Histogram) or math.isfinite(value)
        }
        self._trackio.log(values, step=step)

    def log_event(self, name: str, fields: EventFields) -> None:
        if name in ALERT_EVENTS and self._trackio is not None:
            text = ", ".join(f"{key}={value}" for key, value in fields.items())
            with _silence_stdout():
                self._trackio.alert(title=name, text=text)

    def close(self, summary: EventFields) -> None:
        trackio, self._trackio = self._trackio, None
        if trackio is not None:
            with _silence_stdout():
                trackio.finish()


def _silence_stdout() -> contextlib.AbstractContextManager[object]:
    """Keep Trackio's messages from the terminal, where the run's console writes."""
    return contextlib.redirect_stdout(io.StringIO())
