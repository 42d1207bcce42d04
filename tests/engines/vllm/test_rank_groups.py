"""Trainer and generators share processes: no copies, equal results, and a dead rank."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.model_trainer import make_nodes
from streamrl.engines.vllm.rank_groups import assign_rank_groups
from streamrl.resharding.plans import NodeTopology
from tests import forked
from tests.engines.conftest import list_cases, param_of_ranks
from tests.engines.rank_group_ranks import (
    CAST_MESH,
    RANKS,
    UPDATES,
    make_model,
    run_dying_rank,
    run_rank,
    write_model,
)
from tests.engines.tiny_qwen import save, tiny_model
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")

RUNS = {
    # Ranks, ranks of a generator, key-value heads, meshes; groups are those of the first mesh.
    # DeepSpeed comes last: it leaves patched functions behind that do not support FSDP.
    "four": (4, 2, 4, ("tensor", "sharded")),
    "two, sharing a head": (2, 2, 1, ("whole", "sharded")),
    "two": (2, 2, 4, ("tensor",)),
    "each alone": (2, 1, 2, ("whole", "tensor", "zero 3")),
    "each alone, with DeepSpeed": (2, 1, 2, ("zero 1", "zero 2")),
}


class Run(NamedTuple):
    """A run of rank processes that a test uses."""

    name: str


QUICK = ("two", "each alone")


def parametrize_runs(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parametrize a test; the first parameter is a run, and all but those of QUICK are slow."""
    return [
        param_of_ranks(*case, cases=[Run(case[0])], is_quick=case[0] in QUICK) for case in cases
    ]


NOTHING_LACKING = [("two, sharing a head", "whole"), ("two", "tensor")]
ALIASED = [("each alone", "whole")] + [
    ("each alone, with DeepSpeed", f"zero {stage}") for stage in (1, 2)
]
"""Trainers with whole parameters, which the generator of the process takes as its own."""
CASES = [(run, mesh) for run, (_, _, _, meshes) in RUNS.items() for mesh in meshes]


