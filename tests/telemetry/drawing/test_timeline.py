"""Timeline: boxes at the devices and times of their intervals."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.cli.plan import assign_lanes, list_device_rows, render_timeline, round_tick
from streamrl.dataflow import build_dataflow
from streamrl.placement.meshes import Mesh
from streamrl.planner.problem.problem import DeviceInterval
from tests.planner.notations import placement_from_meshes

GRPO = build_dataflow(("generator_logprobs", "scores"))
SPLIT = placement_from_meshes({"generate": ("0-3", "1-1-4"), "train": ("4-7", "1-1-4")})


def test_rows_are_runs_of_devices_with_equal_calls():
    meshes = {"generate": ("0-7", "1-1-8"), "train": ("0-3", "1-1-4"), "reward": ("6-7", "1-1-2")}
    assert list_device_rows(placement_from_meshes(meshes)) == [Mesh(0, 4), Mesh(4, 2), Mesh(6, 2)]


def test_boxes_match_devices_and_times_of_intervals():
    intervals = [DeviceInterval("generate", 1, 10.0, 16.0), DeviceInterval("train", 0, 12.0, 20.0)]
    root = ET.fromstring(render_timeline("two pools", GRPO, SPLIT, intervals))
    ns = "{http://www.w3.org/2000/svg}"
    boxes = {
        title.text: box.attrib
        for box in root.iter(f"{ns}rect")
        if (title := box.find(f"{ns}title")) is not None
    }
    generate = boxes["generate, step 2: 0 to 6 s"]
    train = boxes["train, step 1: 2 to 10 s"]
    # The chart's width is ten seconds.
    assert float(train["width"]) / float(generate["width"]) == pytest.approx(8 / 6)
    per_second = float(generate["width"]) / 6
    assert float(train["x"]) - float(generate["x"]) == pytest.approx(2 * per_second)
    assert float(train["y"]) > float(generate["y"])
    texts = [text.text for text in root.iter(f"{ns}text")]
    assert "devices 0-3" in texts
    assert "devices 4-7" in texts


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=12))
def test_boxes_of_a_lane_are_disjoint(spans: list[tuple[int, int]]):
    intervals = [DeviceInterval("train", i, a, a + length) for i, (a, length) in enumerate(spans)]
    assigned = assign_lanes(intervals)
    assert sorted(interval.step for interval, _ in assigned) == list(range(len(spans)))
    for first, (lane, lanes) in assigned:
        assert lane < lanes
        for second, (other_lane, _) in assigned:
            overlap = first.start_s < second.end_s and second.start_s < first.end_s
            assert first is second or lane != other_lane or not overlap


@pytest.mark.parametrize(("least", "tick"), [(0.9, 1), (1, 1), (1.1, 2), (30, 50), (0.07, 0.1)])
def test_ticks_are_round(least: float, tick: float):
    assert round_tick(least) == pytest.approx(tick)
