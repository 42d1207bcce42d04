"""TensorBoard sink: scalars, the staleness histogram, events and the config as text.

    tensorboard --logdir runs           # runs/<name>/tensorboard of every run

Package `tensorboard`, the extra `tensorboard`. It writes files only.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.files.atomic_write import wrap_disk_errors
from streamrl.files.optional_package import import_optional
from streamrl.telemetry.metric_names import Histogram, MetricsRow
from streamrl.telemetry.sinks import EventFields

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
FLUSH_EVERY_S = 30


class TensorboardSink:
    """Sink that writes the metrics of every step to `tensorboard/` of the run directory.

    is_resumed: the run goes on from a checkpoint; TensorBoard hides the steps of earlier processes
    from the first that is logged anew.
    """

    def __init__(self, run_dir: Path, *, is_resumed: bool = False) -> None:
        self._folder = run_dir / FOLDER
        self._should_purge = is_resumed
        self._writer: SummaryWriter | None = None
        self._step = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the event file. Raises ConfigError without the package, and DiskError."""
        import_optional("tensorboard", setting="telemetry.sinks=tensorboard", extra="tensorboard")
        self._writer = self._open_writer()
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```", self._step)

    def _open_writer(self, purge_step: int | None = None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        with wrap_disk_errors(self._folder):
            return SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=FLUSH_EVERY_S)

    def log_step(self, step: int, row: MetricsRow) -> None:
        """Write the values of a step; metrics without a value are left out."""
        assert self._writer is not None, "the sink is not started"
        if self._should_purge:
            self._writer.close()  # type: ignore[no-untyped-call]
            self._writer, self._should_purge = self._open_writer(step), False
        self._step = step
        with wrap_disk_errors(self._folder):
            for name, value in row.items():
                if isinstance(value, Histogram):
                    self._write_histogram(name, value, step)
                elif math.isfinite(value):
                    self._writer.add_scalar(name, float(value), step)

    def _write_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        assert self._writer is not None
        counts, lows = histogram.counts, histogram.edges[:-1]
        values = list(zip(lows, counts, strict=True))
        self._writer.add_histogram_raw(  # type: ignore[no-untyped-call]
            name,
            min=lows[0],
            max=max((low for low, count in values if count), default=lows[0]),
            num=sum(counts),
            sum=sum(low * count for low, count in values),
            sum_squares=sum(low * low * count for low, count in values),
            bucket_limits=list(histogram.edges[1:]),
            bucket_counts=list(counts),
            global_step=step,
        )

    def log_event(self, name: str, fields: EventFields) -> None:
        assert self._writer is not None, "the sink is not started"
        text = "  \n".join(f"{key}: {value}" for key, value in fields.items())
        with wrap_disk_errors(self._folder):
            self._writer.add_text(f"events/{name}", text or name, self._step)

    def close(self, summary: EventFields) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with wrap_disk_errors(self._folder):
                writer.close()  # type: ignore[no-untyped-call]
