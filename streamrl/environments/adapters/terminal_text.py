"""Text for a terminal as text for a model: colours become marks, control sequences go."""

import re

COLOURED = re.compile(r"\x1b\[([0-9;]*[1-9][0-9;]*)m(.*?)\x1b\[0*m", re.DOTALL)
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
COLOUR_NAMES = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def mark_colours(text: str) -> str:
    """Put coloured parts of a text in square brackets, and remove control sequences.

    Colours may be all that shows a state, such as the place of a player on a map. If the text has
    several colours, the brackets name them: [red:S].
    """
    colours = {_name_colour(codes) for codes, _ in COLOURED.findall(text)}

    def mark(match: re.Match[str]) -> str:
        name = f"{_name_colour(match[1])}:" if len(colours) > 1 else ""
        return f"[{name}{match[2]}]"

    return CONTROL_SEQUENCE.sub("", COLOURED.sub(mark, text))


def _name_colour(codes: str) -> str:
    """Return the name of the colour that an SGR sequence sets; "bold" if it sets none.

    codes: its parameters, such as 41;1: 30 to 37 and 90 to 97 set the colour of the characters, 40
    to 47 and 100 to 107 that of the background.
    """
    for code in (int(code) for code in codes.split(";") if code):
        if code // 10 in (3, 4, 9, 10) and code % 10 < len(COLOUR_NAMES):
            return COLOUR_NAMES[code % 10]
    return "bold"
