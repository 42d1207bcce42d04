"""Bound of the log-ratio between two policies."""

LOG_RATIO_LIMIT = 20.0
"""Bound that keeps exp() and its squares finite in float32; larger ratios carry no information."""
