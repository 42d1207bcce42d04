"""The few shapes that pictures are made of. Sizes are pixels; text is monospaced."""

import xml.etree.ElementTree as ET

LABEL_PX, NAME_PX = 11, 13
"""Sizes of the fonts: of labels and all else, and of names."""
CHARACTER_EM = 0.63
"""Width of a character of a monospaced font by its size: a little more than it takes."""
INK_COLOR, PALE_COLOR = "#0f172a", "#f1f5f9"
PADDING = 16.0
Point = tuple[float, float]


def text_width(line: str, size: float) -> float:
    """Room that a line of text takes."""
    return len(line) * size * CHARACTER_EM


def create_canvas(title: str, size: Point) -> ET.Element:
    """An empty picture with its title written at the top."""
    width, height = size
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.attrib |= {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}"}
    root.attrib |= {"height": f"{height:g}", "font-family": "DejaVu Sans Mono, Menlo, monospace"}
    ET.SubElement(root, "title").text = title
    add_rect(root, (0, 0), size, fill="white")
    add_name(root, title, (PADDING, 26))
    return root


def to_svg_text(root: ET.Element) -> str:
    """The picture as text."""
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def add_rect(
    parent: ET.Element, place: Point, size: Point, *, fill: str, stroke: str = "none"
) -> ET.Element:
    """A rectangle with round corners."""
    found = ET.SubElement(parent, "rect", fill=fill, stroke=stroke, rx="4")
    (x, y), (width, height) = place, size
    found.attrib |= {"x": f"{x:g}", "y": f"{y:g}"}
    found.attrib |= {"width": f"{width:g}", "height": f"{height:g}"}
    return found


def add_text(
    parent: ET.Element, words: str, place: Point, *, fill: str = INK_COLOR, anchor: str = "start"
) -> ET.Element:
    """A line of text, its baseline at the place."""
    found = ET.SubElement(parent, "text", x=f"{place[0]:g}", y=f"{place[1]:g}", fill=fill)
    found.attrib |= {"font-size": str(LABEL_PX), "text-anchor": anchor}
    found.text = words
    return found


def add_name(parent: ET.Element, words: str, place: Point, *, anchor: str = "start") -> None:
    """A line of larger, bold text."""
    found = add_text(parent, words, place, anchor=anchor)
    found.attrib |= {"font-size": str(NAME_PX), "font-weight": "bold"}
