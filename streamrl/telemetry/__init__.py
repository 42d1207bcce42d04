"""Telemetry: the metrics contract, spans, and the sinks that receive both."""

from streamrl.telemetry.config import TelemetryConfig, WandbConfig
from streamrl.telemetry.metric_names import Histogram, MetricsRow, validate_row
from streamrl.telemetry.progress import RunInfo
from streamrl.telemetry.sinks import MetricsSink
from streamrl.telemetry.spans import Span, SpanRecorder

__all__ = [
    "Histogram",
    "MetricsRow",
    "MetricsSink",
    "RunInfo",
    "Span",
    "SpanRecorder",
    "TelemetryConfig",
    "WandbConfig",
    "validate_row",
]
