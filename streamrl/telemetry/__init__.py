"""Telemetry: the metrics contract, spans, and the sinks that receive both."""
