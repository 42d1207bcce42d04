"""Text tables and short number formats."""

from collections.abc import Sequence

MAX_DIGITS = 16  # significant decimal digits of a float


def format_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Format rows of cells as lines of text with aligned columns.

    left: number of leading columns that are aligned to the left; all others go to the right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_count(number: float) -> str:
    """Format a large number with a unit: 950, 12.3k, 4.56M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_seconds(number: float) -> str:
    """Format seconds without unit: three significant digits, or an integer from 1000 on."""
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"  # noqa: PLR2004


def format_percent(fraction: float) -> str:
    return f"{fraction:.0%}"


def format_inner_percent(fraction: float) -> str:
    """Format a fraction in (0, 1) as percent, with enough digits to differ from 0% and 100%."""
    texts = (f"{fraction:.{digits}%}" for digits in range(MAX_DIGITS))
    return next((text for text in texts if float(text[:-1]) not in (0, 100)), f"{fraction:.3g}")
