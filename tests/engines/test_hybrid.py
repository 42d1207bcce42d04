"""Trainer and generator of one process have the weights once: nothing moves, and both agree."""

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.engines.hybrid_ranks import BACKENDS, UPDATES, WORLD

pytestmark = pytest.mark.slow
SPLIT = "torch, split"
SHARING = [name for name in BACKENDS if name not in ("deepspeed 3", SPLIT)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by backend, of every version."""
    folder = tmp_path_factory.mktemp("hybrid")
    with socket.socket() as probe:
        probe.bind(("", 0))
        (folder / "port").write_text(str(probe.getsockname()[1]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.hybrid_ranks", str(folder)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("backend", SHARING)
def test_every_parameter_lies_where_the_trainer_has_it_and_a_version_moves_no_byte(
    ranks: list[dict[str, Any]], backend: str
) -> None:
    for seen in ranks:
        assert len(seen[backend]) == UPDATES + 1
        for version in seen[backend]:
            assert version["bound"] > 0
            assert version["apart"] == []
            assert version["copied_bytes"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_served_after_each_update_is_what_the_trainer_says(
    ranks: list[dict[str, Any]], backend: str
) -> None:
    for seen in ranks:
        assert max(version["difference"] for version in seen[backend]) < 1e-4
        first, *later = (version["logprobs"] for version in seen[backend])
        assert all(logprobs != first for logprobs in later), "the updates change something"
    assert ranks[0][backend][-1]["logprobs"] == ranks[1][backend][-1]["logprobs"]


def test_what_a_rank_has_only_a_part_of_comes_once_and_is_laid_down_nowhere_else(
    ranks: list[dict[str, Any]],
) -> None:
    for seen in ranks:
        for version in seen["deepspeed 3"]:
            model = version["model_bytes"]
            assert version["received_bytes"] == model * (WORLD - 1) // WORLD
            assert version["copied_bytes"] == model // WORLD
            # A parcel of its own, and those of both ranks.
            assert version["under_way"] == model + model // WORLD


def test_a_rank_trains_its_part_where_it_is_served_and_copies_only_columns(
    ranks: list[dict[str, Any]],
) -> None:
    for seen in ranks:
        assert len(seen[SPLIT]) == UPDATES + 1
        for version in seen[SPLIT]:
            of = version["sizes"]
            cut = {name for name in of if "_proj" in name}
            columns = {name for name in cut if "o_proj" in name or "down_proj" in name}
            there = {n: of[n] // (WORLD if n in cut else 1) for n in of.keys() - columns}
            assert version["one memory"] == there
            assert version["copied_bytes"] == sum(of[name] for name in columns) // WORLD
            assert version["received_bytes"] == sum(of[name] for name in cut) // WORLD


def test_where_one_rank_cannot_be_filled_none_is(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["deepspeed 3"][0]["unplanned"]


def test_what_is_kept_in_another_type_is_cast_by_the_rank_that_keeps_it(
    ranks: list[dict[str, Any]],
) -> None:
    for seen in ranks:
        assert seen["deepspeed 3"][0]["rounded"]
