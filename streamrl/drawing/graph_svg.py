"""A graph's picture as SVG, drawn by no other program."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from streamrl.dataflow import Wait
from streamrl.drawing.dataflow_graph import BORDER, FILL, STROKE, Picture
from streamrl.drawing.graph_layout import LINE, Box, Layout, Line
from streamrl.drawing.svg import (
    LABEL_PX,
    NAME_PX,
    PAD,
    PALE,
    Point,
    canvas,
    name,
    rect,
    text,
    text_width,
    written,
)

DASHES = {Wait.DATA: "none", Wait.VERSION: "6 4", Wait.ORDER: "2 3"}
HEAD, FOOT = 50.0, 44.0
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
    root = canvas(picture.title, (width, height))
    for step, band in enumerate(layout.bands if has_bands else (), start=1):
        size = width - PAD, band.height + PAD
        rect(root, (PAD / 2, band.y - PAD / 2), size, fill=PALE)
        text(root, f"step {step}", (PAD, band.y + LABEL_PX))
    for line in layout.lines:
        _draw_line(root, line)
    for box in layout.boxes.values():
        _draw_box(root, picture, box)
    root.append(legend)
    return written(root)


def _draw_box(root: ET.Element, picture: Picture, box: Box) -> None:
    call = picture.calls[box.node]
    group = ET.SubElement(root, "g")
    ET.SubElement(group, "title").text = f"{call.stage}: {call.kind.value}, role {call.role}"
    size = box.width, box.height
    rect(group, (box.x, box.y), size, fill=FILL[call.kind], stroke=BORDER[call.kind])
    x, y = box.x + box.width / 2, box.y + box.height / 2
    name(group, picture.name(box.node), (x, y - 3), anchor="middle")
    text(group, call.role, (x, y + 14), anchor="middle")


def _draw_line(root: ET.Element, line: Line) -> None:
    color = STROKE[line.edge.wait]
    x, y = line.points[-1]
    shape = _straight(line.points) if line.edge.is_back else _bent(line.points)
    _path(root, shape, line.edge.wait)
    head = f"M{x:g},{y:g} l-8,-4 l0,8 z"
    ET.SubElement(root, "path", d=head, fill=color)
    for i, words in enumerate(line.label):
        text(root, words, (line.place[0], line.place[1] + i * LINE), fill=color)


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
        rect(root, (x, y - 6), (12, 12), fill=FILL[kind], stroke=BORDER[kind])
        x = _legend_text(root, kind.value, (x + 18, y))
    for wait in sorted({edge.wait for edge in picture.edges}, key=list(Wait).index):
        _path(root, _straight([(x, y), (x + 28, y)]), wait)
        x = _legend_text(root, wait.value, (x + 34, y))
    return x


def _legend_text(root: ET.Element, words: str, place: Point) -> float:
    text(root, words, (place[0], place[1] + 4))
    return place[0] + text_width(words, LABEL_PX) + PAD
