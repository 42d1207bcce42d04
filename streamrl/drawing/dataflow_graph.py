"""What `streamrl graph` shows: a dataflow at one step, or unrolled over several."""

from dataclasses import dataclass
from typing import Any

import networkx as nx

from streamrl.dataflow import Call, Dataflow, Kind, Node, Wait

FILL = {Kind.GENERATE: "#dbeafe", Kind.SCORE: "#dcfce7", Kind.TRAIN: "#ffedd5"}
BORDER = {Kind.GENERATE: "#1d4ed8", Kind.SCORE: "#15803d", Kind.TRAIN: "#c2410c"}
STROKE = {Wait.DATA: "#475569", Wait.VERSION: "#7c3aed", Wait.ORDER: "#94a3b8"}


@dataclass(frozen=True)
class Edge:
    """What the stage `target` gets of `source`, or waits for."""

    source: Node
    target: Node
    wait: Wait
    columns: tuple[str, ...] = ()
    role: str = ""

    @property
    def label(self) -> str:
        """What flows along it, in words; nothing along one of order."""
        if self.wait is Wait.VERSION:
            return f"version of {self.role}"
        return ", ".join(self.columns)

    @property
    def is_back(self) -> bool:
        """Whether it leads from a training to the same stages at a later step."""
        return self.wait is Wait.VERSION and self.source[0] == self.target[0]


@dataclass(frozen=True)
class Picture:
    """Calls by step and stage, steps counted from 0, and the edges between them, in flow order.

    Of several steps a version edge leads from the training to the step that waits for it. Of one
    it leads back, to the stage that will.
    """

    title: str
    calls: dict[Node, Call]
    edges: tuple[Edge, ...]
    num_steps: int
    max_staleness: int

    @classmethod
    def of(cls, flow: Dataflow, *, name: str, steps: int, max_staleness: int) -> "Picture":
        """The picture of an algorithm's dataflow over so many steps."""
        graph = flow.unroll(steps, max_staleness)
        edges = [_edge(a, b, facts) for a, b, facts in graph.edges(data=True)]
        if steps == 1:
            edges += [
                Edge((0, trainer.stage), (0, call.stage), Wait.VERSION, role=call.follows)
                for trainer, call in flow.version_edges
            ]
        title = f"{name}: {len(flow.calls)} stages, versions at most {max_staleness} behind"
        calls = {node: graph.nodes[node]["call"] for node in graph}
        return cls(title, calls, tuple(edges), steps, max_staleness)

    @property
    def forward(self) -> "nx.DiGraph[Node]":
        """The nodes and the edges that do not lead back."""
        graph: nx.DiGraph[Node] = nx.DiGraph()
        graph.add_nodes_from(self.calls)
        graph.add_edges_from((e.source, e.target) for e in self.edges if not e.is_back)
        return graph

    def name(self, node: Node) -> str:
        """A stage; of several steps with its step, counted from 1 as a run does."""
        step, stage = node
        return stage if self.num_steps == 1 else f"{stage}[{step + 1}]"


def _edge(source: Node, target: Node, facts: dict[str, Any]) -> Edge:
    columns = tuple(dict.fromkeys(facts.get("columns", ())))
    return Edge(source, target, facts["kind"], columns, facts.get("role", ""))
