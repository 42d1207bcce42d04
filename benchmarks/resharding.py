"""Traffic of a switch from training to generation: `python -m benchmarks.resharding` prints JSON.

Processes over gloo hold a small model in the layout --train (pipeline-tensor-data) and switch it to
the layout --generate (pipeline-tensor-microdata-data), in every pattern that --grouping allows:

in_groups       all-gathers within micro-DP groups (grouping zero, HybridFlow's transition), or
                within replicas of the model (grouping vanilla, HybridFlow-V's)
point_to_point  only the missing parts of each rank, from one rank that holds them
full_gather     an all-gather of everything, from ZeRO's partitions (DeepSpeed-Chat's)

Per rank, as fractions of the model's bytes M: bytes received, by count and by Table 2 of
arXiv:2409.19256 where sizes divide; bytes copied locally; peak parameters if all moves happen in
one piece (Table 2); peak memory, counted and planned: both layouts and buffers of --bucket-mb; and
memory that training keeps twice. Every element is compared with the unsplit model. seconds are
medians of the slowest rank. `over_all_gather` is the median ratio to an all-gather that brings each
rank as many bytes from contiguous memory.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from fractions import Fraction
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.command import BenchmarkError, BenchmarkParser, at_least, run_benchmark
from benchmarks.shard_memory import allocate_overlapping, allocate_storage, count_memory_bytes
from benchmarks.table_2 import (
    PlanReport,
    compute_table_2,
    count_link_bytes,
    partition_zero3,
    peak_fraction,
    received_fraction,
    redundant_fraction,
    report_plan,
)
from streamrl.errors import ConfigError
from streamrl.resharding.executors import (
    GroupGatherExecutor,
    PointToPointExecutor,
    ReshardingExecutor,
)
from streamrl.resharding.grids import RANK_ORDERS, RankAssignment, RankCoordinates, RankGrid
from streamrl.resharding.grouping import (
    GenerationSizes,
    assign_max_overlap,
    assign_zero_redundancy,
)
from streamrl.resharding.layouts import ModelLayout, create_layout
from streamrl.resharding.plans import (
    CopyPlan,
    GatherPlan,
    NodeTopology,
    plan_copies,
    plan_gather,
)
from streamrl.resharding.storage import ShardStorage
from streamrl.resharding.tensor_specs import FusedComponent, ModelSpec, TensorSpec

GROUPINGS = ("zero", "vanilla", "overlap")
MOST_RANKS = 16
MOST_BYTES = 64 << 20
"""Limit of the even model: every process holds all of it for the comparison."""
EDGES = (128, 64, 32, 16, 8, 4, 2)
"""Edge of the smallest piece of a matrix: the largest that fits is used."""
DEADLINE_S = 300.0
VERSION = 1
FULL_GATHER = "full_gather"
"""Pattern in which ranks keep their training shards beside the gathered model."""


@dataclass(frozen=True)
class LayoutSwitch:
    """Parameters of a switch: both grids, the model, and the grouping."""

    train: RankGrid
    generate: GenerationSizes
    grouping: str
    model: ModelSpec
    held: ModelLayout
    serving: RankAssignment
    cluster: NodeTopology

    def plans(self) -> dict[str, CopyPlan | GatherPlan]:
        """Return every plan for this switch, by name."""
        target = create_layout(self.model, self.serving)
        partitioned = partition_zero3(self.held, self.train.assign_ranks().list_dp_groups())
        everyone = [list(range(self.train.num_ranks))]
        plans: dict[str, CopyPlan | GatherPlan] = {
            "point_to_point": plan_copies(self.held, target, self.cluster),
            FULL_GATHER: plan_gather(partitioned, target, everyone),
        }
        if self.grouping != "overlap":
            replicas = self.train.assign_ranks().group_ranks("dp_rank")
            zero = self.grouping == "zero"
            groups = list_micro_dp_groups(self.train, self.serving) if zero else replicas
            plans["in_groups"] = plan_gather(self.held, target, groups)
        return plans


def list_micro_dp_groups(train: RankGrid, generation: RankAssignment) -> list[list[int]]:
    """Return the groups of ranks of a training replica that serve the same generation shard."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank in generation.ranks:
        coords = generation.get_coordinates(rank)
        key = (train.get_coordinates(rank).dp_rank, coords.pp_rank, coords.tp_rank)
        groups.setdefault(key, []).append(rank)
    return sorted(groups.values())


