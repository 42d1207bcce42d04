"""Sphinx extension: render docstrings, which are a small dialect of Markdown.

- A span in backticks is code, and a link if it is the name of a documented class.
- A line or sentence `name: meaning` describes a parameter, if there is one with this name.
- An indented block is code.
"""

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SHORTER = {
    "~numpy.ndarray[tuple[~typing.Any, ...], ~numpy.dtype[~typing.Any]]": "Array",
    "~collections.abc.Mapping[str, Array]": "Columns",
    "<factory>": "...",
}
"""Replacements in signatures, in this order: names that `streamrl.messages` gives to types, and a
default that Sphinx could not parse.
"""


def setup(app: "Sphinx") -> dict[str, Any]:
    """Register the extension."""
    app.connect("autodoc-process-docstring", rewrite_docstring)
    app.connect("autodoc-process-signature", rewrite_signature)
    return {"parallel_read_safe": True}


def rewrite_signature(*event: Any) -> tuple[str, str] | None:
    """Return shorter arguments and return type of a signature; None for an object without one."""
    signature, result = event[-2:]
    if signature is None:
        return None
    result = result or ""
    for long, short in SHORTER.items():
        signature, result = signature.replace(long, short), result.replace(long, short)
    return signature, result


def rewrite_docstring(*event: Any) -> None:
    """Replace the lines of a docstring by reStructuredText, as autodoc wants it."""
    _app, _what, _name, obj, _options, lines = event
    blocks = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    parameters = list_parameters(obj)
    converted = "\n\n".join(convert_block(block, parameters) for block in blocks)
    lines[:] = [*converted.splitlines(), ""]


def list_parameters(obj: Any) -> list[str]:
    """Return the names of the parameters of a function or constructor; [] for another object."""
    try:
        return list(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return []


def convert_block(block: str, parameters: Sequence[str]) -> str:
    """Convert a paragraph, a list or a block of code; parameters become a field list."""
    if block.startswith("    "):
        return f"::\n\n{block}"
    before, *fields = split_parameters(block, parameters)
    if not fields:
        return convert_spans(separate_list(block))
    fields[-1], *after = re.split(r"(?<=\.)\s+(?=Raises |Returns )", fields[-1], maxsplit=1)
    lines = [convert_spans(before.strip()), ""] if before.strip() else []
    for names, meaning in zip(fields[::2], fields[1::2], strict=True):
        text = convert_spans(" ".join(meaning.split()))
        lines += [f":param {name}: {text}" for name in re.findall(r"\w+", names)]
    return "\n".join([*lines, "", *map(convert_spans, after)])


def split_parameters(block: str, parameters: Sequence[str]) -> list[str]:
    """Return the text before the first parameter, then names and meaning of each in turn."""
    name = f"`?(?:{'|'.join(parameters) or '(?!)'})`?"
    start = rf"(?:^(?:- )?|(?<=[.;] ))({name}(?:, {name})*): "
    text = "\n".join(line.strip() for line in block.splitlines())
    return re.split(start, text, flags=re.MULTILINE)


def separate_list(block: str) -> str:
    """Put the empty line before a list that reStructuredText needs."""
    if re.search(r"^- ", block, flags=re.MULTILINE):
        return re.sub(r"^([^\s-].*)\n(?=- )", r"\1\n\n", block, flags=re.MULTILINE)
    return "\n".join(line.strip() for line in block.splitlines())


def convert_spans(text: str) -> str:
    """Convert spans of code, and escape what reStructuredText takes for markup elsewhere."""
    pieces = re.split(r"`+([^`]+)`+", text)
    pieces[::2] = [re.sub(r"[*|\\]|(?<=\w)_\b", r"\\\g<0>", piece) for piece in pieces[::2]]
    pieces[1::2] = [format_code(code) for code in pieces[1::2]]
    return "".join(pieces)


def format_code(code: str) -> str:
    """Return a span of code; the name of a class as a link, if autodoc knows the class."""
    is_class = re.fullmatch(r"[A-Z]\w*[a-z]\w*", code)
    return f":py:obj:`.{code}`\\ " if is_class else f"``{code}``\\ "
