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

from streamrl.dataflow import EdgeKind, StepNode
from streamrl.drawing.dataflow_graph import DataflowGraph, GraphEdge
from streamrl.drawing.svg import LABEL_PX, NAME_PX, Point, text_width

LINE_HEIGHT = 13.0
"""From one line of text to the next."""
WRAP_CHARS = 26
"""Characters in a line of a label."""
MARGIN, BOX_GAP, BEND_WIDTH, PASS_HEIGHT = 16.0, 20.0, 72.0, 16.0
LANE_GAP = 12.0
"""Between lines that lead back."""
MIN_BOX_HEIGHT = 46.0
"""A box holds the names of stage and role at least."""


@dataclass(frozen=True)
class DummyNode:
    """Where the lines of a node, of one kind, pass a column in the band of a step."""

    source: StepNode
    wait: EdgeKind
    column: int
    step: int


@dataclass(frozen=True)
class NodeBox:
    """A stage's place."""

    node: StepNode
    x: float
    y: float
    width: float
    height: float

    @property
    def exit_point(self) -> Point:
        """Where its lines begin."""
        return self.x + self.width, self.y + self.height / 2


@dataclass(frozen=True)
class EdgeRoute:
    """An edge's way, and its label: lines of text, the first with its baseline at `place`."""

    edge: GraphEdge
    points: tuple[Point, ...]
    label: tuple[str, ...]
    label_position: Point


@dataclass(frozen=True)
class StepBand:
    """Where a step is."""

    y: float
    height: float


