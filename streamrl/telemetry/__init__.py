"""What a run reports: the metrics contract, spans, and the sinks they go to."""

from streamrl.telemetry.config import TelemetryConfig, WandbConfig
from streamrl.telemetry.metric_names import Histogram, Row, check_row
from streamrl.telemetry.progress import RunFacts
from streamrl.telemetry.sinks import Sink
from streamrl.telemetry.spans import Span, SpanRecorder

__all__ = [
    "Histogram",
    "Row",
    "RunFacts",
    "Sink",
    "Span",
    "SpanRecorder",
    "TelemetryConfig",
    "WandbConfig",
    "check_row",
]
