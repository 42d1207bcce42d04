"""Published figures against what the planner says: `python -m benchmarks.published` prints JSON.

--only names sources; --markdown prints their tables as in docs/planner_published.md. ReaL's points
are searches, which take about a minute together; all others take seconds.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.published import flexrlhf, hybridflow, nemo, real, verl
from benchmarks.published.rows import Row, summary, table
from streamrl.placement.costs import Constants

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


def main(argv: Sequence[str] | None = None) -> None:
    """Print all points of the sources asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SOURCES), help="sources, separated by commas")
    parser.add_argument("--markdown", action="store_true", help="tables instead of JSON")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the tables there")
    arguments = parser.parse_args(argv)
    chosen = arguments.only.split(",")
    for name in chosen:
        if name not in SOURCES:
            parser.error(f"--only {name}: must be of {', '.join(SOURCES)}")
    found = {name: list(SOURCES[name]()) for name in chosen}
    if arguments.into:
        page = arguments.into.read_text()
        for name, rows in found.items():
            page = replaced(page, name, markdown(name, rows))
        arguments.into.write_text(page)
        return
    if arguments.markdown:
        print("\n\n".join(markdown(name, rows) for name, rows in found.items()))
        return
    every = [row for rows in found.values() for row in rows]
    told = {
        "points": [row.to_dict() for row in every],
        "constants": {name: changed(CONSTANTS[name], Constants()) for name in chosen},
        "summary": summary(every),
    }
    print(json.dumps(told, indent=1))


def markdown(name: str, rows: Sequence[Row]) -> str:
    """A source's constants, rates and table."""
    differ = listed(changed(CONSTANTS[name], Constants()))
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


def changed(own: Constants, others: Constants) -> dict[str, float]:
    """Those that differ."""
    before = asdict(others)
    return {key: value for key, value in asdict(own).items() if value != before[key]}


def listed(values: Mapping[str, float]) -> str:
    """Names and values, in a line."""
    return ", ".join(f"{key} {value:g}" for key, value in values.items())


if __name__ == "__main__":
    main()