class GraphLayout:
    """The places of a picture, the first of them `top` from the top; `left` is kept free."""

    def __init__(self, picture: DataflowGraph, *, top: float, left: float = 0.0) -> None:
        self._graph, self._top, self._left = picture, top, left
        generations = enumerate(nx.topological_generations(picture.forward_graph))
        self._column_by_node = {node: i for i, nodes in generations for node in nodes}
        self._back_edges = [edge for edge in picture.edges if edge.is_back_edge]

    @property
    def width(self) -> float:
        """Of all of it."""
        lanes = LANE_GAP * (len(self._back_edges) + 1) if self._back_edges else 0.0
        return self._column_end(max(self._column_by_node.values())) + lanes + MARGIN

    @property
    def height(self) -> float:
        """Of all of it, `top` included."""
        return self._bottom_y + LANE_GAP * len(self._back_edges)

    @cached_property
    def node_boxes(self) -> dict[StepNode, NodeBox]:
        """The stages' places."""
        boxes = {}
        for node, column in self._column_by_node.items():
            x, width = self._column_spans[column][1:]
            boxes[node] = NodeBox(node, x, self._item_tops[node], width, self._node_heights[node])
        return boxes

    @cached_property
    def edge_routes(self) -> list[EdgeRoute]:
        """The edges' places."""
        lines = []
        for node, edges in self._incoming_edges.items():
            box = self.node_boxes[node]
            label_x = self._column_spans[self._column_by_node[node]][0]
            y = box.y + (box.height - sum(map(_entry_height, edges))) / 2
            for edge in edges:
                label = _wrap_label(edge)
                y += _entry_height(edge)
                points = [*self._route_edge(edge, (label_x, y - 4)), (box.x, y - 4)]
                place = (label_x + 4, y - 10 - LINE_HEIGHT * (len(label) - 1))
                lines.append(EdgeRoute(edge, tuple(points), tuple(label), place))
        return lines

    @cached_property
    def step_bands(self) -> list[StepBand]:
        """A band per step, high enough for every column of it."""
        bands, y = [], self._top
        for step in range(self._graph.num_steps):
            stacks = [
                self._stack_height(stack)
                for at, stack in self._column_stacks.items()
                if at[0] == step
            ]
            bands.append(StepBand(y, max(stacks)))
            y += max(stacks) + 2 * BOX_GAP
        return bands

    def _route_edge(self, edge: GraphEdge, entry: Point) -> list[Point]:
        """From the source to where the label begins."""
        start = self.node_boxes[edge.source].exit_point
        if not edge.is_back_edge:
            passes = [
                (w.column, self._item_tops[w] + PASS_HEIGHT / 2) for w in self._dummy_nodes(edge)
            ]
            flat = [((self._column_spans[c][0], y), (self._column_end(c), y)) for c, y in passes]
            return [start, *(point for ends in flat for point in ends), entry]
        lane = LANE_GAP * self._back_edges.index(edge)
        right = self._column_end(self._column_by_node[edge.source]) + LANE_GAP + lane
        left, low = entry[0] - LANE_GAP - lane, self._bottom_y + lane
        return [start, (right, start[1]), (right, low), (left, low), (left, entry[1]), entry]

    def _dummy_nodes(self, edge: GraphEdge) -> list[DummyNode]:
        """The places in the columns it passes; several lines of a node share them."""
        if edge.is_back_edge:
            return []
        between = range(self._column_by_node[edge.source] + 1, self._column_by_node[edge.target])
        return [DummyNode(edge.source, edge.wait, column, edge.target[0]) for column in between]

    @cached_property
    def _incoming_edges(self) -> dict[StepNode, list[GraphEdge]]:
        """Of each node the edges that enter it, from above to below."""
        order = {node: i for i, node in enumerate(self._graph.calls)}
        entries: dict[StepNode, list[GraphEdge]] = {node: [] for node in order}
        for edge in self._graph.edges:
            entries[edge.target].append(edge)
        for edges in entries.values():
            edges.sort(key=lambda e: (e.is_back_edge, e.source[0] == e.target[0], order[e.source]))
        return entries

    @cached_property
    def _column_spans(self) -> list[tuple[float, float, float]]:
        """By column: where its labels begin, where its boxes do, and how wide they are."""
        nodes: dict[int, list[StepNode]] = defaultdict(list)
        for node, column in self._column_by_node.items():
            nodes[column].append(node)
        columns, x = [], self._left
        for column in range(len(nodes)):
            labels = [
                w for n in nodes[column] for e in self._incoming_edges[n] for w in _wrap_label(e)
            ]
            has_entries = any(self._incoming_edges[node] for node in nodes[column])
            x += max(BEND_WIDTH, LANE_GAP * (len(self._back_edges) + 2)) if has_entries else MARGIN
            room = max((text_width(line, LABEL_PX) for line in labels), default=0.0) + MARGIN
            start = x + room if has_entries else x
            width = max(self._box_width(node) for node in nodes[column])
            columns.append((x, start, width))
            x = start + width
        return columns

    def _column_end(self, column: int) -> float:
        _, x, width = self._column_spans[column]
        return x + width

    def _box_width(self, node: StepNode) -> float:
        role = self._graph.calls[node].role
        names = text_width(self._graph.format_node(node), NAME_PX), text_width(role, LABEL_PX)
        return max(names) + 2 * MARGIN

    @cached_property
    def _node_heights(self) -> dict[StepNode, float]:
        return {
            node: max(MIN_BOX_HEIGHT, sum(map(_entry_height, edges)) + LANE_GAP)
            for node, edges in self._incoming_edges.items()
        }

    @cached_property
    def _column_stacks(self) -> dict[tuple[int, int], list[StepNode | DummyNode]]:
        """What stands in a band and a column, from above to below: lines that pass, then stages."""
        stacks: dict[tuple[int, int], list[StepNode | DummyNode]] = defaultdict(list)
        for way in dict.fromkeys(w for edge in self._graph.edges for w in self._dummy_nodes(edge)):
            stacks[way.step, way.column].append(way)
        for node in self._graph.calls:
            stacks[node[0], self._column_by_node[node]].append(node)
        return stacks

    def _stack_height(self, stack: Sequence[StepNode | DummyNode]) -> float:
        return sum(map(self._item_height, stack)) + BOX_GAP * (len(stack) - 1)

    def _item_height(self, item: StepNode | DummyNode) -> float:
        return PASS_HEIGHT if isinstance(item, DummyNode) else self._node_heights[item]

    @cached_property
    def _item_tops(self) -> dict[StepNode | DummyNode, float]:
        tops = {}
        for (step, _), stack in self._column_stacks.items():
            band = self.step_bands[step]
            y = band.y + (band.height - self._stack_height(stack)) / 2
            for item in stack:
                tops[item] = y
                y += self._item_height(item) + BOX_GAP
        return tops

    @property
    def _bottom_y(self) -> float:
        return self.step_bands[-1].y + self.step_bands[-1].height + BOX_GAP


def _wrap_label(edge: GraphEdge) -> list[str]:
    return textwrap.wrap(edge.label, WRAP_CHARS, break_long_words=False, break_on_hyphens=False)


def _entry_height(edge: GraphEdge) -> float:
    return LINE_HEIGHT * len(_wrap_label(edge)) + 10
