"""Executors over gloo: bit-exact, in bounded memory, with a single version and deadlines."""

import re
from typing import Any

import pytest
import torch

from benchmarks.table_2 import partition_zero3, report_plan
from streamrl.resharding.executors import (
    get_collective_device,
    is_gather_least_bytes,
)
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.layouts import (
    create_layout,
    create_whole_shard,
)
from streamrl.resharding.plans import plan_copies, plan_gather
from streamrl.resharding.storage import create_from_buffers
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec
from tests import forked
from tests.engines.trainer_ranks import find_free_ports
from tests.resharding.ranks import (
    CLUSTER,
    LATE_S,
    SMALL,
    WORLD,
    list_pairs,
    run_rank,
)

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Run all cases on four ranks; return the results of each."""
    (port,) = find_free_ports(1)
    return forked.run(run_rank, [(rank, port) for rank in range(WORLD)], timeout_s=240)


def test_every_executor_is_bit_exact_between_any_layouts(ranks: list[dict[str, Any]]):
    for rank, results in enumerate(ranks):
        wrong = [case for case, outcome in results["executors"].items() if not outcome["exact"]]
        assert not wrong, f"rank {rank}"


def test_moved_bytes_equal_the_plan(ranks: list[dict[str, Any]]):
    for name, (source, target) in list_pairs().items():
        plans: dict[str, Any] = {
            "copies": plan_copies(source, target, CLUSTER),
            "gather": plan_gather(source, target, [list(range(WORLD))]),
        }
        for kind, plan in plans.items():
            report = report_plan(plan, CLUSTER)
            for bucket in ("whole", "cut"):
                results = [rank["executors"][f"{name}, {kind}, {bucket}"] for rank in ranks]
                for rank, outcome in enumerate(results):
                    counts = report.rank_bytes[rank]
                    assert outcome["received"] == counts.received_bytes, (name, kind, bucket)
                    assert outcome["sent"] == counts.sent_bytes, (name, kind, bucket)
                    assert outcome["memory"] == counts.memory_bytes, (name, kind, bucket)


def test_buckets_bound_the_bytes_in_flight(ranks: list[dict[str, Any]]):
    for results in ranks:
        for case, outcome in results["executors"].items():
            if case.endswith("cut"):
                # Sent and received, or contributed and gathered.
                assert outcome["buffers"] <= 2 * SMALL, case
    case_in_one_piece = "2-2-1 to 1-1-4, copies, whole"
    assert max(results["executors"][case_in_one_piece]["buffers"] for results in ranks) > 2 * SMALL


@pytest.mark.parametrize("rows", [8, 6, 1], ids=["even", "the last has less", "the last has none"])
def test_a_gather_is_chosen_if_it_moves_only_missing_data(rows: int):
    model = ModelSpec((TensorSpec("a", (rows, 1), (0,)), TensorSpec("b", (8,), (0,))), 1)
    full = create_layout(model, RankGrid.from_text("1-1-4").assign_ranks())
    parts = partition_zero3(full, [list(range(WORLD))])
    copies = plan_copies(parts, full, CLUSTER)
    assert is_gather_least_bytes(copies, plan_gather(parts, full, [list(range(WORLD))]))


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


def test_weights_move_between_disjoint_pools(ranks: list[dict[str, Any]]):
    assert all(results["pools"]["exact"] for results in ranks)
    assert [results["pools"]["received"] > 0 for results in ranks] == [False, False, True, True]


def test_data_already_in_place_is_not_copied(ranks: list[dict[str, Any]]):
    assert all(results["shared"]["exact"] for results in ranks)
    assert [results["shared"]["copied"] == 0 for results in ranks] == [True, False, False, True]


def test_different_versions_are_refused_and_the_target_stays(ranks: list[dict[str, Any]]):
    expected = "hold different versions (rank 0: 7, rank 1: 7, rank 2: 8, rank 3: 7)"
    for results in ranks:
        assert expected in results["odd_version"]["error"]
        assert results["odd_version"]["kept"]


def test_an_absent_rank_raises_at_the_deadline(ranks: list[dict[str, Any]]):
    for rank, results in enumerate(ranks[:-1]):
        error = results["absent"]["error"]
        waited = re.match(rf"resharding: rank {rank} waited ([\d.]+) of {LATE_S:g} s for", error)
        assert waited and float(waited[1]) >= LATE_S, error
