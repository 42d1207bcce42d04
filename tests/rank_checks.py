"""Tests of several ranks as one list: steps of `gpu-check` with NCCL, and in the slow tests gloo.

A new one is a function that starts ranks and returns measurements, a case of a function below, and
a new kind also a row of RANK_CHECKS. Imports torch late, as `gpu-check` reads the list first.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.engines.split_model_ranks import SplitCase
    from tests.engines.trainer_layouts import Layout

Measurements = dict[str, Any]
Cases = Mapping[str, Callable[[], Measurements]]
CASE_TIMEOUT_S = 170.0
"""Limit for the ranks of a case; the deadline of its step ends it before on a GPU."""


@dataclass(frozen=True)
class RankCheck:
    """Cases of so many ranks, and their deadline on GPUs.

    list_cases: function of the number of ranks, one of `worlds`, which ascend.
    """

    list_cases: Callable[[int], Cases]
    worlds: Sequence[int]
    deadline_s: float

    def choose_world(self, num_devices: int) -> int:
        """Return the most ranks that the devices allow; 0 if they are too few."""
        return max((world for world in self.worlds if world <= num_devices), default=0)


def start_ranks(run: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Call `run(rank, port, *arguments)` in a process per rank; return the results in order."""
    from tests import forked
    from tests.engines.trainer_ranks import find_free_ports

    (port,) = find_free_ports(1)
    calls = [(rank, port, *arguments) for rank in range(world)]
    return forked.run(run, calls, timeout_s=CASE_TIMEOUT_S)


# --- Updates of a trainer on each backend ---------------------------------------------------------


def list_updates(world: int) -> Cases:
    from tests.engines.trainer_layouts import Layout

    layouts = [Layout("deepspeed", stage, world) for stage in (3, 1, 2)]
    layouts += [Layout("torch", 3, world), Layout("torch", 1, world)]
    if world > 1:
        layouts += [Layout("torch", 3, world, tensor_parallel=2)]
        layouts += [Layout("torch", 3, world, sequence_parallel=2)]
    return {layout.label: partial(check_updates, layout) for layout in layouts}


def train_layout(layout: "Layout", *names: str) -> list[dict[str, Any]]:
    """Run these functions of trainer_ranks on a layout; return the results of each rank."""
    from tests import forked
    from tests.engines.tiny_qwen import save, tiny_model
    from tests.engines.trainer_ranks import PORTS_PER_CASE, TrainerCase, find_free_ports, run_cases

    with tempfile.TemporaryDirectory() as name:
        folder, plan = Path(name), [TrainerCase(case, layout) for case in names]
        path = save(tiny_model(tied=True, seed=0, kv_heads=2), folder / "policy")
        ports = find_free_ports(len(plan) * PORTS_PER_CASE)
        calls = [(rank, plan, path, folder, ports) for rank in range(layout.world_size)]
        return forked.run(run_cases, calls, timeout_s=CASE_TIMEOUT_S)


@cache
def train_alone() -> dict[str, Any]:
    from tests.engines.trainer_layouts import ONE

    (results,) = train_layout(ONE, "same_update")
    return results


def check_updates(layout: "Layout") -> Measurements:
    """Compare two updates with those of one rank, bfloat16 ones too, and a resumed with the first.

    norms, rounded_norms: largest relative differences. updates_in_lr: of a parameter, mean.
    """
    from tests.engines.trainer_layouts import CUTS
    from tests.engines.trainer_ranks import LR

    names, single = ["same_update", "save_and_resume", "skipped_updates"], train_alone()
    is_rounded = layout.make_config().has_master_weights
    ranks = train_layout(layout, *names, *["rounded_updates"] * is_rounded)
    pairs = [
        (rank[f"update/{layout.label}/{cuts}"], single[f"update/torch-1/{cuts}"])
        for rank in ranks
        for cuts in CUTS
    ]
    norms = max(compare_norms(a["norms"], b["norms"]) for a, b in pairs)
    updates = max(
        float((a["parameters"][name] - parameter).abs().mean()) / LR
        for a, b in pairs
        for name, parameter in b["parameters"].items()
    )
    resumed = [rank[f"resume/{layout.label}"] for rank in ranks]
    repeats = all(
        first[0] == again[0] and all(first[1][name].equal(again[1][name]) for name in first[1])
        for first, again in resumed
    )
    skipped = [rank[f"skipped/{layout.label}"] for rank in ranks]
    skips = all(
        rank["unchanged"] and "the gradient's norm is" in rank["message"] for rank in skipped
    )
    results = {"norms": norms, "updates_in_lr": updates, "repeats": repeats, "skips": skips}
    if is_rounded:
        expected = single[f"update/torch-1/{CUTS[1]}"]["norms"]
        rounded = [rank[f"rounded/{layout.label}"]["norms"] for rank in ranks]
        results["rounded_norms"] = max(compare_norms(norms, expected) for norms in rounded)
    is_close = norms < 1e-4 and updates < 0.05 and results.get("rounded_norms", 0.0) < 0.1
    return {**results, "ok": is_close and repeats and skips}


