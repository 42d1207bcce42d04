"""Benchmarks: `python -m benchmarks.<name>` prints one JSON object."""

import os

# Must be set before Ray is imported: otherwise Ray prints every actor crash, and benchmarks report
# these in a line of their own.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