def parse_generation_sizes(text: str) -> GenerationSizes:
    """Parse sizes written as "Pg-Tg-Dg-D", such as "1-2-2-2". Raise ValueError if malformed."""
    parts = text.split("-")
    if len(parts) != len("PTGD") or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text}: must be pipeline-tensor-microdata-data, as in 1-2-2-2")
    return GenerationSizes(*map(int, parts))


def assign_vanilla(train: RankGrid, generate: GenerationSizes) -> RankAssignment:
    """Assign ranks to generation shards as HybridFlow-V does, without regard to training shards.

    Consecutive ranks of a replica get consecutive tensor shards, then the next stage.
    """
    zero = assign_zero_redundancy(train, generate)

    def locate(rank: int) -> RankCoordinates:
        at = train.get_coordinates(rank)
        stage, tensor = divmod(at.pp_rank * train.tp_size + at.tp_rank, generate.tp_size)
        micro_replica, stage = divmod(stage, generate.pp_size)
        return RankCoordinates(stage, tensor, at.dp_rank * generate.micro_dp_size + micro_replica)

    return replace(zero, coordinates=tuple(map(locate, zero.ranks)))


def assign_generation_ranks(
    grouping: str, train: RankGrid, generate: GenerationSizes, training_layout: ModelLayout
) -> RankAssignment:
    """Assign ranks to generation shards by one of GROUPINGS.

    Raises ValueError if the sizes do not fit.
    """
    sizes = astuple(generate)
    if train.num_ranks != math.prod(sizes):
        raise ValueError(
            f"training {train} has {train.num_ranks} ranks, generation"
            f" {'-'.join(map(str, sizes))} has {math.prod(sizes)}"
        )
    divides = not (train.tp_size % generate.tp_size or train.pp_size % generate.pp_size)
    if grouping != "overlap" and not (divides and train.dp_size == generate.dp_size):
        raise ValueError(
            f"grouping {grouping}: {'-'.join(map(str, sizes))} must divide {train} in stages and"
            " tensor ranks and have as many data replicas"
        )
    if grouping == "overlap":
        return assign_max_overlap(training_layout, generate)
    assign = assign_zero_redundancy if grouping == "zero" else assign_vanilla
    return assign(train, generate)


