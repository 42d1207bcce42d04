"""`streamrl algorithms`: print the algorithm table as text, markdown or JSON."""

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from streamrl.algorithms import ALGORITHMS, Algorithm
from streamrl.algorithms.config import load_specs
from streamrl.algorithms.table import DEFAULT_SETTINGS
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print only this algorithm")
    parser.add_argument(
        "--path", default="", metavar="FILE", help="Python file with algorithm specs of your own"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--markdown", action="store_true", help="print a markdown table")


def run(arguments: argparse.Namespace) -> int:
    """Print the spec of the named algorithm, or all specs.

    Raises ConfigError for an unknown name.
    """
    specs = {**ALGORITHMS, **(load_specs(arguments.path) if arguments.path else {})}
    if arguments.name is not None:
        if arguments.name not in specs:
            hint = suggest_nearest(arguments.name.lower(), specs, "algorithm")
            raise ConfigError(f"{arguments.name}: no such algorithm; {hint}")
        specs = {arguments.name: specs[arguments.name]}
    if arguments.json:
        print(json.dumps({name: spec_to_dict(spec) for name, spec in specs.items()}))
    elif arguments.markdown:
        print(format_markdown(specs.values()), end="")
    else:
        print("\n\n".join(describe_algorithm(spec) for spec in specs.values()))
    return 0


def spec_to_dict(spec: Algorithm) -> dict[str, Any]:
    defaults = {**DEFAULT_SETTINGS, **spec.defaults}
    needs_step = defaults["whiten_advantages"] or defaults["advantage_scale"] == "batch"
    return {
        "paper": spec.paper,
        "columns": list(spec.columns),
        "advantages": spec.advantages.__name__,
        "token_loss": spec.token_loss.__name__,
        "derived": {name: function.__name__ for name, function in spec.derived.items()},
        "dials": {name: function.__name__ for name, function in spec.dials.items()},
        "scope": "step" if needs_step else spec.scope,
        "min_group_size": spec.min_group_size,
        "defaults": defaults,
        "params": dict(spec.params),
    }


def describe_algorithm(spec: Algorithm) -> str:
    facts = spec_to_dict(spec)
    lines = {
        "needs": f"{', '.join(facts['columns'])}; groups of {spec.min_group_size} or more",
        "functions": _format_functions(facts),
        "scope": _SCOPE_TEXTS[facts["scope"]],
        "defaults": _format_settings(facts["defaults"]),
        "params": _format_settings(facts["params"]),
        "dials": _format_settings(facts["dials"]),
    }
    shown = [f"  {name:<10} {text}" for name, text in lines.items() if text]
    return "\n".join([f"{spec.name}: {spec.paper}", *shown])


_SCOPE_TEXTS = {
    "group": "group: micro-batches train as their groups arrive",
    "step": "step: training waits for all groups of a step",
}


def format_markdown(specs: Iterable[Algorithm]) -> str:
    """Format algorithm specs as a markdown table.

    The column "own defaults" shows only settings that deviate from DEFAULT_SETTINGS.
    """
    lines = [
        "| name | columns | advantages, loss | scope | own defaults | paper |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for spec in specs:
        facts = spec_to_dict(spec)
        changed = {k: v for k, v in spec.defaults.items() if v != DEFAULT_SETTINGS.get(k)}
        cells = [
            f"`{spec.name}`",
            ", ".join(spec.columns),
            _format_functions(facts),
            facts["scope"],
            _format_settings(changed | facts["params"]),
            spec.paper,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _format_functions(facts: Mapping[str, Any]) -> str:
    """Join the names of functions in the result of `spec_to_dict` without repetition."""
    names = [facts["advantages"], facts["token_loss"]]
    names += [*facts["derived"].values(), *facts["dials"].values()]
    return ", ".join(dict.fromkeys(names))


def _format_settings(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_YAML_WORDS.get(str(value), value)}" for key, value in values.items())


_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}
