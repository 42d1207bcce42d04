"""Tensor-parallel ranks that train in the memory of their generator."""

from typing import Any

import pytest

from tests import forked
from tests.engines.mesh_ranks import make_model
from tests.engines.moved_ranks import CASES, UPDATES, WORLD, run_rank
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")
EQUAL_SPLIT, UNSPLIT, SHARDED = CASES


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return each rank's results, by case."""
    folder, ports = tmp_path_factory.mktemp("moved"), find_free_ports(1)
    return forked.run(run_rank, [(rank, folder, *ports) for rank in range(WORLD)], timeout_s=400)


def count_bytes(case: str) -> dict[str, int]:
    """Return the bytes of each parameter of a case's model."""
    return {
        name: parameter.nbytes for name, parameter in make_model(CASES[case][0]).named_parameters()
    }


def list_columns(case: str) -> set[str]:
    return {
        name for name in count_bytes(case) if name.endswith(("o_proj.weight", "down_proj.weight"))
    }


@pytest.mark.parametrize("case", CASES)
def test_aliasing_the_generator_does_not_change_updates_bitwise(
    ranks: list[dict[str, Any]], case: str
):
    for results in ranks:
        separate, aliased = results[case]["separate"], results[case]["aliased"]
        assert aliased["norms"] == separate["norms"]
        for name, expected in separate["parameters"].items():
            assert aliased["parameters"][name].equal(expected), name


@pytest.mark.parametrize("case", CASES)
def test_served_weights_equal_trained_weights(ranks: list[dict[str, Any]], case: str):
    for results in ranks:
        assert results[case]["aliased"]["served"] == [True] * UPDATES


def test_equal_splits_copy_no_byte(ranks: list[dict[str, Any]]):
    for results in ranks:
        aliased = results[EQUAL_SPLIT]["aliased"]
        assert set(aliased["aliased_bytes"]) == count_bytes(EQUAL_SPLIT).keys()
        assert aliased["transfers"] == [(0, 0)] * UPDATES


def test_an_unsplit_generator_copies_only_row_parallel_columns(ranks: list[dict[str, Any]]):
    sizes_bytes, unaliased = count_bytes(UNSPLIT), list_columns(UNSPLIT)
    for results in ranks:
        aliased = results[UNSPLIT]["aliased"]
        assert set(aliased["aliased_bytes"]) == sizes_bytes.keys() - unaliased
        copied_bytes = sum(sizes_bytes[name] for name in unaliased) // 2
        assert [copied for copied, _ in aliased["transfers"]] == [copied_bytes] * UPDATES
        padding = 3 * sizes_bytes["model.embed_tokens.weight"] // 64
        assert aliased["count_storage_bytes"] == sum(sizes_bytes.values()) + padding + copied_bytes


def test_fsdp2_shards_do_not_alias_the_generator(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert results[SHARDED]["aliased"]["aliased_bytes"] == {}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_loaded_into_the_aliased_memory(ranks: list[dict[str, Any]], case: str):
    for results in ranks:
        for result in results[case].values():
            for name, expected in result["parameters"].items():
                assert result["again"][name].equal(expected), name
