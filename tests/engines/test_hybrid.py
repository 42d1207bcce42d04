"""Trainer and generator of a process share the weights: no copies, equal results."""

from typing import Any

import pytest

from tests import forked
from tests.engines.conftest import list_cases, param_of_ranks
from tests.engines.hybrid_ranks import BACKENDS, UPDATES, WORLD, HybridCase, run_rank, write_model
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")
SPLIT, RESHARDED = "torch, split", "deepspeed 3"
QUICK = ("torch", RESHARDED, SPLIT)
BACKEND_PARAMS = {
    name: param_of_ranks(name, cases=[HybridCase(name)], is_quick=name in QUICK)
    for name in BACKENDS
}
ALIASING = [param for name, param in BACKEND_PARAMS.items() if name not in (RESHARDED, SPLIT)]


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return each rank's results for every version, by backend."""
    path = write_model(tmp_path_factory.mktemp("hybrid"))
    order = list(BACKENDS)
    cases = sorted(list_cases(request, HybridCase), key=lambda case: order.index(case.backend))
    (port,) = find_free_ports(1)
    arguments = [(rank, path, port, cases) for rank in range(WORLD)]
    return forked.run(run_rank, arguments, timeout_s=400)


@pytest.mark.parametrize("backend", ALIASING)
def test_the_generator_aliases_the_trainers_parameters_and_a_version_copies_no_byte(
    ranks: list[dict[str, Any]], backend: str
):
    for results in ranks:
        assert len(results[backend]) == UPDATES + 1
        for version in results[backend]:
            assert version["bound"] > 0
            assert version["unaliased"] == []
            assert version["copied_bytes"] == 0


@pytest.mark.parametrize("backend", BACKEND_PARAMS.values())
def test_served_logprobs_equal_the_trainers_after_each_update(
    ranks: list[dict[str, Any]], backend: str
):
    for results in ranks:
        assert max(version["difference"] for version in results[backend]) < 1e-4
        first, *later = (version["logprobs"] for version in results[backend])
        assert all(logprobs != first for logprobs in later), "the updates change something"
    assert ranks[0][backend][-1]["logprobs"] == ranks[1][backend][-1]["logprobs"]


@pytest.mark.ranks(HybridCase(RESHARDED))
def test_missing_shards_are_received_once_without_staging(ranks: list[dict[str, Any]]):
    for results in ranks:
        for version in results[RESHARDED]:
            model = version["model_bytes"]
            assert version["received_bytes"] == model * (WORLD - 1) // WORLD
            assert version["copied_bytes"] == model // WORLD
            # The peak is the bytes of this rank and those of both ranks.
            assert version["in_flight_bytes"] == model + model // WORLD


@pytest.mark.ranks(HybridCase(SPLIT))
def test_trained_shards_alias_the_generator_and_only_columns_are_copied(
    ranks: list[dict[str, Any]],
):
    for results in ranks:
        assert len(results[SPLIT]) == UPDATES + 1
        for version in results[SPLIT]:
            sizes = version["sizes"]
            cut = {n for n in sizes if any(part in n for part in ("_proj", "embed_", "lm_head"))}
            columns = {name for name in cut if "o_proj" in name or "down_proj" in name}
            aliased_bytes = {
                n: sizes[n] // (WORLD if n in cut else 1) for n in sizes.keys() - columns
            }
            assert version["aliased_bytes"] == aliased_bytes
            assert version["copied_bytes"] == sum(sizes[name] for name in columns) // WORLD
            assert version["received_bytes"] == sum(sizes[name] for name in cut) // WORLD


@pytest.mark.ranks(HybridCase(RESHARDED))
def test_resharding_is_off_if_any_rank_cannot_be_written(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert results[RESHARDED][0]["is_off"]


@pytest.mark.ranks(HybridCase(RESHARDED))
def test_resharding_casts_shards_of_another_dtype_on_the_source_rank(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert results[RESHARDED][0]["is_cast"]
