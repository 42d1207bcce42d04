"""Devices over time: every piece of work is where and when it was."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import build_dataflow
from streamrl.drawing.timeline import assign_lanes, list_device_rows, render_timeline, round_tick
from streamrl.placement import Mesh, placement_from_meshes
from streamrl.placement.problem import DeviceInterval

GRPO = build_dataflow(("generator_logprobs", "scores"))
SPLIT = placement_from_meshes({"generate": ("0-3", "1-1-4"), "train": ("4-7", "1-1-4")})


def test_a_row_for_each_run_of_devices_that_have_the_same_calls() -> None:
    meshes = {"generate": ("0-7", "1-1-8"), "train": ("0-3", "1-1-4"), "reward": ("6-7", "1-1-2")}
    assert list_device_rows(placement_from_meshes(meshes)) == [Mesh(0, 4), Mesh(4, 2), Mesh(6, 2)]


def test_boxes_are_where_and_when_the_work_was() -> None:
    work = [DeviceInterval("generate", 1, 10.0, 16.0), DeviceInterval("train", 0, 12.0, 20.0)]
    root = ET.fromstring(render_timeline("two pools", GRPO, SPLIT, work))
    ns = "{http://www.w3.org/2000/svg}"
    boxes = {
        title.text: box.attrib
        for box in root.iter(f"{ns}rect")
        if (title := box.find(f"{ns}title")) is not None
    }
    generate = boxes["generate, step 2: 0 to 6 s"]
    train = boxes["train, step 1: 2 to 10 s"]
    # Ten seconds are the width of the picture.
    assert float(train["width"]) / float(generate["width"]) == pytest.approx(8 / 6)
    per_second = float(generate["width"]) / 6
    assert float(train["x"]) - float(generate["x"]) == pytest.approx(2 * per_second)
    assert float(train["y"]) > float(generate["y"])
    texts = [text.text for text in root.iter(f"{ns}text")]
    assert "devices 0-3" in texts
    assert "devices 4-7" in texts


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=12))
def test_no_two_boxes_of_a_lane_meet(spans: list[tuple[int, int]]) -> None:
    work = [DeviceInterval("train", i, a, a + length) for i, (a, length) in enumerate(spans)]
    placed = assign_lanes(work)
    assert sorted(each.step for each, _ in placed) == list(range(len(spans)))
    for one, (lane, lanes) in placed:
        assert lane < lanes
        for other, (its, _) in placed:
            meet = one.start_s < other.end_s and other.start_s < one.end_s
            assert one is other or lane != its or not meet


@pytest.mark.parametrize(("least", "tick"), [(0.9, 1), (1, 1), (1.1, 2), (30, 50), (0.07, 0.1)])
def test_marks_of_time_are_round(least: float, tick: float) -> None:
    assert round_tick(least) == pytest.approx(tick)
