"""Benchmarks: `python -m benchmarks.<name>` prints one JSON object."""

import os

# Ray prints the death of an actor, when it is imported without this; a benchmark has a line for it.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