def make_parser() -> BenchmarkParser:
    """Declare the switch."""
    parser = BenchmarkParser("resharding", __doc__)
    parser.add_argument("--train", default="1-4-2", help="pipeline-tensor-data")
    parser.add_argument("--generate", default="1-2-2-2", help="pipeline-tensor-microdata-data")
    parser.add_argument("--order", default="hf", choices=RANK_ORDERS)
    parser.add_argument("--grouping", default="zero", choices=GROUPINGS)
    parser.add_argument("--model", default="even", choices=list(MODELS))
    parser.add_argument("--bucket-mb", type=float, default=0.25, help="size of a transfer buffer")
    parser.add_argument("--ranks-per-node", type=at_least(1), default=8)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="measured rounds per pattern")
    parser.set_quick(train="1-2-1", generate="1-1-2-1", rounds=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Execute the switch and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        switch = make_switch(arguments)
        plans = switch.plans()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return execute_patterns(switch, plans, arguments)


def make_switch(arguments: argparse.Namespace) -> LayoutSwitch:
    """Build the switch. Raises ValueError if sizes do not fit."""
    train = RankGrid.from_text(arguments.train, arguments.order)
    generate = parse_generation_sizes(arguments.generate)
    if max(train.num_ranks, math.prod(astuple(generate))) > MOST_RANKS:
        ranks = max(train.num_ranks, math.prod(astuple(generate)))
        raise ValueError(f"{ranks} ranks: at most {MOST_RANKS} processes are started")
    model = MODELS[arguments.model](train, generate)
    least = train.num_ranks * max(spec.itemsize for spec in model.tensors)
    if not least <= arguments.bucket_mb * 2**20 < math.inf:
        raise ValueError(
            f"--bucket-mb={arguments.bucket_mb:g}: must be at least {least} bytes, an element of"
            f" each rank, and finite"
        )
    held = create_layout(model, train.assign_ranks())
    serving = assign_generation_ranks(arguments.grouping, train, generate, held)
    cluster = NodeTopology(arguments.ranks_per_node)
    return LayoutSwitch(train, generate, arguments.grouping, model, held, serving, cluster)


def make_even_model(train: RankGrid, generate: GenerationSizes) -> ModelSpec:
    """Return matrices that divide evenly in every split: Table 2 holds exactly."""
    places = math.lcm(train.pp_size, generate.pp_size)
    pieces = math.lcm(train.tp_size, generate.tp_size) * train.dp_size
    # Two square float32 matrices per position.
    fits = (edge for edge in EDGES if 8 * places * (edge * pieces) ** 2 <= MOST_BYTES)
    width = next(fits, 1) * pieces
    return ModelSpec(
        tuple(
            TensorSpec(f"{position}.{kind}", (width, width), (position,), dim)
            for position in range(places)
            for dim, kind in enumerate(("rows", "columns"))
        ),
        places,
    )


def make_transformer(train: RankGrid, generate: GenerationSizes) -> ModelSpec:
    """Return grouped heads, fused matrices, replicated norms and a tied embedding."""
    sizes = (train.tp_size, generate.tp_size)
    heads, kv_heads = 2 * math.lcm(*sizes), find_fewest_heads(*sizes)
    layers = max(2, train.pp_size, generate.pp_size)
    head, words, last = 16, 64 * heads, layers + 1
    width, inner = heads * head, 4 * heads * head
    q, kv = FusedComponent(width, heads), FusedComponent(kv_heads * head, kv_heads)
    tensors = [TensorSpec("embed", (words, width), (0, last), 0)]
    for position in range(1, last):
        gate_up = (FusedComponent(inner), FusedComponent(inner))
        tensors += [
            TensorSpec(f"{position}.norm", (width,), (position,)),
            TensorSpec(
                f"{position}.qkv", (q.size + 2 * kv.size, width), (position,), 0, (q, kv, kv)
            ),
            TensorSpec(f"{position}.o", (width, width), (position,), 1, (q,)),
            TensorSpec(f"{position}.gate_up", (2 * inner, width), (position,), 0, gate_up),
            TensorSpec(f"{position}.down", (width, inner), (position,), 1),
        ]
    return ModelSpec((*tensors, TensorSpec("norm", (width,), (last,))), last + 1)


def find_fewest_heads(*sizes: int) -> int:
    """Return the smallest number of heads, at least two, that divides evenly in every split.

    Each rank has equally many heads, or each head equally many ranks. Twice the sizes' common
    multiple is a multiple of the result.
    """
    max_heads = 2 * math.lcm(*sizes)
    return next(
        count
        for count in range(2, max_heads + 1)
        if max_heads % count == 0 and all(count % size == 0 or size % count == 0 for size in sizes)
    )


MODELS: dict[str, Callable[[RankGrid, GenerationSizes], ModelSpec]] = {
    "even": make_even_model,
    "transformer": make_transformer,
}


def execute_patterns(
    switch: LayoutSwitch, plans: Mapping[str, CopyPlan | GatherPlan], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Execute every pattern; return the groups and the results."""
    bucket_bytes = int(arguments.bucket_mb * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        reports = {
            way: report_plan(plan, switch.cluster, keeps_copy=way == FULL_GATHER)
            for way, plan in plans.items()
        }
        work = partial(measure_rank, plans, reports, bucket_bytes, arguments.rounds)
        ranks = run_ranks(work, switch.train.num_ranks, Path(folder))
    train, serving = switch.train.assign_ranks(), switch.serving
    exact = reports["point_to_point"]
    return {
        "train": str(switch.train),
        "generate": "-".join(map(str, astuple(switch.generate))),
        "order": switch.train.order,
        "grouping": switch.grouping,
        "model_bytes": switch.model.num_bytes,
        "bucket_bytes": bucket_bytes,
        "groups": {
            "train_tensor": train.list_tp_groups(),
            "train_pipeline": train.group_ranks("dp_rank", "tp_rank"),
            "train_data": train.list_dp_groups(),
            "generate_tensor": serving.list_tp_groups(),
            "generate_pipeline": serving.group_ranks("dp_rank", "tp_rank"),
            "micro_data": list_micro_dp_groups(switch.train, serving),
        },
        "ranks_without_overlap": [
            rank
            for rank, counts in exact.rank_bytes.items()
            if not counts.received_by_link["local"]
        ],
        "ways": {
            way: summarize_pattern(
                reports[way], [seen[way] for seen in ranks], get_table_2_row(switch, way)
            )
            for way in plans
        },
    }


def get_table_2_row(switch: LayoutSwitch, way: str) -> dict[str, str] | None:
    """Return Table 2's row for this pattern; None without one."""
    train, generate = switch.train, switch.generate
    if train.pp_size % generate.pp_size or train.tp_size % generate.tp_size:
        return None
    sizes = {"serving_stages": generate.pp_size, "serving_tensor": generate.tp_size}
    rows = compute_table_2(train.pp_size, train.tp_size, train.dp_size, **sizes)
    scheme = {"in_groups": switch.grouping, "point_to_point": None}.get(way, way)
    return {k: str(v) for k, v in asdict(rows[scheme]).items()} if scheme else None


def summarize_pattern(
    report: PlanReport, seen: Sequence[dict[str, Any]], table: dict[str, str] | None
) -> dict[str, Any]:
    """Return the cost of a pattern from the plan's report and the ranks' measurements."""

    def of_model(numbers: Sequence[int]) -> list[str]:
        return [str(Fraction(number, report.model_bytes)) for number in numbers]

    received = [row["received_bytes"] for row in seen]
    slowest = [max(row["seconds"][i] for row in seen) for i in range(len(seen[0]["seconds"]))]
    moves = any(received)
    peers = [max(row["peer_seconds"][i] for row in seen) for i in range(len(slowest)) if moves]
    ratios = [own / peer for own, peer in zip(slowest, peers, strict=moves)]
    return {
        "bit_exact": all(row["bit_exact"] for row in seen),
        "received_of_M": of_model(received),
        "planned_of_M": [str(received_fraction(report, rank)) for rank in report.rank_bytes],
        "table_2": table,
        "over_network_of_M": str(Fraction(count_link_bytes(report, "network"), report.model_bytes)),
        "copied_of_M": of_model([row["copied_bytes"] for row in seen]),
        "peak_in_one_piece_of_M": [str(peak_fraction(report, rank)) for rank in report.rank_bytes],
        "peak_of_M": of_model([row["memory_bytes"] + row["buffer_bytes"] for row in seen]),
        "planned_peak_of_M": of_model([row["planned_bytes"] + row["buffer_bytes"] for row in seen]),
        "redundant_of_M": [str(redundant_fraction(report, rank)) for rank in report.rank_bytes],
        "seconds": statistics.median(slowest),
        "all_gather_seconds": statistics.median(peers) if moves else None,
        "over_all_gather": round(statistics.median(ratios), 2) if moves else None,
    }


def run_ranks(work: Callable[[], Any], count: int, folder: Path) -> list[Any]:
    """Run `work` in `count` forked ranks of one process group; return the results.

    The first failure ends all ranks, because the others would wait. Raises BenchmarkError.
    """
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run_rank, args=(work, rank, count, folder)) for rank in range(count)
    ]
    for process in ranks:
        process.start()
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    limit = time.monotonic() + DEADLINE_S
    try:
        while running:
            ended = wait(list(running), max(0.0, limit - time.monotonic()))
            if not ended:
                late = ", ".join(map(str, running.values()))
                raise BenchmarkError(f"ranks {late} of {count}: not done after {DEADLINE_S:g} s")
            for sentinel in ended:
                rank = running.pop(cast(int, sentinel))
                ranks[rank].join()
                if code := ranks[rank].exitcode:
                    raise BenchmarkError(f"rank {rank} of {count} failed: exit code {code}")
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def _run_rank(work: Callable[[], Any], rank: int, count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    (folder / f"{rank}.json").write_text(json.dumps(work()))
    dist.barrier()
    dist.destroy_process_group()


def measure_rank(
    plans: Mapping[str, CopyPlan | GatherPlan],
    reports: Mapping[str, PlanReport],
    bucket_bytes: int,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Measure every pattern on this rank."""
    model = next(iter(plans.values())).target.model
    generator = torch.Generator().manual_seed(0)
    whole = {spec.name: torch.randn(spec.shape, generator=generator) for spec in model.tensors}
    rank = dist.get_rank()
    return {
        way: measure_pattern(plan, whole, bucket_bytes, rounds, keeps_copy=way == FULL_GATHER)
        | {"planned_bytes": reports[way].rank_bytes[rank].memory_bytes}
        for way, plan in plans.items()
    }


def measure_pattern(
    plan: CopyPlan | GatherPlan,
    whole: dict[str, torch.Tensor],
    bucket_bytes: int,
    rounds: int,
    *,
    keeps_copy: bool,
) -> dict[str, Any]:
    """Execute a pattern, compare with the unsplit model, and time it beside an all-gather."""
    rank = dist.get_rank()
    executor: ReshardingExecutor
    if isinstance(plan, CopyPlan):
        executor = PointToPointExecutor(plan, bucket_bytes=bucket_bytes)
    else:
        executor = GroupGatherExecutor(plan, bucket_bytes=bucket_bytes)
    dtypes = {name: tensor.dtype for name, tensor in whole.items()}
    source, target = _allocate_shards(plan, rank, dtypes, keeps_copy=keeps_copy)
    seconds, peers = [], []
    exact = True
    for _ in range(rounds + 1):
        for _, _, view in target:
            view.fill_(float("nan"))
        for name, box, view in source:
            view.copy_(whole[name][box.slices])
        source.version = VERSION
        dist.barrier()
        start_s = time.perf_counter()
        moved = executor.run(source, target)
        seconds.append(time.perf_counter() - start_s)
        exact = exact and target.version == VERSION
        exact = exact and all(v.equal(whole[name][box.slices]) for name, box, v in target)
        peers.append(_time_all_gather(moved.received_bytes))
    return {
        **asdict(moved),
        # The first round is the warm-up.
        "seconds": seconds[1:],
        "peer_seconds": peers[1:],
        "bit_exact": exact,
        "memory_bytes": count_memory_bytes(source, target),
        "buffer_bytes": executor.buffer_bytes,
    }


def _allocate_shards(
    plan: CopyPlan | GatherPlan, rank: int, dtypes: dict[str, torch.dtype], *, keeps_copy: bool
) -> tuple[ShardStorage, ShardStorage]:
    """Allocate the shards of both layouts, in one buffer where the plan shares memory."""
    if keeps_copy:
        return allocate_storage(plan.source, rank, dtypes), allocate_storage(
            plan.target, rank, dtypes
        )
    return allocate_overlapping(plan.source, plan.target, rank, dtypes)


def _time_all_gather(received: int) -> float | None:
    """Time an all-gather that brings each rank as many bytes as the most that any rank received.

    None if no rank received any.
    """
    max_bytes = torch.tensor([received])
    dist.all_reduce(max_bytes, dist.ReduceOp.MAX)
    if not int(max_bytes):
        return None
    bytes_per_rank = -(-int(max_bytes) // (dist.get_world_size() - 1))
    sent = torch.ones(bytes_per_rank, dtype=torch.uint8)
    gathered = torch.zeros(bytes_per_rank * dist.get_world_size(), dtype=torch.uint8)
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_gather_single(gathered, sent)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
