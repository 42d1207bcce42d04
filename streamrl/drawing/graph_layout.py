"""Layout of a dataflow graph in pixels, without overlapping text.

Layered drawing (Sugiyama): columns are numbered from the left, and a stage's column number is the
longest chain of dependencies before the stage; steps form horizontal bands. Every column has, from
left to right, a strip where lines bend, a strip of labels with an entry point for each incoming
edge, and the boxes of the stages. A line that passes a column gets a dummy node there. Back edges
run below all bands.

       bends   labels      box
      ~~~~~~  tokens ---> +---------+
      ~~~~~~  rewards --> |  train  |
                          +---------+
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
"""Distance between lines of a label."""
WRAP_CHARS = 26
"""Maximum characters per label line."""
MARGIN, BOX_GAP, BEND_WIDTH, PASS_HEIGHT = 16.0, 20.0, 72.0, 16.0
LANE_GAP = 12.0
"""Distance between back edges that run in parallel."""
MIN_BOX_HEIGHT = 46.0
"""Height of the two names in a box, stage and role."""


@dataclass(frozen=True)
class DummyNode:
    """Space in a column, within the band of a step, for lines that pass the column.

    source, wait: node at which the lines start, and their kind of edge.
    """

    source: StepNode
    wait: EdgeKind
    column: int
    step: int


@dataclass(frozen=True)
class NodeBox:
    """Rectangle of a node; (x, y) is the upper left corner."""

    node: StepNode
    x: float
    y: float
    width: float
    height: float

    @property
    def exit_point(self) -> Point:
        """Point of the box at which outgoing lines start."""
        return self.x + self.width, self.y + self.height / 2


@dataclass(frozen=True)
class EdgeRoute:
    """Polyline of an edge, and its label as lines of text.

    label_position: start of the baseline of the first line of text.
    """

    edge: GraphEdge
    points: tuple[Point, ...]
    label: tuple[str, ...]
    label_position: Point


@dataclass(frozen=True)
class StepBand:
    """Vertical extent of a step's band in the drawing."""

    y: float
    height: float


class GraphLayout:
    """Positions of all boxes, lines and labels of a dataflow graph, in pixels.

    top, left: pixels that stay free above the graph and at its left.
    """

    def __init__(self, picture: DataflowGraph, *, top: float, left: float = 0.0) -> None:
        self._graph, self._top, self._left = picture, top, left
        generations = enumerate(nx.topological_generations(picture.forward_graph))
        self._column_by_node = {node: i for i, nodes in generations for node in nodes}
        self._back_edges = [edge for edge in picture.edges if edge.is_back_edge]

    @property
    def width(self) -> float:
        """Total width, the free space at the left included."""
        lanes = LANE_GAP * (len(self._back_edges) + 1) if self._back_edges else 0.0
        return self._column_end(max(self._column_by_node.values())) + lanes + MARGIN

    @property
    def height(self) -> float:
        """Total height, the free space above included."""
        return self._bottom_y + LANE_GAP * len(self._back_edges)

    @cached_property
    def node_boxes(self) -> dict[StepNode, NodeBox]:
        boxes = {}
        for node, column in self._column_by_node.items():
            x, width = self._column_spans[column][1:]
            boxes[node] = NodeBox(node, x, self._item_tops[node], width, self._node_heights[node])
        return boxes

    @cached_property
    def edge_routes(self) -> list[EdgeRoute]:
        """Polylines and labels of all edges."""
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
        """Band of each step, as high as the step's highest column."""
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
        """Return the points of an edge from its source box to `entry`, where its label begins."""
        start = self.node_boxes[edge.source].exit_point
        if not edge.is_back_edge:
            passes = [
                (w.column, self._item_tops[w] + PASS_HEIGHT / 2) for w in self._dummy_nodes(edge)
            ]
            flat = [((self._column_spans[c][0], y), (self._column_end(c), y)) for c, y in passes]
            return [start, *(point for segment in flat for point in segment), entry]
        lane = LANE_GAP * self._back_edges.index(edge)
        right = self._column_end(self._column_by_node[edge.source]) + LANE_GAP + lane
        left, low = entry[0] - LANE_GAP - lane, self._bottom_y + lane
        return [start, (right, start[1]), (right, low), (left, low), (left, entry[1]), entry]

    def _dummy_nodes(self, edge: GraphEdge) -> list[DummyNode]:
        """Return the dummy nodes of an edge, in all columns that the edge passes.

        Edges of the same source and kind share dummy nodes.
        """
        if edge.is_back_edge:
            return []
        between = range(self._column_by_node[edge.source] + 1, self._column_by_node[edge.target])
        return [DummyNode(edge.source, edge.wait, column, edge.target[0]) for column in between]

    @cached_property
    def _incoming_edges(self) -> dict[StepNode, list[GraphEdge]]:
        """Incoming edges of each node, top to bottom."""
        order = {node: i for i, node in enumerate(self._graph.calls)}
        entries: dict[StepNode, list[GraphEdge]] = {node: [] for node in order}
        for edge in self._graph.edges:
            entries[edge.target].append(edge)
        for edges in entries.values():
            edges.sort(key=lambda e: (e.is_back_edge, e.source[0] == e.target[0], order[e.source]))
        return entries

    @cached_property
    def _column_spans(self) -> list[tuple[float, float, float]]:
        """Horizontal extents of each column: x of labels, x of boxes, width of boxes."""
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
            label_width = max((text_width(line, LABEL_PX) for line in labels), default=0.0) + MARGIN
            start = x + label_width if has_entries else x
            width = max(self._box_width(node) for node in nodes[column])
            columns.append((x, start, width))
            x = start + width
        return columns

    def _column_end(self, column: int) -> float:
        """Return the x coordinate at which a column's boxes end."""
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
        """Contents of each (step, column), top to bottom: dummy nodes, then stages."""
        stacks: dict[tuple[int, int], list[StepNode | DummyNode]] = defaultdict(list)
        for dummy in dict.fromkeys(
            w for edge in self._graph.edges for w in self._dummy_nodes(edge)
        ):
            stacks[dummy.step, dummy.column].append(dummy)
        for node in self._graph.calls:
            stacks[node[0], self._column_by_node[node]].append(node)
        return stacks

    def _stack_height(self, stack: Sequence[StepNode | DummyNode]) -> float:
        """Return the height of a column's boxes and dummy nodes in a step, gaps included."""
        return sum(map(self._item_height, stack)) + BOX_GAP * (len(stack) - 1)

    def _item_height(self, item: StepNode | DummyNode) -> float:
        return PASS_HEIGHT if isinstance(item, DummyNode) else self._node_heights[item]

    @cached_property
    def _item_tops(self) -> dict[StepNode | DummyNode, float]:
        """Upper y coordinate of each box and dummy node."""
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
        """y coordinate below all bands, at which back edges run."""
        return self.step_bands[-1].y + self.step_bands[-1].height + BOX_GAP


def _wrap_label(edge: GraphEdge) -> list[str]:
    return textwrap.wrap(edge.label, WRAP_CHARS, break_long_words=False, break_on_hyphens=False)


def _entry_height(edge: GraphEdge) -> float:
    """Return the height that an incoming edge needs for its label and line."""
    return LINE_HEIGHT * len(_wrap_label(edge)) + 10
