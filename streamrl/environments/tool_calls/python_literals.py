"""Python calls and literals as a policy writes them, parsed without evaluating anything.

[search(query="rl", limit=3), stop()]
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from streamrl.environments.tool_calls.strict_json import parse_finite_float
from streamrl.files.bounded_read import MAX_DEPTH

CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?(?![\w.])")
_STRING = re.compile(
    r'"""(?P<long_double>(?:\\.|[^\\])*?)"""'
    r"|'''(?P<long_single>(?:\\.|[^\\])*?)'''"
    r'|"(?P<double>(?:\\.|[^"\\\n])*+)"'
    r"|'(?P<single>(?:\\.|[^'\\\n])*+)'",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})"
    r"|(?P<octal>[0-7]{1,3})|(?P<char>[abfnrtv\\'\"\n]))"
)
_ESCAPED_CHARS = dict(zip("abfnrtv\\'\"\n", ["\a", "\b", "\f", *"\n\r\t\v\\'\"", ""], strict=True))
T = TypeVar("T")
NamedCall = tuple[str, dict[str, Any]]
"""Name and keyword arguments of a call."""


def parse_calls_at(text: str, start: int) -> tuple[list[NamedCall], int]:
    """Parse the list of calls that begins at `start`; return it and the position of its end.

    Raises ValueError for anything but calls with keyword arguments that are literals. Positions in
    the message count from `start`.
    """
    reader = _LiteralReader(text, start)
    calls = reader.read_items("[", "]", reader.read_call)
    return calls, reader.position


def parse_literal(text: str) -> Any:
    """Parse a Python or JSON literal. Raises ValueError unless the whole text is one."""
    reader = _LiteralReader(text, 0)
    value = reader.read_value()
    reader.skip_space()
    if reader.position < len(text):
        raise reader.make_error("expected the end")
    return value


class _LiteralReader:
    """Recursive-descent parser with one position in the text."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.start = self.position = start
        self._depth = 0

    def make_error(self, problem: str) -> ValueError:
        return ValueError(f"{problem} at character {self.position - self.start}")

    def skip_space(self) -> None:
        found = _SPACE.match(self.text, self.position)
        assert found is not None
        self.position = found.end()

    def _accept(self, symbol: str) -> bool:
        self.skip_space()
        is_next = self.text.startswith(symbol, self.position)
        self.position += len(symbol) if is_next else 0
        return is_next

    def _expect(self, symbol: str) -> None:
        if not self._accept(symbol):
            raise self.make_error(f"expected {symbol}")

    def _read_name(self) -> str:
        self.skip_space()
        if not (found := _NAME.match(self.text, self.position)):
            raise self.make_error("expected a name")
        self.position = found.end()
        return found[0]

    def read_items(self, opening: str, closing: str, read_item: Callable[[], T]) -> list[T]:
        """Read items between two brackets, separated by commas; a last comma is allowed."""
        self._expect(opening)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.make_error("nested too deeply")
        items: list[T] = []
        while not self._accept(closing):
            items.append(read_item())
            if not self._accept(","):
                self._expect(closing)
                break
        self._depth -= 1
        return items

    def read_call(self) -> NamedCall:
        name = self._read_name()
        return name, self._make_dict(self.read_items("(", ")", self._read_argument))

    def _read_argument(self) -> tuple[str, Any]:
        name = self._read_name()
        self._expect("=")
        return name, self.read_value()

    def _read_pair(self) -> tuple[str, Any]:
        key = self.read_value()
        if not isinstance(key, str):
            raise self.make_error("a key must be a string, before the position")
        self._expect(":")
        return key, self.read_value()

    def _make_dict(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            raise self.make_error("a name occurs twice before the position")
        return unique

    def read_value(self) -> Any:
        self.skip_space()
        symbol = self.text[self.position : self.position + 1]
        if symbol == "[":
            return self.read_items("[", "]", self.read_value)
        if symbol == "{":
            return self._make_dict(self.read_items("{", "}", self._read_pair))
        return self._read_scalar()

    def _read_scalar(self) -> Any:
        if found := _STRING.match(self.text, self.position):
            self.position = found.end()
            assert found.lastgroup is not None
            return _ESCAPE.sub(_unescape, found[found.lastgroup])
        if found := _NUMBER.match(self.text, self.position):
            value = parse_finite_float(found[0]) if found[1] or found[2] else int(found[0])
            self.position = found.end()
            return value
        found = _NAME.match(self.text, self.position)
        if found and found[0] in CONSTANTS:
            self.position = found.end()
            return CONSTANTS[found[0]]
        raise self.make_error("expected a literal")


def _unescape(found: "re.Match[str]") -> str:
    if found["char"] is not None:
        return _ESCAPED_CHARS[found["char"]]
    digits = found["x"] or found["u"] or found["U"]
    return chr(int(digits, 16) if digits else int(found["octal"], 8))
