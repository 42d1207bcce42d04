"""Published figures against what the planner says: `python -m benchmarks.published` prints JSON.

--only names sources; --markdown prints the tables of docs/planner_published.md instead.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence

from benchmarks.published import hybridflow
from benchmarks.published.rows import Row, summary, table

SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "hybridflow": hybridflow.rows,
}
