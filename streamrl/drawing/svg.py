"""SVG primitives. Sizes in pixels; text is monospaced."""

import xml.etree.ElementTree as ET

LABEL_PX, NAME_PX = 11, 13
"""Font sizes of labels and of names."""
CHARACTER_EM = 0.63
"""Width of a monospaced character relative to the font size, rounded up."""
INK_COLOR, PALE_COLOR = "#0f172a", "#f1f5f9"
PADDING = 16.0
Point = tuple[float, float]


def text_width(line: str, size: float) -> float:
    return len(line) * size * CHARACTER_EM


def create_canvas(title: str, size: Point) -> ET.Element:
    """Return the root element of an SVG with white background, with the title as first line."""
    width, height = size
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.attrib |= {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}"}
    root.attrib |= {"height": f"{height:g}", "font-family": "DejaVu Sans Mono, Menlo, monospace"}
    ET.SubElement(root, "title").text = title
    add_rect(root, (0, 0), size, fill="white")
    add_name(root, title, (PADDING, 26))
    return root


def to_svg_text(root: ET.Element) -> str:
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def add_rect(
    parent: ET.Element, place: Point, size: Point, *, fill: str, stroke: str = "none"
) -> ET.Element:
    """Add a rectangle with rounded corners to `parent`; `place` is the upper left corner."""
    rect = ET.SubElement(parent, "rect", fill=fill, stroke=stroke, rx="4")
    (x, y), (width, height) = place, size
    rect.attrib |= {"x": f"{x:g}", "y": f"{y:g}"}
    rect.attrib |= {"width": f"{width:g}", "height": f"{height:g}"}
    return rect


def add_text(
    parent: ET.Element, text: str, place: Point, *, fill: str = INK_COLOR, anchor: str = "start"
) -> ET.Element:
    """Add a line of text to `parent`, with its baseline at `place`."""
    element = ET.SubElement(parent, "text", x=f"{place[0]:g}", y=f"{place[1]:g}", fill=fill)
    element.attrib |= {"font-size": str(LABEL_PX), "text-anchor": anchor}
    element.text = text
    return element


def add_name(parent: ET.Element, text: str, place: Point, *, anchor: str = "start") -> None:
    """Add a line of larger, bold text to `parent`, with its baseline at `place`."""
    element = add_text(parent, text, place, anchor=anchor)
    element.attrib |= {"font-size": str(NAME_PX), "font-weight": "bold"}