def compare_norms(norms: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(norms, expected, strict=True))


# --- Loading --------------------------------------------------------------------------------------


def list_loading(world: int) -> Cases:
    from tests.engines.loading_ranks import LAYOUTS

    return {
        f"{layout} {kind}": partial(check_loading, world, layout, kind)
        for layout in LAYOUTS
        for kind in ("policy", "two heads")
    }


def check_loading(world: int, layout: str, kind: str) -> Measurements:
    """Load models in shards; compare bitwise with models that are loaded whole."""
    from tests import forked
    from tests.engines.loading_ranks import load_rank
    from tests.engines.tiny_qwen import save, tiny_model
    from tests.engines.trainer_ranks import find_free_ports

    with tempfile.TemporaryDirectory() as folder:
        paths = [
            save(tiny_model(tied=tied, seed=1), Path(folder, str(tied))) for tied in (True, False)
        ]
        ports = find_free_ports(len(paths))
        calls = [(rank, ports, paths, layout, kind, 2, world) for rank in range(world)]
        ranks = forked.run(load_rank, calls, timeout_s=CASE_TIMEOUT_S)
    pairs = [pair for rank in ranks for pair in rank]
    differing = {
        name for a, b in pairs for name in a.keys() | b.keys() if not a[name].equal(b[name])
    }
    return {"ok": not differing, "differing": sorted(differing)[:9], "tensors": len(pairs[0][0])}


# --- Tensor and sequence parallelism --------------------------------------------------------------


def list_split_models(world: int) -> Cases:
    from tests.engines.split_model_ranks import SplitCase

    cases = [
        SplitCase("qwen3", tensor=2, dtype="bfloat16", world=world),
        SplitCase("qwen3", sequence=2, backend="deepspeed", zero_stage=3, world=world),
        SplitCase("qwen3_moe", tensor=2, world=world),
        SplitCase("mistral", sequence=2, recomputes=True, world=world),
        SplitCase("gemma2", tensor=2, world=world),
        SplitCase("deepseek_v3", tensor=2, world=world),
    ]
    if world > 2:
        cases[:0] = [SplitCase("qwen3", tensor=2, sequence=2, zero_stage=0, world=world)]
    return {case.label: partial(check_split_model, case) for case in cases}


def check_split_model(case: "SplitCase") -> Measurements:
    from tests import forked
    from tests.engines.split_model_ranks import compare_with_single_rank, run_alone, run_rank

    alone = [(case.family, case.changes, case.kind)]
    (single,) = forked.run(run_alone, alone, timeout_s=CASE_TIMEOUT_S)
    return compare_with_single_rank(case, single, start_ranks(run_rank, case.world, case))


# --- Resharding, broadcasts, and generators in the trainer's processes ----------------------------


def list_resharding(world: int) -> Cases:
    return {"four ranks": check_resharding}


def check_resharding() -> Measurements:
    """Reshard with every executor between many layouts; refuse other versions and absent ranks."""
    from tests.resharding.ranks import WORLD, run_rank

    ranks = start_ranks(run_rank, WORLD)
    wrong = {
        f"rank {rank}: {case}"
        for rank, results in enumerate(ranks)
        for case, outcome in results["executors"].items()
        if not outcome["exact"]
    }
    results = {
        "wrong": sorted(wrong)[:9],
        "cases": len(ranks[0]["executors"]),
        "between_pools": all(rank["pools"]["exact"] for rank in ranks),
        "in_shared_memory": all(rank["shared"]["exact"] for rank in ranks),
        "refuses_versions": all(rank["odd_version"]["kept"] for rank in ranks),
        "absent": ranks[0]["absent"]["error"],
    }
    is_refused = all("different versions" in rank["odd_version"]["error"] for rank in ranks)
    parts = ("between_pools", "in_shared_memory", "refuses_versions", "absent")
    return {**results, "ok": not wrong and is_refused and all(results[part] for part in parts)}


