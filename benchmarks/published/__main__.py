"""Published figures against what the planner says: `python -m benchmarks.published` prints JSON.

--only names sources; --markdown prints their tables as in docs/planner_published.md. ReaL's points
are searches, which take about a minute together; all others take seconds.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkParser, run_benchmark
from benchmarks.published import flexrlhf, hybridflow, nemo, real, verl
from benchmarks.published.rows import Row, summary, table
from streamrl.placement.costs.constants import CostConstants

SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "hybridflow": hybridflow.rows,
    "real": real.rows,
    "flexrlhf": flexrlhf.rows,
    "verl": verl.rows,
    "nemo": nemo.rows,
}
CONSTANTS = {
    "hybridflow": hybridflow.CONSTANTS,
    "real": real.CONSTANTS,
    "flexrlhf": flexrlhf.CONSTANTS,
    "verl": verl.of_engine(megatron=False),
    "nemo": nemo.CONSTANTS,
}
OTHERS = {"verl": {"Megatron": verl.of_engine(megatron=True)}}
"""Of a source's other engines."""


def make_parser() -> BenchmarkParser:
    """Declare the sources, and how their points are printed."""
    parser = BenchmarkParser("published", __doc__)
    parser.add_argument("--only", nargs="+", default=list(SOURCES), choices=SOURCES, help="sources")
    parser.add_argument("--markdown", action="store_true", help="tables instead of JSON")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the tables there")
    parser.set_quick(only=["hybridflow", "flexrlhf"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print all points of the sources that are named."""
    parser = make_parser()
    arguments = parser.parse(argv)
    if not arguments.into and not arguments.markdown:
        run_benchmark(parser, measure, argv)
        return
    if arguments.into and not arguments.into.is_file():
        parser.error(f"--into {arguments.into}: no such page")
    tables = {name: markdown(name, list(SOURCES[name]())) for name in arguments.only}
    if not arguments.into:
        print("\n\n".join(tables.values()))
        return
    page = arguments.into.read_text()
    for name, text in tables.items():
        page = replaced(page, name, text)
    arguments.into.write_text(page)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predict every point of the sources that are named."""
    every = [row for name in arguments.only for row in SOURCES[name]()]
    return {
        "points": [row.to_dict() for row in every],
        "constants": {name: changed(CONSTANTS[name], CostConstants()) for name in arguments.only},
        "summary": summary(every),
    }


def markdown(name: str, rows: Sequence[Row]) -> str:
    """A source's constants, rates and table."""
    differ = listed(changed(CONSTANTS[name], CostConstants()))
    for engine, own in OTHERS.get(name, {}).items():
        differ += f"; with {engine} {listed(changed(own, CONSTANTS[name]))}"
    rates = summary(rows)[name]
    told = (
        f"Decisions: {rates['decisions_hit']} of {rates['decisions']}. Figures within 15 %:"
        f" {rates['figures_within_15_percent']} of {rates['figures']}. Fitted: {rates['fitted']}."
    )
    return f"Constants that are not the defaults: {differ}.\n\n{told}\n\n{table(rows)}"


def replaced(page: str, name: str, text: str) -> str:
    """A page with this between the comments that name a source."""
    before, rest = page.split(f"<!-- {name} -->\n", 1)
    after = rest.split(f"<!-- end of {name} -->", 1)[1]
    return f"{before}<!-- {name} -->\n{text}\n<!-- end of {name} -->{after}"


def changed(own: CostConstants, others: CostConstants) -> dict[str, float]:
    """Those that differ."""
    before = asdict(others)
    return {key: value for key, value in asdict(own).items() if value != before[key]}


def listed(values: Mapping[str, float]) -> str:
    """Names and values, in a line."""
    return ", ".join(f"{key} {value:g}" for key, value in values.items())


if __name__ == "__main__":
    main()
