"""Output of `streamrl graph`: text, or a flowchart in the language Mermaid."""

import json
from collections.abc import Iterable, Iterator
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


def render_text(picture: DataflowGraph, notes: Iterable[str] = ()) -> str:
    """Return a dataflow graph as text: stages in flow order, edges, and `notes`, one per line."""
    stages = {call.stage: call for call in picture.calls.values()}
    width = max(len(stage) for stage in (*stages, "  produces")) + 2
    lines = [picture.title, ""]
    for call in stages.values():
        lines += [f"{call.stage:<{width}}{call.kind.value}, role {call.role}"]
        lines += [
            f"  {name:<{width - 2}}{facts}" for name, facts in _list_call_facts(call) if facts
        ]
    step_suffix = "" if picture.num_steps == 1 else f" of {picture.num_steps} steps"
    lines += ["", f"edges{step_suffix}"]
    arrows = [
        f"{picture.format_node(e.source)} -> {picture.format_node(e.target)}" for e in picture.edges
    ]
    widest = max(map(len, arrows), default=0)
    lines += [
        f"  {end:<{widest}}  {_describe_edge(edge, picture)}"
        for end, edge in zip(arrows, picture.edges, strict=True)
    ]
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _list_call_facts(call: ModelCall) -> Iterator[tuple[str, str]]:
    """Yield labeled facts on a call: columns it needs and produces, and the role it follows."""
    yield "needs", ", ".join(call.needs) or "prompts only"
    yield "produces", ", ".join(call.produces)
    yield "follows", call.followed_role


def _describe_edge(edge: GraphEdge, picture: DataflowGraph) -> str:
    if edge.wait is EdgeKind.ORDER:
        return "one step after the other"
    if edge.is_back_edge:
        steps = picture.max_staleness + 1
        return f"{edge.label}, {steps} step{'s' if steps > 1 else ''} later"
    return edge.label


def render_mermaid(picture: DataflowGraph) -> str:
    """Return a dataflow graph as a Mermaid flowchart, with a subgraph for each of several steps."""
    lines = ["---", f"title: {json.dumps(picture.title)}", "---", "flowchart LR"]
    names = {node: f"n{i}" for i, node in enumerate(picture.calls)}
    for step in range(picture.num_steps):
        nodes = [
            f"  {names[node]}[{_quote_lines(picture.format_node(node), call.role)}]"
            f":::{call.kind.value}"
            for node, call in picture.calls.items()
            if node[0] == step
        ]
        if picture.num_steps > 1:
            nodes = [f'  subgraph s{step}["step {step + 1}"]', *nodes, "  end"]
        lines += nodes
    for edge in picture.edges:
        arrow = "-->" if edge.wait is EdgeKind.DATA else "-.->"
        label = f"|{_quote_lines(*edge.label.split(', '))}|" if edge.label else ""
        lines.append(f"  {names[edge.source]} {arrow}{label} {names[edge.target]}")
    for wait, stroke in WAIT_STROKES.items():
        numbers = [str(i) for i, edge in enumerate(picture.edges) if edge.wait is wait]
        if numbers:
            lines.append(f"  linkStyle {','.join(numbers)} stroke:{stroke}")
    for kind in dict.fromkeys(call.kind for call in picture.calls.values()):
        style = f"fill:{KIND_FILLS[kind]},stroke:{KIND_BORDERS[kind]},color:#0f172a"
        lines.append(f"  classDef {kind.value} {style}")
    return "\n".join(lines) + "\n"


def _quote_lines(*lines: str) -> str:
    """Quote a Mermaid label of several lines, with special characters as `#` entities."""
    escaped = (
        line.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;") for line in lines
    )
    return f'"{"<br/>".join(escaped)}"'
