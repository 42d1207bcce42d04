"""Output of `streamrl config --graph`: text, or a flowchart in the language Mermaid."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.dataflow import CallKind, Dataflow, EdgeKind, ModelCall, StepNode

KIND_FILLS = {CallKind.GENERATE: "#dbeafe", CallKind.SCORE: "#dcfce7", CallKind.TRAIN: "#ffedd5"}
KIND_BORDERS = {CallKind.GENERATE: "#1d4ed8", CallKind.SCORE: "#15803d", CallKind.TRAIN: "#c2410c"}
WAIT_STROKES = {EdgeKind.DATA: "#475569", EdgeKind.VERSION: "#7c3aed", EdgeKind.ORDER: "#94a3b8"}


class GraphEdge(NamedTuple):
    """Edge of a dataflow graph: stage `target` waits for stage `source`.

    wait: data (columns), version (new weights) or order. label: columns or version that `target`
    waits for; empty for an order edge. is_back: leads to an earlier stage, for a later step.
    """

    source: StepNode
    target: StepNode
    wait: EdgeKind
    label: str = ""
    is_back: bool = False


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
        edges = []
        for source, target, facts in graph.edges(data=True):
            label = ", ".join(dict.fromkeys(facts.get("columns", ())))
            label = f"version of {facts['role']}" if "role" in facts else label
            edges.append(GraphEdge(source, target, facts["kind"], label))
        for trainer, call in flow.version_edges if steps == 1 else ():
            label, ends = f"version of {call.followed_role}", ((0, trainer.stage), (0, call.stage))
            edges.append(GraphEdge(*ends, EdgeKind.VERSION, label, is_back=True))
        title = f"{name}: {len(flow.calls)} stages, versions at most {max_staleness} behind"
        calls = {node: graph.nodes[node]["call"] for node in graph}
        return cls(title, calls, tuple(edges), steps, max_staleness)

    def format_node(self, node: StepNode) -> str:
        """Return a node's label: the stage, with several steps followed by the number of the step.

        Steps are counted from 1, as in a run.
        """
        step, stage = node
        return stage if self.num_steps == 1 else f"{stage}[{step + 1}]"


def render_text(picture: DataflowGraph, notes: Iterable[str] = ()) -> str:
    """Return a dataflow graph as text: stages in flow order, edges, and `notes`, one per line."""
    stages = {call.stage: call for call in picture.calls.values()}
    width = max(len(stage) for stage in (*stages, "  produces")) + 2
    lines = [picture.title, ""]
    for call in stages.values():
        lines.append(f"{call.stage:<{width}}{call.kind.value}, role {call.role}")
        needs, produces = ", ".join(call.needs) or "prompts only", ", ".join(call.produces)
        facts = {"needs": needs, "produces": produces, "follows": call.followed_role}
        lines += [f"  {name:<{width - 2}}{fact}" for name, fact in facts.items() if fact]
    lines += ["", "edges" if picture.num_steps == 1 else f"edges of {picture.num_steps} steps"]
    ends = [" -> ".join(map(picture.format_node, edge[:2])) for edge in picture.edges]
    widest, steps = max(map(len, ends), default=0), picture.max_staleness + 1
    later = f", {steps} step{'s' if steps > 1 else ''} later"
    for end, edge in zip(ends, picture.edges, strict=True):
        text = edge.label or "one step after the other"
        lines.append(f"  {end:<{widest}}  {text}{later if edge.is_back else ''}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)]) + "\n"


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
