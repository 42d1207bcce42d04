"""Compare published figures with the planner's predictions: `python -m benchmarks.published`.

Prints JSON, or with --markdown the tables of docs/planner_published.md. --only selects sources.
ReaL's points are searches that take about a minute together; the others take seconds.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkParser, replace_table, run_benchmark
from benchmarks.published import flexrlhf, hybridflow, nemo, real, verl
from benchmarks.published.rows import Row, format_table, summarize_rows
from streamrl.planner.costs.constants import CostConstants

SOURCES: dict[str, Callable[[], Iterator[Row]]] = {
    "hybridflow": hybridflow.iter_rows,
    "real": real.iter_rows,
    "flexrlhf": flexrlhf.iter_rows,
    "verl": verl.iter_rows,
    "nemo": nemo.iter_rows,
}
CONSTANTS = {
    "hybridflow": hybridflow.CONSTANTS,
    "real": real.CONSTANTS,
    "flexrlhf": flexrlhf.CONSTANTS,
    "verl": verl.build_engine_constants(megatron=False),
    "nemo": nemo.CONSTANTS,
}
OTHER_ENGINES = {"verl": {"Megatron": verl.build_engine_constants(megatron=True)}}
"""Constants of a source's other engines."""


def make_parser() -> BenchmarkParser:
    """Declare sources and output formats."""
    parser = BenchmarkParser("published", __doc__)
    parser.add_argument("--only", nargs="+", default=list(SOURCES), choices=SOURCES, help="sources")
    parser.add_argument("--markdown", action="store_true", help="tables instead of JSON")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the tables there")
    parser.set_quick(only=["hybridflow", "flexrlhf"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the points of the selected sources."""
    parser = make_parser()
    arguments = parser.parse(argv)
    if not arguments.into and not arguments.markdown:
        run_benchmark(parser, measure, argv)
        return
    if arguments.into and not arguments.into.is_file():
        parser.error(f"--into {arguments.into}: no such page")
    tables = {name: format_markdown(name, list(SOURCES[name]())) for name in arguments.only}
    if not arguments.into:
        print("\n\n".join(tables.values()))
        return
    page = arguments.into.read_text()
    for name, text in tables.items():
        page = replace_table(page, name, text)
    arguments.into.write_text(page)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predict every point of the selected sources."""
    rows = [row for name in arguments.only for row in SOURCES[name]()]
    return {
        "points": [row.to_dict() for row in rows],
        "constants": {
            name: diff_constants(CONSTANTS[name], CostConstants()) for name in arguments.only
        },
        "summary": summarize_rows(rows),
    }


def format_markdown(name: str, rows: Sequence[Row]) -> str:
    """Format a source's constants, rates and table."""
    differences = format_values(diff_constants(CONSTANTS[name], CostConstants()))
    for engine, constants in OTHER_ENGINES.get(name, {}).items():
        differences += (
            f"; with {engine} {format_values(diff_constants(constants, CONSTANTS[name]))}"
        )
    rates = summarize_rows(rows)[name]
    rates_line = (
        f"Decisions: {rates['decisions_hit']} of {rates['decisions']}. Figures within 15 %:"
        f" {rates['figures_within_15_percent']} of {rates['figures']}. Fitted: {rates['fitted']}."
    )
    head = f"Constants that are not the defaults: {differences}."
    return f"{head}\n\n{rates_line}\n\n{format_table(rows)}"


def diff_constants(constants: CostConstants, defaults: CostConstants) -> dict[str, float]:
    """Select the constants that differ from the defaults."""
    before = asdict(defaults)
    return {key: value for key, value in asdict(constants).items() if value != before[key]}


def format_values(values: Mapping[str, float]) -> str:
    """Format names and values in one line."""
    return ", ".join(f"{key} {value:g}" for key, value in values.items())


if __name__ == "__main__":
    main()
