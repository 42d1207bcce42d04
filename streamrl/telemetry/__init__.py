"""What a run reports: the metrics contract, spans, and the sinks they go to."""

from streamrl.telemetry.console import ConsoleLogHandler
from streamrl.telemetry.contract import Histogram, Row, check_row
from streamrl.telemetry.fanout import Fanout, TelemetryConfig, make_sinks
from streamrl.telemetry.progress import RunFacts
from streamrl.telemetry.sinks import Sink
from streamrl.telemetry.spans import Span, SpanRecorder
from streamrl.telemetry.wandb_sink import WandbConfig

__all__ = [
    "ConsoleLogHandler",
    "Fanout",
    "Histogram",
    "Row",
    "RunFacts",
    "Sink",
    "Span",
    "SpanRecorder",
    "TelemetryConfig",
    "WandbConfig",
    "check_row",
    "make_sinks",
]
