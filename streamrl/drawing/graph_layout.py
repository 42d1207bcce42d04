"""Where everything of a graph's picture goes, in pixels, so that no text meets another.

Stages stand in columns by the longest chain of waits before them, and in bands by step. To the
left of each column is a strip for labels: every edge enters its target at a place of its own there,
under its label. Left of that is a strip in which lines bend, and where no text is. A line that
passes a column has a place in it, as a stage has. What leads back runs below it all.
"""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from streamrl.dataflow import Node, Wait
from streamrl.drawing.dataflow_graph import Edge, Picture
from streamrl.drawing.svg import LABEL_PX, NAME_PX, Point, text_width

LINE = 13.0
"""From one line of text to the next."""
WRAP = 26
"""Characters in a line of a label."""
MARGIN, GAP, BEND, PASS = 16.0, 20.0, 72.0, 16.0
LANE = 12.0
"""Between lines that lead back."""
NAMES_HEIGHT = 46.0
"""A box holds the names of stage and role at least."""


@dataclass(frozen=True)
class Way:
    """Where the lines of a node, of one kind, pass a column in the band of a step."""

    source: Node
    wait: Wait
    column: int
    step: int


@dataclass(frozen=True)
class Box:
    """A stage's place."""

    node: Node
    x: float
    y: float
    width: float
    height: float

    @property
    def exit(self) -> Point:
        """Where its lines begin."""
        return self.x + self.width, self.y + self.height / 2


@dataclass(frozen=True)
class Line:
    """An edge's way, and its label: lines of text, the first with its baseline at `place`."""

    edge: Edge
    points: tuple[Point, ...]
    label: tuple[str, ...]
    place: Point


@dataclass(frozen=True)
class Band:
    """Where a step is."""

    y: float
    height: float


