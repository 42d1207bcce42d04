"""Weights & Biases sink: all metrics of every step, offline by default.

Offline mode needs no account and no network; `wandb sync` can upload `<run directory>/wandb` later.
The configuration overrides WANDB_MODE and similar variables; WANDB_API_KEY, WANDB_BASE_URL and
WANDB_ENTITY still apply.
"""

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import wandb
from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

from streamrl.errors import ConfigError, format_error
from streamrl.files.atomic_write import wrap_disk_errors, write_atomic
from streamrl.files.printable_text import shorten_text
from streamrl.telemetry.config import WandbConfig
from streamrl.telemetry.metric_names import Histogram, MetricsRow
from streamrl.telemetry.rollout_log import RecordedGroup, make_row
from streamrl.telemetry.sinks import ALERT_EVENTS, RUN_ID_FILE, EventFields, MetricsSink

ROLLOUTS_TABLE = "rollouts"
"""Key under which a run logs its tables of rollouts."""
FINISH_TIMEOUT_S = 10.0
_GRACE_PERIOD_S = 2.0
_INIT_TIMEOUT_S = 30.0
_SERVICE_NAME = "wandb-core"
_log = logging.getLogger(__name__)
TABLE_EVERY = 10
"""Steps between two tables of rollouts."""
MAX_TABLE_ROWS, MAX_TABLE_TEXT = 64, 2000
"""Rows of a table of rollouts, and characters of a text in it: 256 KB at most."""


def _limit_text(value: Any) -> Any:
    return shorten_text(value, MAX_TABLE_TEXT) if isinstance(value, str) else value


