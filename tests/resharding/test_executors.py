"""Executors over gloo: bit-exact, in bounded memory, with a single version and deadlines."""

import re
from typing import Any

import pytest
import torch

from benchmarks.shard_memory import allocate_storage
from streamrl.resharding import executors
from streamrl.resharding.executors import (
    PointToPointExecutor,
    get_collective_device,
    is_gather_least_bytes,
)
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.layouts import (
    create_layout,
    create_whole_shard,
    partition_fsdp2,
    partition_zero3,
)
from streamrl.resharding.plans import plan_copies, plan_gather
from streamrl.resharding.storage import create_from_buffers
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from tests import forked
from tests.resharding.ranks import (
    CLUSTER,
    DTYPES,
    LATE_S,
    SMALL,
    WORLD,
    list_pairs,
    make_layout,
    run_rank,
)

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all cases on four ranks; return the results of each."""
    folder = tmp_path_factory.mktemp("ranks")
    return forked.run(run_rank, [(rank, folder) for rank in range(WORLD)], timeout_s=240)


def test_every_executor_is_bit_exact_between_any_layouts(ranks: list[dict[str, Any]]):
    for rank, results in enumerate(ranks):
        wrong = [case for case, outcome in results["executors"].items() if not outcome["exact"]]
        assert not wrong, f"rank {rank}"


def test_moved_bytes_equal_the_plan(ranks: list[dict[str, Any]]):
    for name, (source, target) in list_pairs().items():
        plans: dict[str, Any] = {
            "copies": plan_copies(source, target, CLUSTER),
            "gather": plan_gather(source, target, CLUSTER, [list(range(WORLD))]),
        }
        for kind, plan in plans.items():
            report = plan.report_bytes()
            for bucket in ("whole", "cut"):
                results = [rank["executors"][f"{name}, {kind}, {bucket}"] for rank in ranks]
                for rank, outcome in enumerate(results):
                    counts = report.rank_bytes[rank]
                    assert outcome["received"] == counts.received_bytes, (name, kind, bucket)
                    assert outcome["sent"] == counts.sent_bytes, (name, kind, bucket)
                    assert outcome["peak"] == counts.memory_bytes + outcome["buffers"], (
                        name,
                        kind,
                        bucket,
                    )


def test_equal_layouts_move_no_bytes(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert results["executors"]["itself, copies, whole"]["received"] == 0
        assert results["executors"]["itself, copies, whole"]["rounds"] == 0


def test_buckets_bound_the_bytes_in_flight(ranks: list[dict[str, Any]]):
    for results in ranks:
        for case, outcome in results["executors"].items():
            if case.endswith("cut"):
                # Sent and received, or contributed and gathered.
                assert outcome["buffers"] <= 2 * SMALL, case
    case_in_one_piece = "2-2-1 to 1-1-4, copies, whole"
    assert max(results["executors"][case_in_one_piece]["buffers"] for results in ranks) > 2 * SMALL


def test_the_chosen_executor_moves_as_many_bytes_as_the_copy_plan(ranks: list[dict[str, Any]]):
    full, all_ranks = make_layout("1-1-4"), [list(range(WORLD))]
    sources = {
        "zero": partition_zero3(full, all_ranks),
        "fsdp": partition_fsdp2(full, all_ranks),
        "whole": full,
    }
    for name, source in sources.items():
        report = plan_copies(source, full, CLUSTER).report_bytes()
        for rank, results in enumerate(ranks):
            outcome = results["chosen"][name]
            assert outcome["exact"] and outcome["buffers"] <= 2 * SMALL
            assert outcome["received"] == report.rank_bytes[rank].received_bytes, name


@pytest.mark.parametrize("rows", [8, 6, 1], ids=["even", "the last has less", "the last has none"])
def test_a_gather_is_chosen_if_it_moves_only_missing_data(rows: int):
    model = ModelSpec((TensorSpec("a", (rows, 1), (0,)), TensorSpec("b", (8,), (0,))), 1)
    full = create_layout(model, RankGrid.from_text("1-1-4").assign_ranks())
    parts = partition_zero3(full, [list(range(WORLD))])
    copies = plan_copies(parts, full, CLUSTER)
    assert is_gather_least_bytes(copies, plan_gather(parts, full, CLUSTER, [list(range(WORLD))]))


def test_a_gather_is_not_chosen_if_all_ranks_have_all_data():
    full = make_layout("1-1-4")
    copies = plan_copies(full, full, CLUSTER)
    gather = plan_gather(full, full, CLUSTER, [list(range(WORLD))])
    assert not is_gather_least_bytes(copies, gather)


def test_shards_may_lie_in_padded_slices_of_a_larger_buffer():
    spec = TensorSpec("a", (5, 3), (0,))
    shard = create_whole_shard("a", spec.shape).chunk_flat(1, 2)
    assert shard is not None
    memory = torch.arange(20)
    # Elements 8 to 14 and one of padding, from the third element of the memory.
    storage = create_from_buffers({"a": memory[3:11]}, {"a": shard}, version=7)
    results = torch.full(spec.shape, -1)
    for _, box, view in storage:
        results[box.slices] = view
    assert results.flatten().tolist() == [-1] * 8 + list(range(3, 10))
    assert storage.version == 7


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), ("undefined", "cpu"), ("nccl", "cuda:3")]
)
def test_the_collective_device_follows_the_backend(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert get_collective_device() == torch.device(device)


def test_versions_are_exchanged_on_the_collective_device(monkeypatch: pytest.MonkeyPatch):
    class CollectiveReachedError(Exception):
        """The tensors reached the collective."""

    def fake_all_gather(into: list[torch.Tensor], local: torch.Tensor, *, async_op: bool) -> None:
        raise CollectiveReachedError({tensor.device.type for tensor in (*into, local)})

    monkeypatch.setattr(executors, "get_collective_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather", fake_all_gather)
    full = make_layout("1-1-1")
    storage_of_rank = allocate_storage(full, 0, DTYPES)
    with pytest.raises(CollectiveReachedError, match=r"\{'meta'\}"):
        PointToPointExecutor(plan_copies(full, full, CLUSTER)).run(storage_of_rank, storage_of_rank)


def test_a_bucket_smaller_than_an_element_is_refused(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert results["small_buckets"] == [
            "buckets of 3 bytes: must be at least 8",
            "buckets of 15 bytes: must be at least 32",
        ]


def test_weights_move_between_disjoint_pools(ranks: list[dict[str, Any]]):
    assert all(results["pools"]["exact"] for results in ranks)
    assert [results["pools"]["received"] > 0 for results in ranks] == [False, False, True, True]


def test_data_already_in_place_is_not_copied(ranks: list[dict[str, Any]]):
    assert all(results["shared"]["exact"] for results in ranks)
    assert [results["shared"]["copied"] == 0 for results in ranks] == [True, False, False, True]


def test_fsdp_over_tensor_parallelism_matches_its_layout(ranks: list[dict[str, Any]]):
    specs = (TensorSpec("0.weight", (12, 8), (0,), 0), TensorSpec("1.weight", (8, 12), (0,), 1))
    seating = RankGrid.from_text("1-2-2").assign_ranks()
    kept = partition_fsdp2(create_layout(ModelSpec(specs, 1), seating), seating.list_dp_groups())
    for rank, results in enumerate(ranks):
        for spec in specs:
            (box,) = kept.get_boxes(rank, spec.name)
            full = torch.arange(spec.numel).view(spec.shape)
            assert results["fsdp"][spec.name] == full[box.slices].flatten().tolist(), spec.name


def test_different_versions_are_refused_and_the_target_stays(ranks: list[dict[str, Any]]):
    expected = "hold different versions (rank 0: 7, rank 1: 7, rank 2: 8, rank 3: 7)"
    for results in ranks:
        assert expected in results["odd_version"]["error"]
        assert results["odd_version"]["kept"] == "True"


def test_an_absent_rank_raises_at_the_deadline(ranks: list[dict[str, Any]]):
    for rank, results in enumerate(ranks[:-1]):
        error = results["absent"]["error"]
        waited = re.match(rf"resharding: rank {rank} waited ([\d.]+) of {LATE_S:g} s for", error)
        assert waited and float(waited[1]) >= LATE_S, error
