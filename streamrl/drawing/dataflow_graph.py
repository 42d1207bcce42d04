"""Data of `streamrl graph`: the dataflow of a step, or unrolled over several."""

from dataclasses import dataclass
from typing import Any

import networkx as nx

from streamrl.dataflow import CallKind, Dataflow, EdgeKind, ModelCall, StepNode

KIND_FILLS = {CallKind.GENERATE: "#dbeafe", CallKind.SCORE: "#dcfce7", CallKind.TRAIN: "#ffedd5"}
KIND_BORDERS = {CallKind.GENERATE: "#1d4ed8", CallKind.SCORE: "#15803d", CallKind.TRAIN: "#c2410c"}
WAIT_STROKES = {EdgeKind.DATA: "#475569", EdgeKind.VERSION: "#7c3aed", EdgeKind.ORDER: "#94a3b8"}


@dataclass(frozen=True)
class GraphEdge:
    """Dependency of the stage `target` on `source`."""

    source: StepNode
    target: StepNode
    wait: EdgeKind
    columns: tuple[str, ...] = ()
    role: str = ""

    @property
    def label(self) -> str:
        """Columns or version that flow along the edge; empty for an order edge."""
        if self.wait is EdgeKind.VERSION:
            return f"version of {self.role}"
        return ", ".join(self.columns)

    @property
    def is_back_edge(self) -> bool:
        """Whether the edge leads from training back to an earlier stage, for a later step."""
        return self.wait is EdgeKind.VERSION and self.source[0] == self.target[0]


@dataclass(frozen=True)
class DataflowGraph:
    """Calls by (step, stage), steps counted from 0, and their edges in flow order.

    Over several steps, a version edge leads from training to the step that waits for the version.
    With one step, it leads back to the stage that follows.
    """

    title: str
    calls: dict[StepNode, ModelCall]
    edges: tuple[GraphEdge, ...]
    num_steps: int
    max_staleness: int

    @classmethod
    def from_dataflow(
        cls, flow: Dataflow, *, name: str, steps: int, max_staleness: int
    ) -> "DataflowGraph":
        """Unroll an algorithm's dataflow over `steps` steps."""
        graph = flow.unroll_steps(steps, max_staleness)
        edges = [_make_edge(a, b, facts) for a, b, facts in graph.edges(data=True)]
        if steps == 1:
            edges += [
                GraphEdge(
                    (0, trainer.stage), (0, call.stage), EdgeKind.VERSION, role=call.followed_role
                )
                for trainer, call in flow.version_edges
            ]
        title = f"{name}: {len(flow.calls)} stages, versions at most {max_staleness} behind"
        calls = {node: graph.nodes[node]["call"] for node in graph}
        return cls(title, calls, tuple(edges), steps, max_staleness)

    @property
    def forward_graph(self) -> "nx.DiGraph[StepNode]":
        """Nodes and all edges except back edges."""
        graph: nx.DiGraph[StepNode] = nx.DiGraph()
        graph.add_nodes_from(self.calls)
        graph.add_edges_from((e.source, e.target) for e in self.edges if not e.is_back_edge)
        return graph

    def format_node(self, node: StepNode) -> str:
        """Return the stage; over several steps with its step, counted from 1 as in a run."""
        step, stage = node
        return stage if self.num_steps == 1 else f"{stage}[{step + 1}]"


def _make_edge(source: StepNode, target: StepNode, facts: dict[str, Any]) -> GraphEdge:
    columns = tuple(dict.fromkeys(facts.get("columns", ())))
    return GraphEdge(source, target, facts["kind"], columns, facts.get("role", ""))
