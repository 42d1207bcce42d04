"""Timeline of a placement as SVG: which call computes on which devices when, for some steps."""

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import pairwise

from streamrl.dataflow import Dataflow
from streamrl.drawing.graph_text import KIND_BORDERS, KIND_FILLS
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.placement.problem import DeviceInterval

LABEL_PX, NAME_PX = 11, 13
"""Font sizes of labels and of the title; text is monospaced."""
CHARACTER_EM = 0.63
"""Width of a monospaced character relative to the font size, rounded up."""
INK_COLOR, PALE_COLOR, TICK_COLOR = "#0f172a", "#f1f5f9", "#94a3b8"
PADDING = 16.0
HEADER_HEIGHT, FOOTER_HEIGHT, CHART_WIDTH = 46.0, 56.0, 960.0
ROW_HEIGHT = 34.0
"""Calls that share a row at the same time split its height into lanes."""
NUM_TICKS = 8
"""Approximate number of time marks."""
Point = tuple[float, float]


def render_timeline(
    title: str, dataflow: Dataflow, placement: Placement, intervals: Sequence[DeviceInterval]
) -> str:
    """Return the timeline as SVG: a row per range of devices with the same calls.

    Each interval in which a call has the devices of a row is a box in this row.
    """
    rows = list_device_rows(placement)
    kinds = {call.stage: call.kind for call in dataflow.calls}
    placed_intervals = [
        interval for interval in intervals if interval.stage in placement.assignments
    ]
    start = min((interval.start_s for interval in placed_intervals), default=0.0)
    end = max((interval.end_s for interval in placed_intervals), default=1.0)
    left = PADDING + max(_measure_text_width(f"devices {row}") for row in rows) + PADDING
    height = HEADER_HEIGHT + ROW_HEIGHT * len(rows) + FOOTER_HEIGHT
    root = _create_canvas(title, (left + CHART_WIDTH + PADDING, height))
    scale = CHART_WIDTH / max(end - start, 1e-12)
    for i, row in enumerate(rows):
        top = HEADER_HEIGHT + i * ROW_HEIGHT
        _add_rect(root, (left, top + 2), (CHART_WIDTH, ROW_HEIGHT - 4), fill=PALE_COLOR)
        _add_text(root, f"devices {row}", (PADDING, top + ROW_HEIGHT / 2 + 4))
        row_intervals = [
            e for e in placed_intervals if placement.assignments[e.stage].mesh.overlaps(row)
        ]
        for interval, (lane, lanes) in assign_lanes(row_intervals):
            size = max((interval.end_s - interval.start_s) * scale, 1.0), (ROW_HEIGHT - 4) / lanes
            position = left + (interval.start_s - start) * scale, top + 2 + lane * size[1]
            fill, border = KIND_FILLS[kinds[interval.stage]], KIND_BORDERS[kinds[interval.stage]]
            box = _add_rect(root, position, size, fill=fill, stroke=border)
            label = f"{interval.stage}, step {interval.step + 1}"
            duration = f"{interval.start_s - start:.3g} to {interval.end_s - start:.3g} s"
            ET.SubElement(box, "title").text = f"{label}: {duration}"
            if _measure_text_width(interval.stage) + 6 < size[0] and size[1] > LABEL_PX:
                middle = position[1] + size[1] / 2 + 4
                _add_text(
                    root, interval.stage, (position[0] + size[0] / 2, middle), anchor="middle"
                )
    _draw_axis(root, (left, HEADER_HEIGHT + ROW_HEIGHT * len(rows)), end - start, scale)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def list_device_rows(placement: Placement) -> list[Mesh]:
    """Return the rows of the timeline: the largest ranges of devices with the same calls.

    Devices without calls are left out.
    """
    meshes = [assignment.mesh for assignment in placement.assignments.values()]
    edges = sorted({edge for mesh in meshes for edge in (mesh.first, mesh.first + mesh.size)})
    runs = [Mesh(a, b - a) for a, b in pairwise(edges)]
    return [run for run in runs if any(run.overlaps(mesh) for mesh in meshes)]


def assign_lanes(
    intervals: Sequence[DeviceInterval],
) -> list[tuple[DeviceInterval, tuple[int, int]]]:
    """Assign intervals to lanes, so that the intervals in a lane do not overlap.

    Return each interval with the number of its lane and the total number of lanes.
    """
    ends: list[float] = []
    placed: list[tuple[DeviceInterval, int]] = []
    for interval in sorted(
        intervals, key=lambda interval: (interval.start_s, interval.end_s, interval.stage)
    ):
        # Adjacent intervals may overlap by a rounding error.
        slack = 1e-9 * max(abs(interval.start_s), 1.0)
        free = (i for i, end in enumerate(ends) if end <= interval.start_s + slack)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [interval.end_s]
        placed.append((interval, lane))
    return [(interval, (lane, len(ends))) for interval, lane in placed]


def _draw_axis(root: ET.Element, position: Point, length_s: float, scale: float) -> None:
    """Draw the time axis, with marks at round times, from `position` to the right."""
    x, y = position
    tick = round_tick(length_s / NUM_TICKS)
    for i in range(math.floor(length_s / tick + 1e-9) + 1):
        at = x + i * tick * scale
        _add_rect(root, (at, y), (1, 5), fill=TICK_COLOR)
        _add_text(root, f"{i * tick:.4g} s", (at, y + 18), anchor="middle")


def round_tick(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times any power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-12)))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= least * (1 - 1e-9))


def _measure_text_width(line: str) -> float:
    return len(line) * LABEL_PX * CHARACTER_EM


def _create_canvas(title: str, size: Point) -> ET.Element:
    """Return the root element of an SVG with white background, with the title as first line."""
    width, height = size
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.attrib |= {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}"}
    root.attrib |= {"height": f"{height:g}", "font-family": "DejaVu Sans Mono, Menlo, monospace"}
    ET.SubElement(root, "title").text = title
    _add_rect(root, (0, 0), size, fill="white")
    line = _add_text(root, title, (PADDING, 26))
    line.attrib |= {"font-size": str(NAME_PX), "font-weight": "bold"}
    return root


def _add_rect(
    parent: ET.Element, position: Point, size: Point, *, fill: str, stroke: str = "none"
) -> ET.Element:
    """Add a rectangle with rounded corners to `parent`; `position` is the upper left corner."""
    rect = ET.SubElement(parent, "rect", fill=fill, stroke=stroke, rx="4")
    (x, y), (width, height) = position, size
    rect.attrib |= {"x": f"{x:g}", "y": f"{y:g}"}
    rect.attrib |= {"width": f"{width:g}", "height": f"{height:g}"}
    return rect


def _add_text(
    parent: ET.Element, text: str, position: Point, *, fill: str = INK_COLOR, anchor: str = "start"
) -> ET.Element:
    """Add a line of text to `parent`, with its baseline at `position`."""
    element = ET.SubElement(parent, "text", x=f"{position[0]:g}", y=f"{position[1]:g}", fill=fill)
    element.attrib |= {"font-size": str(LABEL_PX), "text-anchor": anchor}
    element.text = text
    return element
