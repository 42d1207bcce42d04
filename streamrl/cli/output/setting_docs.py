"""Documentation of settings: meanings and defaults from dataclasses, cells of markdown tables."""

import dataclasses
import inspect
import math
import re
from typing import Any

import yaml
from omegaconf import MISSING

REQUIRED = "required"


def read_meanings(settings: type) -> dict[str, str]:
    """Return the meaning of each field of a settings dataclass, by field name.

    Meanings stand in `name: ...` lines of docstrings and in `#:` comments. The text of a class wins
    over the text of its base classes.
    """
    meanings: dict[str, str] = {}
    for owner in settings.__mro__:
        if dataclasses.is_dataclass(owner):
            for name, meaning in (_parse_docstring_keys(owner) | _parse_comments(owner)).items():
                meanings.setdefault(name, meaning)
    return meanings


def _parse_docstring_keys(settings: type) -> dict[str, str]:
    """Return meanings by key from the `key: meaning` lines; indented lines continue one."""
    text = inspect.cleandoc(vars(settings).get("__doc__") or "")
    matches = re.findall(r"^(\w+): (.+(?:\n[ ]+\S.*)*)", text, flags=re.MULTILINE)
    return {key: " ".join(meaning.split()).removesuffix(".") for key, meaning in matches}


def _parse_comments(settings: type) -> dict[str, str]:
    """Return the `#:` comment above each field of a settings dataclass, by field name."""
    source = inspect.cleandoc(inspect.getsource(settings))
    comments = re.findall(r"((?:^ *#: .*\n)+) *(\w+):", source, flags=re.MULTILINE)
    return {
        name: " ".join(text.replace("#: ", "").split()).removesuffix(".") for text, name in comments
    }


def format_default(field: "dataclasses.Field[Any]") -> str:
    """Return the default of a dataclass field as YAML, or REQUIRED if the field has none."""
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    if value in (MISSING, dataclasses.MISSING):
        return REQUIRED
    return format_yaml(value)


def format_yaml(value: Any) -> str:
    # PyYAML ends a bare scalar with a "..." line.
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).split("\n")[0]


def format_code(text: str) -> str:
    """Quote text as markdown code in a table cell.

    The fence is one backtick longer than the longest run of backticks in the text.
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return fence + space + text.replace("|", "\\|") + space + fence


def escape_cell(text: str) -> str:
    """Escape characters that would end a cell of a markdown table or begin an HTML tag."""
    return text.replace("|", "\\|").replace("<", "\\<")
