"""`streamrl algorithms`: the table of algorithms, as text, as markdown or as JSON."""

import argparse
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from streamrl.algorithms import ALGORITHMS, Algorithm
from streamrl.algorithms.config import load_specs
from streamrl.algorithms.table import DEFAULT_SETTINGS
from streamrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl algorithms`."""
    parser.add_argument("name", nargs="?", help="only this one")
    parser.add_argument("--path", default="", help="a Python file with rows of your own")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--markdown", action="store_true", help="print a markdown table")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows. Raises ConfigError if there is none of that name."""
    rows = {**ALGORITHMS, **(load_specs(arguments.path) if arguments.path else {})}
    if arguments.name is not None:
        if arguments.name not in rows:
            near = difflib.get_close_matches(arguments.name.lower(), rows, n=1, cutoff=0.0)
            raise ConfigError(f"{arguments.name}: no such algorithm; did you mean {near[0]}?")
        rows = {arguments.name: rows[arguments.name]}
    if arguments.json:
        print(json.dumps({name: spec_to_dict(row) for name, row in rows.items()}))
    elif arguments.markdown:
        print(format_markdown(rows.values()), end="")
    else:
        print("\n\n".join(describe_algorithm(row) for row in rows.values()))
    return 0


def spec_to_dict(row: Algorithm) -> dict[str, Any]:
    """What there is to know of a row, in plain values."""
    defaults = {**DEFAULT_SETTINGS, **row.defaults}
    whole = defaults["whiten_advantages"] or defaults["advantage_scale"] == "batch"
    return {
        "paper": row.paper,
        "columns": list(row.columns),
        "advantages": row.advantages.__name__,
        "token_loss": row.token_loss.__name__,
        "derived": {name: function.__name__ for name, function in row.derived.items()},
        "dials": {name: function.__name__ for name, function in row.dials.items()},
        "scope": "step" if whole else row.scope,
        "min_group_size": row.min_group_size,
        "defaults": defaults,
        "params": dict(row.params),
    }


def describe_algorithm(row: Algorithm) -> str:
    """A row as a paragraph."""
    known = spec_to_dict(row)
    lines = {
        "needs": f"{', '.join(known['columns'])}; groups of {row.min_group_size} or more",
        "functions": _format_functions(known),
        "scope": _SCOPE_TEXTS[known["scope"]],
        "defaults": _format_settings(known["defaults"]),
        "params": _format_settings(known["params"]),
        "dials": _format_settings(known["dials"]),
    }
    shown = [f"  {name:<10} {text}" for name, text in lines.items() if text]
    return "\n".join([f"{row.name}: {row.paper}", *shown])


_SCOPE_TEXTS = {
    "group": "group: micro-batches are trained as they come",
    "step": "step: training waits for all groups of a step",
}


def format_markdown(rows: Iterable[Algorithm]) -> str:
    """The rows as a markdown table; of the defaults only those that are the row's own."""
    lines = [
        "| name | columns | advantages, loss | scope | own defaults | paper |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        known = spec_to_dict(row)
        own = {k: v for k, v in row.defaults.items() if v != DEFAULT_SETTINGS.get(k)} | known[
            "params"
        ]
        cells = [
            f"`{row.name}`",
            ", ".join(row.columns),
            _format_functions(known),
            known["scope"],
            _format_settings(own),
            row.paper,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _format_functions(known: Mapping[str, Any]) -> str:
    names = [known["advantages"], known["token_loss"]]
    names += [*known["derived"].values(), *known["dials"].values()]
    return ", ".join(dict.fromkeys(names))


def _format_settings(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_YAML_WORDS.get(str(value), value)}" for key, value in values.items())


_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}