@pytest.mark.parametrize(
    ("settings", "size", "rank_groups"),
    [
        # Tensor ranks at intervals of t / t_g, in every data-parallel replica.
        ({"world_size": 4, "tensor_parallel": 4}, 2, [(0, 2), (1, 3)]),
        ({"world_size": 8, "tensor_parallel": 4}, 2, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ({"world_size": 4, "tensor_parallel": 2}, 2, [(0, 1), (2, 3)]),
        # More parts than in training: ranks 0 and 2 train the first half, and serve a quarter each.
        ({"world_size": 4, "tensor_parallel": 2}, 4, [(0, 2, 1, 3)]),
        # Consecutive ranks, to stay in a node: ranks 2 and 3 both train the second half.
        ({"world_size": 4, "zero_stage": 3}, 2, [(0, 1), (3, 2)]),
        # All ranks train the same: consecutive ranks.
        ({"world_size": 4}, 2, [(0, 1), (2, 3)]),
        ({"world_size": 3}, 1, [(0,), (1,), (2,)]),
    ],
)
def test_rank_groups_maximize_the_overlap_of_trained_and_served_shards(
    settings: dict[str, Any], size: int, rank_groups: list[tuple[int, ...]]
):
    assert list(assign_rank_groups(TrainerConfig(backend="torch", **settings), size)) == rank_groups


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_rank_groups_stay_within_a_node_where_possible(tensor_parallel: int):
    trainer = TrainerConfig(
        backend="torch", zero_stage=3, world_size=32, tensor_parallel=tensor_parallel
    )
    rank_groups = assign_rank_groups(trainer, 8)
    assert {frozenset(rank // 8 for rank in group) for group in rank_groups} == {
        frozenset([node]) for node in range(4)
    }
    assert sorted(rank for group in rank_groups for rank in group) == list(range(32))


@pytest.mark.parametrize(
    ("nodes", "per_node"), [("aaaabbbb", 4), ("aaaa", 4), ("abab", 1), ("aaab", 4)]
)
def test_the_topology_follows_from_the_nodes_of_the_ranks(nodes: str, per_node: int):
    assert make_nodes(list(nodes)) == NodeTopology(per_node)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Return each rank's results by run."""
    results_by_run: dict[str, list[Any]] = {}
    for (name,) in list_cases(request, Run):
        world, size, heads, meshes = RUNS[name]
        path = write_model(heads, tmp_path_factory.mktemp("rank_group"))
        (port,) = find_free_ports(1)
        arguments = [(rank, path, port, world, size, meshes) for rank in range(world)]
        results_by_run[name] = forked.run(run_rank, arguments, timeout_s=400)
    return results_by_run


@pytest.mark.parametrize(("name", "mesh"), parametrize_runs(CASES))
def test_a_generator_serves_the_trainers_weights_after_each_update(
    results: dict[str, list[Any]], name: str, mesh: str
):
    leaders = [rank for rank in results[name] if "tokens" in rank["meshes"]]
    assert len(leaders) == RUNS[name][0] // RUNS[name][1]
    for leader in leaders:
        updates = leader["meshes"][mesh]["updates"]
        assert len(updates) == UPDATES + 1
        assert max(update["difference"] for update in updates) < 1e-4
        first, *later = (update["logprobs"] for update in updates)
        assert all(logprobs != first for logprobs in later), "the updates change something"


@pytest.mark.parametrize(("name", "mesh"), parametrize_runs(ALIASED))
def test_a_generator_aliases_the_trainers_parameters_and_a_version_copies_no_byte(
    results: dict[str, list[Any]], name: str, mesh: str
):
    for rank in results[name]:
        for update in rank["meshes"][mesh]["updates"]:
            assert update["bound"] > 0
            assert (update["unaliased"], update["copied_bytes"]) == ([], 0)


@pytest.mark.parametrize(
    ("name", "mesh"), parametrize_runs(case for case in CASES if case not in ALIASED)
)
def test_a_rank_receives_only_the_elements_it_lacks_once(
    results: dict[str, list[Any]], name: str, mesh: str
):
    for rank in results[name]:
        mesh_results = rank["meshes"][mesh]
        assert mesh_results["is_off"]
        if RUNS[name][1] > 1:
            assert mesh_results["served_bytes"] < 0.6 * mesh_results["model_bytes"]
        for update in mesh_results["updates"]:
            assert update["received_bytes"] == mesh_results["lacking_bytes"]
        # Each half is trained by the rank that serves it, or by both.
        assert bool(mesh_results["lacking_bytes"]) is ((name, mesh) not in NOTHING_LACKING)


@pytest.mark.ranks(Run("each alone"))
def test_resharding_casts_shards_of_another_dtype_on_the_source_rank(
    results: dict[str, list[Any]],
):
    for rank in results["each alone"]:
        assert rank["meshes"][CAST_MESH]["is_cast"]


@pytest.mark.parametrize(
    ("name", "copies_columns"),
    parametrize_runs([("two", False), ("four", True), ("each alone", True)]),
)
def test_trained_shards_alias_served_ones_and_only_strided_ones_are_copied(
    results: dict[str, list[Any]], name: str, copies_columns: bool
):
    _, size, heads, _ = RUNS[name]
    names = {n for n, _ in make_model(heads).named_parameters()}
    # A split generator splits embedding and head; the trainer does not.
    copied = {"model.embed_tokens.weight", "lm_head.weight"} if size > 1 else set[str]()
    copied |= {n for n in names if copies_columns and ("o_proj" in n or "down_proj" in n)}
    for rank in results[name]:
        mesh_results = rank["meshes"]["tensor"]
        aliased_bytes = mesh_results["aliased_bytes"]
        assert aliased_bytes.keys() == names - copied
        rest = mesh_results["served_bytes"] - sum(aliased_bytes.values())
        for update in mesh_results["updates"]:
            assert update["copied_bytes"] == rest - update["received_bytes"]


@pytest.mark.parametrize(
    "name", parametrize_runs((name,) for name, (_, size, _, _) in RUNS.items() if size > 1)
)
def test_a_split_generator_samples_the_same_tokens_after_sleep(
    results: dict[str, list[Any]], name: str
):
    for rank in results[name]:
        before, after = rank["meshes"]["kv_bytes"]
        assert before > 1 << 20 and after == 0
        if "tokens" in rank["meshes"]:
            assert rank["meshes"]["tokens"] == rank["meshes"]["tokens_after_sleep"]


@pytest.mark.parametrize(
    "name", parametrize_runs((name,) for name, (_, size, _, _) in RUNS.items() if size > 1)
)
def test_gathered_parameters_that_miss_a_rank_are_refused_naming_it(
    results: dict[str, list[Any]], name: str
):
    for number, rank in enumerate(results[name]):
        missed = f"the generator's part of rank {number} holds parameters that differ"
        is_peer = number != rank["rank_group"][0]
        assert rank["meshes"]["gathered"].startswith(missed if is_peer else "")
        assert bool(rank["meshes"]["gathered"]) is is_peer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "message"),
    [
        (0, "rank 0 of the split generator, which leads it, has ended"),
        (1, "rank 1 of the split generator has died"),
    ],
)
def test_a_split_generator_names_the_dead_rank(tmp_path: Path, victim: int, message: str):
    path = save(tiny_model(tied=True, seed=1), tmp_path / "model", ends=False)
    (port,) = find_free_ports(1)
    arguments = [(rank, path, port, victim, tmp_path / "sampling") for rank in RANKS]
    assert (
        message in forked.run(run_dying_rank, arguments, timeout_s=400, killed=[victim])[1 - victim]
    )
