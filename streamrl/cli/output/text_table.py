"""Columns of text that line up, for people."""

from collections.abc import Sequence

MAX_DIGITS = 16
"""Of a percentage; a number has no more."""


def format_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of rows, the first a heading; the first `left` columns begin, others end, together."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_count(number: float) -> str:
    """A large number, short: 950, 12.3k, 4.56M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_seconds(number: float) -> str:
    """Three digits of seconds."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"  # noqa: PLR2004


def format_percent(part: float) -> str:
    """A part of 1 as whole percents."""
    return f"{part:.0%}"


def format_inner_percent(part: float) -> str:
    """A part above 0 and below 1, never told as 0% or 100%: with more digits if need be."""
    texts = (f"{part:.{digits}%}" for digits in range(MAX_DIGITS))
    return next((text for text in texts if float(text[:-1]) not in (0, 100)), f"{part:.3g}")
