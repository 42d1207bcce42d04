"""Executors over gloo: bit for bit, in bounded memory, one version for all, and no endless wait."""

import re
from typing import Any

import pytest
import torch

from streamrl.resharding import (
    ModelSpec,
    RankGrid,
    TensorSpec,
    create_layout,
    create_whole_shard,
    executors,
    partition_fsdp2,
    partition_zero3,
    plan_copies,
    plan_gather,
)
from streamrl.resharding.executors import (
    PointToPointExecutor,
    get_collective_device,
    is_gather_least_bytes,
)
from streamrl.resharding.storage import allocate_storage, create_from_buffers
from tests import forked
from tests.resharding.ranks import (
    CLUSTER,
    DTYPES,
    LATE_S,
    SMALL,
    WORLD,
    layout,
    one_rank,
    pairs,
)

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    return forked.run(one_rank, [(rank, folder) for rank in range(WORLD)], timeout_s=240)


def test_every_way_between_any_layouts_is_bit_exact(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        wrong = [way for way, found in seen["ways"].items() if not found["exact"]]
        assert not wrong, f"rank {rank}"


def test_what_is_moved_is_what_the_plan_says(ranks: list[dict[str, Any]]) -> None:
    for name, (source, target) in pairs().items():
        plans: dict[str, Any] = {
            "copies": plan_copies(source, target, CLUSTER),
            "gather": plan_gather(source, target, CLUSTER, [list(range(WORLD))]),
        }
        for kind, plan in plans.items():
            report = plan.report_bytes()
            for bucket in ("whole", "cut"):
                seen = [rank["ways"][f"{name}, {kind}, {bucket}"] for rank in ranks]
                for rank, found in enumerate(seen):
                    counts = report.ranks[rank]
                    assert found["received"] == counts.received_bytes, (name, kind, bucket)
                    assert found["sent"] == counts.sent_bytes, (name, kind, bucket)
                    assert found["peak"] == counts.memory + found["buffers"], (name, kind, bucket)


def test_where_nothing_changes_nothing_travels(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["ways"]["itself, copies, whole"]["received"] == 0
        assert seen["ways"]["itself, copies, whole"]["rounds"] == 0


def test_buckets_bound_what_is_under_way(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        for way, found in seen["ways"].items():
            if way.endswith("cut"):
                # Sent and received, or given and gathered.
                assert found["buffers"] <= 2 * SMALL, way
    whole = "2-2-1 to 1-1-4, copies, whole"
    assert max(seen["ways"][whole]["buffers"] for seen in ranks) > 2 * SMALL


def test_the_executor_that_is_chosen_moves_what_the_plan_of_copies_says(
    ranks: list[dict[str, Any]],
) -> None:
    whole, everyone = layout("1-1-4"), [list(range(WORLD))]
    sources = {
        "zero": partition_zero3(whole, everyone),
        "fsdp": partition_fsdp2(whole, everyone),
        "whole": whole,
    }
    for name, source in sources.items():
        report = plan_copies(source, whole, CLUSTER).report_bytes()
        for rank, seen in enumerate(ranks):
            found = seen["least"][name]
            assert found["exact"] and found["buffers"] <= 2 * SMALL
            assert found["received"] == report.rank_bytes[rank].received_bytes, name


@pytest.mark.parametrize("rows", [8, 6, 1], ids=["even", "the last has less", "the last has none"])
def test_a_gather_is_chosen_where_it_brings_what_is_lacking(rows: int) -> None:
    model = ModelSpec((TensorSpec("a", (rows, 1), (0,)), TensorSpec("b", (8,), (0,))), 1)
    whole = create_layout(model, RankGrid.from_text("1-1-4").assign_ranks())
    parts = partition_zero3(whole, [list(range(WORLD))])
    copies = plan_copies(parts, whole, CLUSTER)
    assert is_gather_least_bytes(copies, plan_gather(parts, whole, CLUSTER, [list(range(WORLD))]))


def test_a_gather_is_not_chosen_where_all_have_all() -> None:
    whole = layout("1-1-4")
    copies = plan_copies(whole, whole, CLUSTER)
    gather = plan_gather(whole, whole, CLUSTER, [list(range(WORLD))])
    assert not is_gather_least_bytes(copies, gather)


def test_shards_lie_in_padded_buffers_that_are_part_of_a_larger_one() -> None:
    spec = TensorSpec("a", (5, 3), (0,))
    part = create_whole_shard("a", spec.shape).chunk_flat(1, 2)
    assert part is not None
    memory = torch.arange(20)
    # Elements 8 to 14, and one of padding; they begin at the third of the memory.
    storage = create_from_buffers({"a": memory[3:11]}, {"a": part}, version=7)
    seen = torch.full(spec.shape, -1)
    for _, box, view in storage:
        seen[box.slices] = view
    assert seen.flatten().tolist() == [-1] * 8 + list(range(3, 10))
    assert storage.version == 7


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), ("undefined", "cpu"), ("nccl", "cuda:3")]
)
def test_ranks_meet_where_the_group_takes_tensors(
    backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert get_collective_device() == torch.device(device)


def test_versions_are_exchanged_where_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    class MetError(Exception):
        """The tensors have come to the group."""

    def meet(into: list[torch.Tensor], mine: torch.Tensor, *, async_op: bool) -> None:
        raise MetError({tensor.device.type for tensor in (*into, mine)})

    monkeypatch.setattr(executors, "get_collective_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather", meet)
    whole = layout("1-1-1")
    held = allocate_storage(whole, 0, DTYPES)
    with pytest.raises(MetError, match=r"\{'meta'\}"):
        PointToPointExecutor(plan_copies(whole, whole, CLUSTER)).run(held, held)


def test_a_bucket_without_room_for_an_element_is_refused(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["small_buckets"] == [
            "buckets of 3 bytes: must be at least 8",
            "buckets of 15 bytes: must be at least 32",
        ]


def test_weights_go_from_one_pool_to_another(ranks: list[dict[str, Any]]) -> None:
    assert all(seen["pools"]["exact"] for seen in ranks)
    assert [seen["pools"]["received"] > 0 for seen in ranks] == [False, False, True, True]


def test_what_lies_in_its_place_already_is_not_copied(ranks: list[dict[str, Any]]) -> None:
    assert all(seen["shared"]["exact"] for seen in ranks)
    assert [seen["shared"]["copied"] == 0 for seen in ranks] == [True, False, False, True]


def test_fsdp_over_tensor_parallelism_keeps_what_its_layout_says(
    ranks: list[dict[str, Any]],
) -> None:
    specs = (
        TensorSpec("0.weight", (12, 8), (0,), 0),
        TensorSpec("1.weight", (8, 12), (0,), 1),
    )
    seating = RankGrid.from_text("1-2-2").assign_ranks()
    kept = partition_fsdp2(create_layout(ModelSpec(specs, 1), seating), seating.list_dp_groups())
    for rank, seen in enumerate(ranks):
        for spec in specs:
            (box,) = kept.get_boxes(rank, spec.name)
            whole = torch.arange(spec.numel).view(spec.shape)
            assert seen["fsdp"][spec.name] == whole[box.slices].flatten().tolist(), spec.name


def test_ranks_that_hold_different_versions_say_so_and_keep_what_they_served(
    ranks: list[dict[str, Any]],
) -> None:
    expected = "hold different versions (rank 0: 7, rank 1: 7, rank 2: 8, rank 3: 7)"
    for seen in ranks:
        assert expected in seen["odd_version"]["error"]
        assert seen["odd_version"]["kept"] == "True"


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_deadline(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, seen in enumerate(ranks[:-1]):
        error = seen["absent"]["error"]
        waited = re.match(rf"resharding: rank {rank} waited ([\d.]+) of {LATE_S:g} s for", error)
        assert waited and float(waited[1]) >= LATE_S, error
