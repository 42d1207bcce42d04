"""Text in messages and for the terminal: quantities, cuts; words of models, tools and rows."""

_CONTROL_PICTURES = 0x2400
"""Code point of the picture of control character 0."""
_DIRECTION_CONTROLS = (*range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the order in which others are shown."""
_UNPRINTABLE = {
    code: chr(_CONTROL_PICTURES + code) for code in range(0x20) if chr(code) not in "\n\t"
} | dict.fromkeys(
    (0x7F, *range(0x80, 0xA0), *range(0xD800, 0xE000), *_DIRECTION_CONTROLS), "\ufffd"
)


def format_quantity(number: int, noun: str) -> str:
    """Format a number of things: 1 row, 2 rows."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten_text(text: str, most: int = 120) -> str:
    """Return a text of at most `most` characters, of a longer one both ends."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def make_printable(text: str) -> str:
    """Replace what a terminal would obey, such as escape sequences, or cannot encode."""
    return text.translate(_UNPRINTABLE)
