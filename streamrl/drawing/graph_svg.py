"""Drawing of a dataflow graph as SVG."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from streamrl.dataflow import EdgeKind
from streamrl.drawing.dataflow_graph import KIND_BORDERS, KIND_FILLS, WAIT_STROKES, DataflowGraph
from streamrl.drawing.graph_layout import LINE_HEIGHT, EdgeRoute, GraphLayout, NodeBox
from streamrl.drawing.svg import (
    LABEL_PX,
    NAME_PX,
    PADDING,
    PALE_COLOR,
    Point,
    add_name,
    add_rect,
    add_text,
    create_canvas,
    text_width,
    to_svg_text,
)

WAIT_DASHES = {EdgeKind.DATA: "none", EdgeKind.VERSION: "6 4", EdgeKind.ORDER: "2 3"}
HEADER_HEIGHT, FOOTER_HEIGHT = 50.0, 44.0
STEP_WIDTH = 64.0
"""Width of the strip for step numbers at the left."""


def render_svg(picture: DataflowGraph) -> str:
    """Return a dataflow graph as SVG.

    The boxes of calls are colored by kind, edges are labeled with columns, version edges are
    dashed.
    """
    has_bands = picture.num_steps > 1
    layout = GraphLayout(picture, top=HEADER_HEIGHT, left=STEP_WIDTH if has_bands else 0.0)
    legend = ET.Element("g")
    widths = (
        layout.width,
        text_width(picture.title, NAME_PX) + 2 * PADDING,
        _draw_legend(legend, picture, layout.height + FOOTER_HEIGHT / 2),
    )
    width, height = max(widths), layout.height + FOOTER_HEIGHT
    root = create_canvas(picture.title, (width, height))
    for step, band in enumerate(layout.step_bands if has_bands else (), start=1):
        size = width - PADDING, band.height + PADDING
        add_rect(root, (PADDING / 2, band.y - PADDING / 2), size, fill=PALE_COLOR)
        add_text(root, f"step {step}", (PADDING, band.y + LABEL_PX))
    for line in layout.edge_routes:
        _draw_line(root, line)
    for box in layout.node_boxes.values():
        _draw_box(root, picture, box)
    root.append(legend)
    return to_svg_text(root)


def _draw_box(root: ET.Element, picture: DataflowGraph, box: NodeBox) -> None:
    call = picture.calls[box.node]
    group = ET.SubElement(root, "g")
    ET.SubElement(group, "title").text = f"{call.stage}: {call.kind.value}, role {call.role}"
    size = box.width, box.height
    add_rect(
        group, (box.x, box.y), size, fill=KIND_FILLS[call.kind], stroke=KIND_BORDERS[call.kind]
    )
    x, y = box.x + box.width / 2, box.y + box.height / 2
    add_name(group, picture.format_node(box.node), (x, y - 3), anchor="middle")
    add_text(group, call.role, (x, y + 14), anchor="middle")


def _draw_line(root: ET.Element, line: EdgeRoute) -> None:
    color = WAIT_STROKES[line.edge.wait]
    x, y = line.points[-1]
    shape = _straight_path(line.points) if line.edge.is_back_edge else _bent_path(line.points)
    _draw_path(root, shape, line.edge.wait)
    head = f"M{x:g},{y:g} l-8,-4 l0,8 z"
    ET.SubElement(root, "path", d=head, fill=color)
    for i, text in enumerate(line.label):
        add_text(
            root,
            text,
            (line.label_position[0], line.label_position[1] + i * LINE_HEIGHT),
            fill=color,
        )


def _draw_path(root: ET.Element, shape: str, wait: EdgeKind) -> None:
    path = ET.SubElement(root, "path", d=shape, fill="none", stroke=WAIT_STROKES[wait])
    path.attrib |= {"stroke-width": "1.4", "stroke-dasharray": WAIT_DASHES[wait]}


def _straight_path(points: Sequence[Point]) -> str:
    """Return an SVG path of straight lines through `points`."""
    return "M" + " L".join(f"{x:g},{y:g}" for x, y in points)


def _bent_path(points: Sequence[Point]) -> str:
    """Return an SVG path through `points` of Bezier curves that are horizontal at every point."""
    (x, y), *others = points
    shape = [f"M{x:g},{y:g}"]
    for to_x, to_y in others:
        middle = (x + to_x) / 2
        shape.append(f"C{middle:g},{y:g} {middle:g},{to_y:g} {to_x:g},{to_y:g}")
        x, y = to_x, to_y
    return " ".join(shape)


def _draw_legend(root: ET.Element, picture: DataflowGraph, y: float) -> float:
    """Draw the legend of box colors and line styles at height `y`; return the legend's width."""
    x = PADDING
    for kind in dict.fromkeys(call.kind for call in picture.calls.values()):
        add_rect(root, (x, y - 6), (12, 12), fill=KIND_FILLS[kind], stroke=KIND_BORDERS[kind])
        x = _draw_legend_text(root, kind.value, (x + 18, y))
    for wait in sorted({edge.wait for edge in picture.edges}, key=list(EdgeKind).index):
        _draw_path(root, _straight_path([(x, y), (x + 28, y)]), wait)
        x = _draw_legend_text(root, wait.value, (x + 34, y))
    return x


def _draw_legend_text(root: ET.Element, text: str, place: Point) -> float:
    """Draw a text of the legend; return the x coordinate at which the legend goes on."""
    add_text(root, text, (place[0], place[1] + 4))
    return place[0] + text_width(text, LABEL_PX) + PADDING
