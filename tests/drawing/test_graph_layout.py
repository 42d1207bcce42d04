"""Layout of a graph: no overlaps, flow order, lines clear of text."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.run_config import load_config
from streamrl.dataflow import POLICY, CallKind, Dataflow, ModelCall
from streamrl.drawing.dataflow_graph import DataflowGraph
from streamrl.drawing.graph_layout import LINE_HEIGHT, GraphLayout, NodeBox, text_width

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = ("grpo_arithmetic", "ppo_arithmetic", "remax_arithmetic", "safe_rlhf_toy")
FLOWS = {recipe: load_config(CONFIGS / f"{recipe}.yaml").dataflow for recipe in RECIPES}
Area = tuple[float, float, float, float]


def make_layout(flow: Dataflow, steps: int, max_staleness: int) -> GraphLayout:
    picture = DataflowGraph.from_dataflow(flow, name="x", steps=steps, max_staleness=max_staleness)
    return GraphLayout(picture, top=40, left=64)


def box_area(box: NodeBox) -> Area:
    return box.x, box.y, box.x + box.width, box.y + box.height


def label_areas(layout: GraphLayout) -> list[Area]:
    return [
        (
            x,
            y - 10,
            x + max(text_width(text, 11) for text in line.label),
            y + extra_lines * LINE_HEIGHT + 3,
        )
        for line in layout.edge_routes
        if line.label
        for (x, y), extra_lines in [(line.label_position, len(line.label) - 1)]
    ]


def intersects(a: Area, b: Area) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@given(st.sampled_from(RECIPES), st.integers(1, 5), st.integers(0, 3))
def test_boxes_and_labels_are_disjoint_and_inside(recipe: str, steps: int, bound: int) -> None:
    layout = make_layout(FLOWS[recipe], steps, bound)
    areas = [*map(box_area, layout.node_boxes.values()), *label_areas(layout)]
    for i, box in enumerate(areas):
        assert not any(intersects(box, other) for other in areas[:i])
        assert box[0] >= 64
        assert box[1] >= 40
        assert box[2] <= layout.width
        assert box[3] <= layout.height


@given(st.sampled_from(RECIPES), st.integers(1, 5), st.integers(0, 3))
def test_lines_avoid_boxes_and_labels(recipe: str, steps: int, bound: int) -> None:
    layout = make_layout(FLOWS[recipe], steps, bound)
    obstacles = [*map(box_area, layout.node_boxes.values()), *label_areas(layout)]
    for line in layout.edge_routes:
        for (x, y), (to_x, to_y) in pairwise(line.points):
            # A curve stays within the rectangle between its end points.
            low, high = min(y, to_y), max(y, to_y)
            extent = min(x, to_x), low, max(x, to_x), max(high, low + 0.01)
            assert not any(intersects(extent, obstacle) for obstacle in obstacles), line.edge


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_edges_lead_right_and_end_at_their_box(recipe: str) -> None:
    layout = make_layout(FLOWS[recipe], 3, 1)
    for line in layout.edge_routes:
        start, end = layout.node_boxes[line.edge.source], layout.node_boxes[line.edge.target]
        assert line.points[0] == start.exit_point
        assert line.points[-1][0] == end.x
        assert end.y < line.points[-1][1] < end.y + end.height
        assert all(a[0] <= b[0] for a, b in pairwise(line.points))


def test_later_steps_are_below_and_dependents_to_the_right() -> None:
    boxes = make_layout(FLOWS["grpo_arithmetic"], 3, 1).node_boxes
    assert boxes[0, "generate"].x == boxes[1, "generate"].x < boxes[0, "train"].x
    assert boxes[2, "generate"].x > boxes[0, "train"].x
    bottoms = [boxes[i, "train"].y + boxes[i, "train"].height for i in range(3)]
    assert bottoms[0] < boxes[1, "train"].y < bottoms[1] < boxes[2, "train"].y


def test_long_name_widens_its_box() -> None:
    name = "a_stage_with_quite_a_long_name_of_its_own"
    layout = make_layout(Dataflow([ModelCall(name, POLICY, CallKind.TRAIN, (), ())]), 1, 0)
    assert layout.node_boxes[0, name].width > text_width(name, 13)
    assert layout.width > layout.node_boxes[0, name].width