class WandbSink(MetricsSink):
    """Sink that logs every metrics row to a wandb run, and ALERT_EVENTS as alerts.

    With `resume_id` (see `load_run_id`) the rows continue that run. Online, wandb ignores a step
    that it already has, so steps repeated after a crash keep their first values; offline, each
    start writes its own directory under the same id.
    """

    def __init__(
        self, run_dir: Path, config: WandbConfig, *, run_name: str, resume_id: str | None = None
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._run_name = run_name
        self._run_id = resume_id or secrets.token_hex(4)
        self._run: wandb.Run | None = None
        self._has_failed = False

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the wandb run and store the run's configuration in it.

        Raises ConfigError if wandb fails to start, or is online without an account.
        Raises DiskError if its files cannot be written.
        """
        mode = self._config.mode
        directory = self._run_dir / "wandb"
        with wrap_disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._init_run(config)
        except ConfigError:
            raise
        # wandb raises many errors from private modules that derive from Exception alone.
        except Exception as error:
            raise ConfigError(
                f"telemetry.wandb.mode={mode}: wandb did not start: {format_error(error)};"
                " telemetry.wandb.mode=disabled runs without it"
            ) from error
        path = self._run_dir / RUN_ID_FILE
        with wrap_disk_errors(path):
            write_atomic(path, self._run_id + "\n")

    def _init_run(self, config: Mapping[str, Any]) -> "wandb.Run":
        """Start the wandb run. Raises ConfigError if mode is online and no account is set up."""
        # Otherwise wandb imports pandas (1 s) to check that a histogram is not a data frame.
        wandb.util.pd_available = False
        # Saves a second of imports for job inputs of wandb's launcher.
        wandb.Run._detect_and_apply_job_inputs = lambda _: None  # type: ignore[assignment,method-assign,misc]
        mode = self._config.mode
        settings = wandb.Settings.model_validate(
            {
                "mode": mode,
                "console": "off",
                "silent": True,
                "disable_git": True,
                "disable_code": True,
                "save_code": False,
                "disable_job_creation": True,
                "use_dot_wandb": False,
                "init_timeout": _INIT_TIMEOUT_S,
                "finish_timeout": FINISH_TIMEOUT_S,
            }
        )
        # Set up the whole process first: at exit wandb 0.31 sends usage data over the network, even
        # for an offline run, unless the process-wide settings are offline.
        wandb.setup(settings)
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "telemetry.wandb.mode=online: no wandb account is set up here; run `wandb login`, "
                "set WANDB_API_KEY, or use telemetry.wandb.mode=offline"
            )
        return wandb.init(
            settings=settings,
            dir=self._run_dir,
            project=self._config.project,
            name=self._run_name,
            id=self._run_id,
            resume="allow",
            reinit="create_new",
            config=dict(config),
        )

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Log the metrics row under the number of the training step."""
        values = {
            name: wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(value.edges)))
            if isinstance(value, Histogram)
            else value
            for name, value in row.items()
            # A metric without a value, as the critic's in GRPO, would get an empty panel.
            if isinstance(value, Histogram) or math.isfinite(value)
        }
        self._send(lambda run: run.log(values, step=step))

    def log_rollouts(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        """Log a table of recorded rollouts under each TABLE_EVERY-th step.

        At most MAX_TABLE_ROWS with the columns of `rollouts/`, but for the turns, and texts cut to
        MAX_TABLE_TEXT. Late rollouts come under the latest step, since wandb drops rows of earlier
        steps.
        """
        if not groups or step % TABLE_EVERY:
            return
        rows = [make_row(group, i) for group in groups for i in range(len(group.rollouts))]
        rows = rows[:MAX_TABLE_ROWS]
        names = list(dict.fromkeys(name for row in rows for name in row if name != "turns"))
        data = [[_limit_text(row.get(name)) for name in names] for row in rows]
        table = wandb.Table(columns=[*names], data=data)
        self._send(lambda run: run.log({ROLLOUTS_TABLE: table}, step=max(step, run.step)))

    def _send(self, send: "Callable[[wandb.Run], None]") -> None:
        """Send something to the wandb run.

        If wandb's service dies, log a warning once and continue without wandb; metrics.jsonl holds
        every row.
        """
        if self._run is None or self._has_failed:
            return
        try:
            send(self._run)
        except OSError as error:
            _log.warning("wandb died (%s); metrics now go to metrics.jsonl only", error)
            self._has_failed = True

    def log_event(self, name: str, fields: EventFields) -> None:
        """Send an event of ALERT_EVENTS as an alert; ignore all other events."""
        text = ", ".join(f"{key}={value}" for key, value in fields.items())
        if name in ALERT_EVENTS:
            self._send(lambda run: run.alert(title=name, text=text, level="WARN", wait_duration=0))

    def close(self, summary: EventFields) -> None:
        """Write the summary and finish the wandb run, within FINISH_TIMEOUT_S plus a few seconds.

        Longer uploads are abandoned; `wandb sync` can repeat them. If wandb's service does not
        answer, kill it: otherwise the program would hang at exit.
        """
        run, self._run = self._run, None
        if run is None:
            return
        finishing = threading.Thread(target=_finish_run, args=(run, summary), daemon=True)
        finishing.start()
        timeout_s = FINISH_TIMEOUT_S + _GRACE_PERIOD_S
        finishing.join(timeout_s)
        if finishing.is_alive():
            _log.warning("wandb did not finish within %g s; ending it", timeout_s)
            services = [c for c in psutil.Process().children() if c.name() == _SERVICE_NAME]
            for service in services:
                service.kill()
            psutil.wait_procs(services, timeout=_GRACE_PERIOD_S)
            finishing.join(_GRACE_PERIOD_S)


def _finish_run(run: "wandb.Run", summary: EventFields) -> None:
    """Write the summary, and finish the run and wandb's service, so that no process remains."""
    try:
        try:
            run.summary.update(dict(summary))
            run.finish()
        finally:
            wandb.teardown()
    except (wandb.Error, OSError, HandleAbandonedError, MailboxClosedError) as error:
        _log.warning("wandb did not finish (%s); metrics.jsonl holds every row", error)
