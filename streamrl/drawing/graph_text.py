"""`streamrl graph` in words: for people, and in Graphviz's language."""

from collections.abc import Iterable, Iterator, Mapping

from streamrl.dataflow import Call, Wait
from streamrl.drawing.dataflow_graph import BORDER, FILL, STROKE, Edge, Picture

STYLE = {Wait.DATA: "solid", Wait.VERSION: "dashed", Wait.ORDER: "dotted"}


def text(picture: Picture, notes: Iterable[str] = ()) -> str:
    """The stages in flow order, the edges, and notes; every line ends in a newline."""
    stages = {call.stage: call for call in picture.calls.values()}
    width = max(len(stage) for stage in (*stages, "  produces")) + 2
    lines = [picture.title, ""]
    for call in stages.values():
        lines += [f"{call.stage:<{width}}{call.kind.value}, role {call.role}"]
        lines += [f"  {name:<{width - 2}}{facts}" for name, facts in _facts(call) if facts]
    of = "" if picture.num_steps == 1 else f" of {picture.num_steps} steps"
    lines += ["", f"edges{of}"]
    ends = [f"{picture.name(e.source)} -> {picture.name(e.target)}" for e in picture.edges]
    widest = max(map(len, ends), default=0)
    lines += [
        f"  {end:<{widest}}  {_what(edge, picture)}"
        for end, edge in zip(ends, picture.edges, strict=True)
    ]
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _facts(call: Call) -> Iterator[tuple[str, str]]:
    yield "needs", ", ".join(call.needs) or "prompts only"
    yield "produces", ", ".join(call.produces)
    yield "follows", call.follows


def _what(edge: Edge, picture: Picture) -> str:
    if edge.wait is Wait.ORDER:
        return "one step after the other"
    if edge.is_back:
        steps = picture.max_staleness + 1
        return f"{edge.label}, {steps} step{'s' if steps > 1 else ''} later"
    return edge.label


def dot(picture: Picture) -> str:
    """The picture for Graphviz: a cluster per step if there are several."""
    lines = [
        f"digraph {_quoted(picture.title)} {{",
        f"  graph {_attributes({'rankdir': 'LR', 'label': picture.title})};",
        f"  node {_attributes({'shape': 'box', 'style': 'filled', 'fontname': 'monospace'})};",
        f"  edge {_attributes({'fontname': 'monospace', 'fontsize': '10'})};",
    ]
    for step in range(picture.num_steps):
        nodes = [
            _node(picture, node, call) for node, call in picture.calls.items() if node[0] == step
        ]
        if picture.num_steps > 1:
            label = _attributes({"label": f"step {step + 1}"})
            lines += [f'  subgraph "cluster_{step + 1}" {{', f"    graph {label};"]
            lines += [f"  {line}" for line in nodes] + ["  }"]
        else:
            lines += nodes
    for edge in picture.edges:
        ends = f"{_quoted(picture.name(edge.source))} -> {_quoted(picture.name(edge.target))}"
        facts = {"label": edge.label.replace(", ", "\n"), "style": STYLE[edge.wait]}
        facts |= {"color": STROKE[edge.wait]} | ({"constraint": "false"} if edge.is_back else {})
        lines.append(f"  {ends} {_attributes(facts)};")
    return "\n".join([*lines, "}"]) + "\n"


def _node(picture: Picture, node: tuple[int, str], call: Call) -> str:
    facts = {
        "label": f"{call.stage}\n{call.role}",
        "fillcolor": FILL[call.kind],
        "color": BORDER[call.kind],
    }
    return f"  {_quoted(picture.name(node))} {_attributes(facts)};"


def _attributes(facts: Mapping[str, str]) -> str:
    return f"[{', '.join(f'{name}={_quoted(value)}' for name, value in facts.items())}]"


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
