"""Data of `streamrl graph`: the dataflow of a training step, or unrolled over several steps."""

from dataclasses import dataclass
from typing import Any

from streamrl.dataflow import CallKind, Dataflow, EdgeKind, ModelCall, StepNode

KIND_FILLS = {CallKind.GENERATE: "#dbeafe", CallKind.SCORE: "#dcfce7", CallKind.TRAIN: "#ffedd5"}
KIND_BORDERS = {CallKind.GENERATE: "#1d4ed8", CallKind.SCORE: "#15803d", CallKind.TRAIN: "#c2410c"}
WAIT_STROKES = {EdgeKind.DATA: "#475569", EdgeKind.VERSION: "#7c3aed", EdgeKind.ORDER: "#94a3b8"}


@dataclass(frozen=True)
class GraphEdge:
    """Edge of a dataflow graph: stage `target` waits for stage `source`.

    wait: data (columns), version (new weights) or order.
    role: for a version edge, role of the trained model.
    """

    source: StepNode
    target: StepNode
    wait: EdgeKind
    columns: tuple[str, ...] = ()
    role: str = ""

    @property
    def label(self) -> str:
        """Text on the edge: columns or version that `target` waits for; empty for an order edge."""
        if self.wait is EdgeKind.VERSION:
            return f"version of {self.role}"
        return ", ".join(self.columns)

    @property
    def is_back_edge(self) -> bool:
        """Whether the edge leads from training back to an earlier stage, for a later step."""
        return self.wait is EdgeKind.VERSION and self.source[0] == self.target[0]


@dataclass(frozen=True)
class DataflowGraph:
    """Dataflow graph to draw: its calls by (step, stage), steps counted from 0, and its edges.

    Calls and edges are in flow order. Over several steps, a version edge leads from training to the
    step that waits for the version. With a single step, the edge leads back to the stage that
    follows the trained model.
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
        """Return the graph of an algorithm's dataflow, unrolled over `steps` steps."""
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

    def format_node(self, node: StepNode) -> str:
        """Return a node's label: the stage, with several steps followed by the number of the step.

        Steps are counted from 1, as in a run.
        """
        step, stage = node
        return stage if self.num_steps == 1 else f"{stage}[{step + 1}]"


def _make_edge(source: StepNode, target: StepNode, facts: dict[str, Any]) -> GraphEdge:
    columns = tuple(dict.fromkeys(facts.get("columns", ())))
    return GraphEdge(source, target, facts["kind"], columns, facts.get("role", ""))