class Layout:
    """The places of a picture, the first of them `top` from the top; `left` is kept free."""

    def __init__(self, picture: Picture, *, top: float, left: float = 0.0) -> None:
        self._picture, self._top, self._left = picture, top, left
        generations = enumerate(nx.topological_generations(picture.forward))
        self._column = {node: i for i, nodes in generations for node in nodes}
        self._back = [edge for edge in picture.edges if edge.is_back]

    @property
    def width(self) -> float:
        """Of all of it."""
        lanes = LANE * (len(self._back) + 1) if self._back else 0.0
        return self._end(max(self._column.values())) + lanes + MARGIN

    @property
    def height(self) -> float:
        """Of all of it, `top` included."""
        return self._floor + LANE * len(self._back)

    @cached_property
    def boxes(self) -> dict[Node, Box]:
        """The stages' places."""
        boxes = {}
        for node, column in self._column.items():
            x, width = self._columns[column][1:]
            boxes[node] = Box(node, x, self._tops[node], width, self._heights[node])
        return boxes

    @cached_property
    def lines(self) -> list[Line]:
        """The edges' places."""
        lines = []
        for node, edges in self._entries.items():
            box = self.boxes[node]
            label_x = self._columns[self._column[node]][0]
            y = box.y + (box.height - sum(map(_entry_height, edges))) / 2
            for edge in edges:
                label = _label(edge)
                y += _entry_height(edge)
                points = [*self._way(edge, (label_x, y - 4)), (box.x, y - 4)]
                place = (label_x + 4, y - 10 - LINE * (len(label) - 1))
                lines.append(Line(edge, tuple(points), tuple(label), place))
        return lines

    @cached_property
    def bands(self) -> list[Band]:
        """A band per step, high enough for every column of it."""
        bands, y = [], self._top
        for step in range(self._picture.num_steps):
            stacks = [
                self._stack_height(stack) for at, stack in self._stacks.items() if at[0] == step
            ]
            bands.append(Band(y, max(stacks)))
            y += max(stacks) + 2 * GAP
        return bands

    def _way(self, edge: Edge, entry: Point) -> list[Point]:
        """From the source to where the label begins."""
        start = self.boxes[edge.source].exit
        if not edge.is_back:
            passes = [(w.column, self._tops[w] + PASS / 2) for w in self._ways(edge)]
            flat = [((self._columns[c][0], y), (self._end(c), y)) for c, y in passes]
            return [start, *(point for ends in flat for point in ends), entry]
        lane = LANE * self._back.index(edge)
        right = self._end(self._column[edge.source]) + LANE + lane
        left, low = entry[0] - LANE - lane, self._floor + lane
        return [start, (right, start[1]), (right, low), (left, low), (left, entry[1]), entry]

    def _ways(self, edge: Edge) -> list[Way]:
        """The places in the columns it passes; several lines of a node share them."""
        if edge.is_back:
            return []
        between = range(self._column[edge.source] + 1, self._column[edge.target])
        return [Way(edge.source, edge.wait, column, edge.target[0]) for column in between]

    @cached_property
    def _entries(self) -> dict[Node, list[Edge]]:
        """Of each node the edges that enter it, from above to below."""
        order = {node: i for i, node in enumerate(self._picture.calls)}
        entries: dict[Node, list[Edge]] = {node: [] for node in order}
        for edge in self._picture.edges:
            entries[edge.target].append(edge)
        for edges in entries.values():
            edges.sort(key=lambda e: (e.is_back, e.source[0] == e.target[0], order[e.source]))
        return entries

    @cached_property
    def _columns(self) -> list[tuple[float, float, float]]:
        """By column: where its labels begin, where its boxes do, and how wide they are."""
        nodes: dict[int, list[Node]] = defaultdict(list)
        for node, column in self._column.items():
            nodes[column].append(node)
        columns, x = [], self._left
        for column in range(len(nodes)):
            labels = [w for n in nodes[column] for e in self._entries[n] for w in _label(e)]
            has_entries = any(self._entries[node] for node in nodes[column])
            x += max(BEND, LANE * (len(self._back) + 2)) if has_entries else MARGIN
            room = max((text_width(line, LABEL_PX) for line in labels), default=0.0) + MARGIN
            start = x + room if has_entries else x
            width = max(self._box_width(node) for node in nodes[column])
            columns.append((x, start, width))
            x = start + width
        return columns

    def _end(self, column: int) -> float:
        _, x, width = self._columns[column]
        return x + width

    def _box_width(self, node: Node) -> float:
        role = self._picture.calls[node].role
        names = text_width(self._picture.name(node), NAME_PX), text_width(role, LABEL_PX)
        return max(names) + 2 * MARGIN

    @cached_property
    def _heights(self) -> dict[Node, float]:
        return {
            node: max(NAMES_HEIGHT, sum(map(_entry_height, edges)) + LANE)
            for node, edges in self._entries.items()
        }

    @cached_property
    def _stacks(self) -> dict[tuple[int, int], list[Node | Way]]:
        """What stands in a band and a column, from above to below: lines that pass, then stages."""
        stacks: dict[tuple[int, int], list[Node | Way]] = defaultdict(list)
        for way in dict.fromkeys(w for edge in self._picture.edges for w in self._ways(edge)):
            stacks[way.step, way.column].append(way)
        for node in self._picture.calls:
            stacks[node[0], self._column[node]].append(node)
        return stacks

    def _stack_height(self, stack: Sequence[Node | Way]) -> float:
        return sum(map(self._height_of, stack)) + GAP * (len(stack) - 1)

    def _height_of(self, item: Node | Way) -> float:
        return PASS if isinstance(item, Way) else self._heights[item]

    @cached_property
    def _tops(self) -> dict[Node | Way, float]:
        tops = {}
        for (step, _), stack in self._stacks.items():
            band = self.bands[step]
            y = band.y + (band.height - self._stack_height(stack)) / 2
            for item in stack:
                tops[item] = y
                y += self._height_of(item) + GAP
        return tops

    @property
    def _floor(self) -> float:
        return self.bands[-1].y + self.bands[-1].height + GAP


def _label(edge: Edge) -> list[str]:
    return textwrap.wrap(edge.label, WRAP, break_long_words=False, break_on_hyphens=False)


def _entry_height(edge: Edge) -> float:
    return LINE * len(_label(edge)) + 10
