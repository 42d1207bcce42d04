"""Which tests stay together where two workers share them."""

from pathlib import Path

from tests.lanes import LANES, ORDER, place, unit

ROOT = Path(__file__).resolve().parents[1]


def test_whole_runs_are_a_lane_and_engines_are_the_other() -> None:
    run, killed = unit("tests/e2e/test_run.py::test_a"), unit("tests/chaos/test_chaos.py::test_b")
    engine, actor = unit("tests/engines/test_lora.py::test_c"), unit("tests/actors/test_d.py::e[f]")
    assert run == killed != engine == actor


def test_recipes_go_to_whoever_is_done_first_and_other_files_stay_whole() -> None:
    file = "tests/buffer/test_shard.py"
    recipes = [f"tests/e2e/test_recipes.py::test_a[{name}]" for name in ("ppo", "shared")]
    assert [unit(recipe) for recipe in recipes] == recipes
    assert unit(f"{file}::test_a[1::2]") == unit(f"{file}::test_b") == file


def test_runs_come_last_and_recipes_behind_them() -> None:
    nodeids = ["tests/e2e/test_recipes.py::a", "tests/chaos/b.py::c", "tests/e2e/d.py::e"]
    nodeids += ["tests/workers/f.py::g", "tests/buffer/h.py::i"]
    assert sorted(nodeids, key=place) == [*nodeids[3:], *nodeids[2::-1]]


def test_what_lanes_name_is_there() -> None:
    assert all((ROOT / path).exists() for path in [*ORDER, *sum(LANES.values(), ())])
