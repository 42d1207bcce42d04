"""A graph's picture as SVG, drawn by no other program."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from streamrl.cli.graph_layout import LABEL_PX, LINE, NAME_PX, Box, Layout, Line, Point, text_width
from streamrl.cli.graph_picture import BORDER, FILL, STROKE, Picture
from streamrl.dataflow import Wait

DASHES = {Wait.DATA: "none", Wait.VERSION: "6 4", Wait.ORDER: "2 3"}
INK, PALE = "#0f172a", "#f1f5f9"
PAD, HEAD, FOOT = 16.0, 50.0, 44.0
STEP_WIDTH = 64.0
"""Left of the stages, for the number of a step."""


def svg(picture: Picture) -> str:
    """The picture: boxes coloured by kind, edges with their columns, versions dashed."""
    has_bands = picture.num_steps > 1
    layout = Layout(picture, top=HEAD, left=STEP_WIDTH if has_bands else 0.0)
    legend = ET.Element("g")
    widths = (
        layout.width,
        text_width(picture.title, NAME_PX) + 2 * PAD,
        _legend(legend, picture, layout.height + FOOT / 2),
    )
    width, height = max(widths), layout.height + FOOT
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.attrib |= {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}"}
    root.attrib |= {"height": f"{height:g}", "font-family": "DejaVu Sans Mono, Menlo, monospace"}
    ET.SubElement(root, "title").text = picture.title
    _rect(root, (0, 0), (width, height), fill="white")
    _name(root, picture.title, (PAD, 26))
    for step, band in enumerate(layout.bands if has_bands else (), start=1):
        size = width - PAD, band.height + PAD
        _rect(root, (PAD / 2, band.y - PAD / 2), size, fill=PALE)
        _text(root, f"step {step}", (PAD, band.y + LABEL_PX))
    for line in layout.lines:
        _draw_line(root, line)
    for box in layout.boxes.values():
        _draw_box(root, picture, box)
    root.append(legend)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _draw_box(root: ET.Element, picture: Picture, box: Box) -> None:
    call = picture.calls[box.node]
    group = ET.SubElement(root, "g")
    ET.SubElement(group, "title").text = f"{call.stage}: {call.kind.value}, role {call.role}"
    size = box.width, box.height
    _rect(group, (box.x, box.y), size, fill=FILL[call.kind], stroke=BORDER[call.kind])
    x, y = box.x + box.width / 2, box.y + box.height / 2
    _name(group, picture.name(box.node), (x, y - 3), anchor="middle")
    _text(group, call.role, (x, y + 14), anchor="middle")


def _draw_line(root: ET.Element, line: Line) -> None:
    color = STROKE[line.edge.wait]
    x, y = line.points[-1]
    shape = _straight(line.points) if line.edge.is_back else _bent(line.points)
    _path(root, shape, line.edge.wait)
    head = f"M{x:g},{y:g} l-8,-4 l0,8 z"
    ET.SubElement(root, "path", d=head, fill=color)
    for i, words in enumerate(line.label):
        _text(root, words, (line.place[0], line.place[1] + i * LINE), fill=color)


def _path(root: ET.Element, shape: str, wait: Wait) -> None:
    path = ET.SubElement(root, "path", d=shape, fill="none", stroke=STROKE[wait])
    path.attrib |= {"stroke-width": "1.4", "stroke-dasharray": DASHES[wait]}


def _straight(points: Sequence[Point]) -> str:
    return "M" + " L".join(f"{x:g},{y:g}" for x, y in points)


def _bent(points: Sequence[Point]) -> str:
    """Through the points, level at each of them."""
    (x, y), *others = points
    shape = [f"M{x:g},{y:g}"]
    for to_x, to_y in others:
        middle = (x + to_x) / 2
        shape.append(f"C{middle:g},{y:g} {middle:g},{to_y:g} {to_x:g},{to_y:g}")
        x, y = to_x, to_y
    return " ".join(shape)


def _legend(root: ET.Element, picture: Picture, y: float) -> float:
    """What colours and lines mean; returns how wide it is."""
    x = PAD
    for kind in dict.fromkeys(call.kind for call in picture.calls.values()):
        _rect(root, (x, y - 6), (12, 12), fill=FILL[kind], stroke=BORDER[kind])
        x = _legend_text(root, kind.value, (x + 18, y))
    for wait in sorted({edge.wait for edge in picture.edges}, key=list(Wait).index):
        _path(root, _straight([(x, y), (x + 28, y)]), wait)
        x = _legend_text(root, wait.value, (x + 34, y))
    return x


def _legend_text(root: ET.Element, words: str, place: Point) -> float:
    _text(root, words, (place[0], place[1] + 4))
    return place[0] + text_width(words, LABEL_PX) + PAD


def _rect(root: ET.Element, place: Point, size: Point, *, fill: str, stroke: str = "none") -> None:
    rect = ET.SubElement(root, "rect", fill=fill, stroke=stroke, rx="4")
    (x, y), (width, height) = place, size
    rect.attrib |= {"x": f"{x:g}", "y": f"{y:g}"}
    rect.attrib |= {"width": f"{width:g}", "height": f"{height:g}"}


def _text(
    root: ET.Element, words: str, place: Point, *, fill: str = INK, anchor: str = "start"
) -> ET.Element:
    text = ET.SubElement(root, "text", x=f"{place[0]:g}", y=f"{place[1]:g}", fill=fill)
    text.attrib |= {"font-size": str(LABEL_PX), "text-anchor": anchor}
    text.text = words
    return text


def _name(root: ET.Element, words: str, place: Point, *, anchor: str = "start") -> None:
    text = _text(root, words, place, anchor=anchor)
    text.attrib |= {"font-size": str(NAME_PX), "font-weight": "bold"}