def list_broadcasts(world: int) -> Cases:
    cases = {"a publisher and its readers": partial(check_broadcasts, world - 1)}
    return cases if world < 3 else cases | {"a publisher and a split generator": check_slices}


def check_broadcasts(num_readers: int) -> Measurements:
    """Broadcast versions; a reader dies in the fourth, and the others still get it."""
    from tests.weights.broadcast_processes import Broadcasting

    cluster = Broadcasting()
    try:
        cluster.add(*(f"reader {i}" for i in range(num_readers)))
        outcomes = [cluster.round() for _ in range(3)]
        manifest, (victim, *others) = cluster.put(), cluster.readers
        victim.pull(manifest, dies_at=3)
        for reader in others:
            reader.pull(manifest)
        after_death = [reader.outcome() for reader in others]
        victim.process.join(60)
        cluster.put()
        cluster.writer.begin_version(cluster.version + 1)  # waits for the broadcast's end
        failure = cluster.writer.send_failure
    finally:
        cluster.end()
    # The first version goes to readers that are members only from then on.
    is_sent = outcomes[1:] == [[(True, None)] * num_readers] * 2
    return {
        "ok": is_sent and all(is_right for is_right, _ in after_death) and bool(failure),
        "outcomes": outcomes[1:],
        "after_death": after_death,
        "publisher": failure,
    }


def check_slices() -> Measurements:
    """Send the two ranks of a generator, a process with two GPUs, their slices."""
    from tests.weights.broadcast_processes import LAYOUTS, Broadcasting, Reader

    cluster = Broadcasting()
    try:
        cluster.readers.append(Reader("generator", gpu=1, layouts=LAYOUTS))
        outcomes = [cluster.round() for _ in range(3)]
    finally:
        cluster.end()
    return {"ok": outcomes == [[(True, None)]] * 3, "outcomes": outcomes}


def list_colocated(world: int) -> Cases:
    runs: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
        "tensor parallel": (2, 2, 4, ("tensor",)),
        "one generator a rank": (2, 1, 2, ("whole", "tensor", "zero 3")),
    }
    if world >= 4:
        runs["two generators of two ranks"] = (4, 2, 4, ("tensor", "sharded"))
    return {name: partial(check_colocated, *run) for name, run in runs.items()}


def check_colocated(world: int, size: int, kv_heads: int, meshes: Sequence[str]) -> Measurements:
    """Reshard each update into the generators of the trainer's processes; compare both models.

    size: ranks of a generator. differences: largest of log-probabilities in nats, by mesh.
    """
    from tests import forked
    from tests.engines.rank_group_ranks import run_rank, write_model
    from tests.engines.trainer_ranks import find_free_ports

    with tempfile.TemporaryDirectory() as folder:
        path, (port,) = write_model(kv_heads, Path(folder)), find_free_ports(1)
        calls = [(rank, path, port, world, size, meshes) for rank in range(world)]
        ranks = forked.run(run_rank, calls, timeout_s=CASE_TIMEOUT_S)
    leaders = [rank["meshes"] for rank in ranks if "tokens" in rank["meshes"]]
    differences = {
        mesh: max(u["difference"] for leader in leaders for u in leader[mesh]["updates"])
        for mesh in meshes
    }
    return {"ok": max(differences.values()) < 1e-3, "differences": differences}


RANK_CHECKS: Mapping[str, RankCheck] = {
    "updates": RankCheck(list_updates, (1, 2, 4, 8), 180),
    "loading": RankCheck(list_loading, range(2, 9), 60),
    "broadcasts": RankCheck(list_broadcasts, range(2, 9), 90),
    "split models": RankCheck(list_split_models, (2, 4), 150),
    "resharding": RankCheck(list_resharding, (4,), 60),
    "colocated": RankCheck(list_colocated, (2, 4), 200),
}
"""What users meet first comes first."""
