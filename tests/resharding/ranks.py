"""Resharding by four processes, and the results of each rank.

torch.distributed is never initialized in pytest's own process.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shard_memory import (
    allocate_overlapping,
    allocate_storage,
    count_memory_bytes,
    create_from_storage,
)
from benchmarks.table_2 import partition_zero3
from streamrl.distributed.process_group import join_process_group
from streamrl.errors import WeightsError
from streamrl.resharding.executors import (
    GroupGatherExecutor,
    PointToPointExecutor,
    ReshardingExecutor,
    get_collective_device,
)
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.layouts import ModelLayout, create_layout, partition_fsdp2
from streamrl.resharding.plans import NodeTopology, plan_copies, plan_gather
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import ModelSpec
from tests.resharding.models import shift_ranks, transformer

WORLD = 4
SMALL = 128
"""Bytes of a bucket: smaller than most tensors, so that they are cut."""
LATE_S = 2.0

# Two itemsizes, as for norms kept in float32.
PLAIN = transformer()
MODEL = ModelSpec(
    tuple(replace(s, itemsize=8) if "norm" in s.name else s for s in PLAIN.tensors),
    PLAIN.num_pipeline_positions,
)
NAMES = list(MODEL.itemsizes)
DTYPES = {name: torch.int64 if "norm" in name else torch.float32 for name in NAMES}


def make_layout(sizes: str, *, order: str = "hf", first: int = 0) -> ModelLayout:
    assignment = RankGrid.from_text(sizes, order).assign_ranks()
    return shift_ranks(create_layout(MODEL, assignment), first)


def make_full_tensors(version: int) -> Mapping[str, torch.Tensor]:
    """Return the unsplit tensors of a version."""
    generator = torch.Generator().manual_seed(version)
    drawn = {s.name: torch.randn(s.shape, generator=generator) for s in MODEL.tensors}
    return {name: drawn[name].mul(1e6).to(DTYPES[name]) for name in NAMES}


def fill(storage: ShardStorage, version: int) -> ShardStorage:
    for name, box, view in storage:
        view.copy_(make_full_tensors(version)[name][box.slices])
    storage.version = version
    return storage


def is_version(storage: ShardStorage, version: int) -> bool:
    is_equal = all(
        view.cpu().equal(make_full_tensors(version)[name][box.slices])
        for name, box, view in storage
    )
    return is_equal and storage.version == version


def allocate_pair(source: ModelLayout, target: ModelLayout) -> tuple[ShardStorage, ShardStorage]:
    rank, device = dist.get_rank(), str(get_collective_device())
    return (
        allocate_storage(source, rank, DTYPES, device=device),
        allocate_storage(target, rank, DTYPES, device=device),
    )


def reshard_twice(
    executor: ReshardingExecutor, source: ModelLayout, target: ModelLayout
) -> dict[str, Any]:
    """Reshard between separate memories, then between shared ones.

    Returns whether both results are right, and the stats of the second run.
    """
    exact, device = [], str(get_collective_device())
    for version, (source_storage, target_storage) in (
        (3, allocate_pair(source, target)),
        (4, allocate_overlapping(source, target, dist.get_rank(), DTYPES, device=device)),
    ):
        fill(target_storage, 2)
        moved = executor.run(fill(source_storage, version), target_storage)
        exact.append(is_version(target_storage, version))
    return {
        "exact": all(exact),
        "received": moved.received_bytes,
        "sent": moved.sent_bytes,
        "memory": count_memory_bytes(source_storage, target_storage),
        "buffers": executor.buffer_bytes,
    }


CLUSTER = NodeTopology(2)


def list_pairs() -> dict[str, tuple[ModelLayout, ModelLayout]]:
    """Return the layout pairs to reshard between."""
    return {
        "1-4-1 to 1-2-2": (make_layout("1-4-1"), make_layout("1-2-2")),
        "1-2-2 to 1-4-1": (make_layout("1-2-2"), make_layout("1-4-1")),
        "2-2-1 to 1-1-4": (make_layout("2-2-1", order="mcore"), make_layout("1-1-4")),
        "4-1-1 to 2-2-1": (make_layout("4-1-1"), make_layout("2-2-1")),
        "zero to 1-2-2": (
            partition_zero3(make_layout("1-2-2"), [[0, 2], [1, 3]]),
            make_layout("1-2-2"),
        ),
        "fsdp to 1-1-4": (
            partition_fsdp2(make_layout("1-2-2"), [[0, 2], [1, 3]]),
            make_layout("1-1-4"),
        ),
        "itself": (make_layout("1-2-2"), make_layout("1-2-2")),
    }


def run_all_executors() -> dict[str, Any]:
    """Run every executor between all pairs, in one piece and in small buckets."""
    results = {}
    for name, (source, target) in list_pairs().items():
        copies = plan_copies(source, target, CLUSTER)
        gather = plan_gather(source, target, [list(range(WORLD))])
        for bucket, limit in (("whole", {}), ("cut", {"bucket_bytes": SMALL})):
            results[f"{name}, copies, {bucket}"] = reshard_twice(
                PointToPointExecutor(copies, **limit), source, target
            )
            results[f"{name}, gather, {bucket}"] = reshard_twice(
                GroupGatherExecutor(gather, **limit), source, target
            )
    return results


def reshard_between_pools() -> dict[str, Any]:
    """Reshard from two ranks to the two others."""
    source, target = make_layout("1-2-1"), make_layout("1-1-2", first=2)
    return reshard_twice(PointToPointExecutor(plan_copies(source, target, CLUSTER)), source, target)


def reshard_shared_memory() -> dict[str, Any]:
    """Reshard training shards inside the generation weights; data that stays is not copied."""
    source, target = make_layout("1-4-1"), make_layout("1-2-2")
    source_storage, target_storage = allocate_pair(source, target)
    # Rank 0 serves the first half and trains its first quarter; rank 3 trains the last quarter.
    if dist.get_rank() in (0, 3):
        source_storage = create_from_storage(source, dist.get_rank(), target_storage)
    moved = PointToPointExecutor(plan_copies(source, target, CLUSTER)).run(
        fill(source_storage, 5), target_storage
    )
    return {"exact": is_version(target_storage, 5), "copied": moved.copied_bytes}


def run_failing(own_version: int, **options: Any) -> dict[str, Any]:
    """Reshard; return the error, and whether the target is as before."""
    source, target = make_layout("1-4-1"), make_layout("1-2-2")
    source_storage, target_storage = allocate_pair(source, target)
    fill(target_storage, 6)
    executor = PointToPointExecutor(plan_copies(source, target, CLUSTER), **options)
    error = ""
    try:
        executor.run(fill(source_storage, own_version), target_storage)
    except WeightsError as caught:
        error = str(caught)
    return {"error": error, "kept": is_version(target_storage, 6)}


def run_without_last_rank() -> dict[str, Any]:
    """Leave out the last rank: the others raise within their deadline."""
    if dist.get_rank() == WORLD - 1:
        time.sleep(LATE_S + 2.0)
        return {}
    return run_failing(9, timeout_s=LATE_S)


def run_rank(rank: int, port: int) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank=rank, world_size=WORLD, timeout_s=60.0)
    return {
        "executors": run_all_executors(),
        "pools": reshard_between_pools(),
        "shared": reshard_shared_memory(),
        "odd_version": run_failing(8 if rank == 2 else 7),
        # Runs last, because it breaks the connections.
        "absent": run_without_last_rank(),
    }
