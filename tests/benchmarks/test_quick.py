"""Every benchmark runs in its shortest form and prints the figures that it promises."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.command import ROOT
from benchmarks.peers import PARITY

LONGEST_S = 900.0
Figures = dict[str, Any]


def is_measured(*values: float) -> bool:
    """Whether all are positive and finite."""
    return all(0 < value < math.inf for value in values)


def is_missing(peer: dict[str, str]) -> bool:
    """Whether a peer was not measured because it is not installed, and that is how it is said."""
    return not PARITY.exists() and "install it with `make parity`" in peer["error"]


def numbers(figures: Any) -> Iterator[float]:
    """Every number in a tree of figures."""
    if isinstance(figures, dict):
        figures = list(figures.values())
    if isinstance(figures, list):
        for each in figures:
            yield from numbers(each)
    elif isinstance(figures, int | float):
        yield figures


def check_overlap(found: Figures) -> None:
    assert set(found) == {"empty", "real", "sleeps"}
    check_stream(found["empty"]["max_staleness_1"], steps=8)
    assert found["empty"]["max_staleness_1"]["step_per_call"] > 1
    assert is_measured(found["empty"]["call_s"])
    check_stream(found["sleeps"]["max_staleness_1"], steps=2)
    assert found["sleeps"]["max_staleness_1"]["busy_s"]["generate"] > 0.1
    assert set(found["real"]) == {"sequential", "max_staleness_1"}
    for run in found["real"].values():
        check_stream(run, steps=2)
        assert is_measured(run["speed_up"])
    assert found["real"]["sequential"]["speed_up"] == 1


def check_stream(run: Figures, *, steps: int) -> None:
    assert run["steps"] == steps and set(run["busy_s"]) == {"generate", "score", "train"}
    assert is_measured(run["step_s"], run["step_s_mean"], run["tokens_per_s"])
    # A stage of several actors may be busy for longer than a step takes.
    assert is_measured(run["overlap_efficiency"])


def check_placement_modes(found: Figures) -> None:
    runs = found["max_staleness_1"]
    assert set(runs) == {"disaggregated", "one_slot"}
    assert runs["disaggregated"]["over_disaggregated"] == 1
    for run in runs.values():
        assert run["steps"] == 2 and is_measured(run["step_s"], run["tokens_per_s"])
        assert run["length_mean"] <= run["length_max"] <= 224 and 0 <= run["staleness_mean"] <= 1


def check_data(found: Figures) -> None:
    assert set(found) == {"rows", "jsonl", "parquet"}
    for kind in ("jsonl", "parquet"):
        assert is_measured(found[kind]["check_s"], found[kind]["prompts_per_s"])
        # Not that of the rows, which would be far more: some 6 KB for each.
        assert 0 <= found[kind]["driver_mb"] < 500 and found[kind]["sent_mb"] < 50
    assert is_measured(found["jsonl"]["data_check_rows_per_s"])


def check_planner(found: Figures) -> None:
    assert found["command"] == []
    (large,) = found["seconds"]
    assert large["cluster"] == "4xA100" and large["model"] == "qwen2.5-1.5b"
    assert large["placements"] > 1 and is_measured(*large["step_s"].values())
    (seeds,) = found["seeds"]
    assert len(seeds["step_s"]) == 2 and seeds["gap"] >= 0
    assert [row["max_staleness"] for row in found["gap"]] == [0, 1]
    assert all(row["oracle_looked_at"] > 0 and row["plan_gap"] < 1 for row in found["gap"])


def check_published(found: Figures) -> None:
    assert set(found["constants"]) == set(found["summary"]) == {"hybridflow", "flexrlhf"}
    assert {point["source"] for point in found["points"]} == {"hybridflow", "flexrlhf"}
    for rates in found["summary"].values():
        assert 0 <= rates["figures_within_15_percent"] <= rates["figures"]


def check_nemo_fit(found: Figures) -> None:
    assert set(found["constants"]) == {"expert_layer_s", "train_step_s", "network_hop_s"}
    assert len(found["steps"]) > 1 and is_measured(*numbers(found["steps"]), found["squares"])


def check_verl_fit(found: Figures) -> None:
    assert all({"gen", "own", "update"} <= set(parts) for parts in found["parts"].values())
    assert len(found["parts"]) > 1 and is_measured(*numbers(found["parts"]), found["squares"])


def check_queue(found: Figures) -> None:
    assert set(found) == {"1024 bytes"}
    size = found["1024 bytes"]
    own = ("1 shards, journal off", "1 shards, journal on")
    for name in own:
        assert is_measured(size[name]["groups_per_s"], size[name]["mb_per_s"]), name
    ratios = size["ratios"]
    assert is_measured(size["memcpy"]["mb_per_s"], ratios["of memcpy"], ratios["journal's time"])
    assert is_measured(size[RAY_QUEUE]["groups_per_s"], ratios[f"over {RAY_QUEUE}"])
    # Of the parity environment: its figures, or how it is installed.
    peer = size["transfer_queue"]
    assert is_measured(peer["groups_per_s"]) if "groups_per_s" in peer else is_missing(peer)


def check_resharding(found: Figures) -> None:
    assert (found["train"], found["generate"]) == ("1-2-1", "1-1-2-1")
    assert set(found["ways"]) == {"in_groups", "point_to_point", "full_gather"}
    for way in found["ways"].values():
        assert way["bit_exact"] and way["received_of_M"] == way["planned_of_M"]
        assert is_measured(way["seconds"], way["over_all_gather"])


def check_rewards(found: Figures) -> None:
    assert found["group"] == 8 and found["groups"] == 10
    for judged in (*found["1_workers"].values(), found["gsm8k"]):
        assert is_measured(judged["rollouts_per_s"])
        assert 0 < judged["latency_p50_s"] <= judged["latency_p99_s"]
    assert set(found["1_workers"]) == {"function", "math", "code"}
    assert found["sandbox"]["pass_rate"] == 1 and is_measured(found["sandbox"]["start_s"])
    peer = found["prime_code"]
    assert peer["pass_rate"] == 1 if "pass_rate" in peer else is_missing(peer)


def check_schedule(found: Figures) -> None:
    assert found["placements"] == len(found["errors"]) > 1
    assert found["on_policy"]["lowest"] <= found["on_policy"]["highest"]
    assert all(abs(row["error"]) < 1 and row["simulated_s"] > 0 for row in found["errors"])


def check_filtering(found: Figures) -> None:
    for runs in found.values():
        gated, beside = runs["filtered_50_gated"], runs["filtered_50_side_by_side"]
        assert gated["computed_reference"] == gated["computed_value"] == 1
        assert beside["computed_reference"] > 1.5
        assert is_measured(runs["filtered_50_gated_auto"]["over_unfiltered"])


def check_simulator(found: Figures) -> None:
    assert found["devices"] == 1024 and found["steps"] == 3
    for placement in ("apart", "in_turn"):
        assert is_measured(*found[placement].values())


def check_simulator_vs_runs(found: Figures) -> None:
    runs = found["recipes"]["grpo"]
    assert set(runs) == {"ahead, seed 0", "ahead, seed 1"}
    for run in runs.values():
        assert run["steps"] > 1 and {"same_mode", "itself"} <= set(run)
        assert is_measured(run["itself"]["step_s"]["measured"])
    assert found["worst_error"]["other_mode"] == {} != found["worst_error"]["itself"]


def check_staleness(found: Figures) -> None:
    assert found["steps"] == 3 and found["seeds"] == [0]
    assert [run["correction"] for run in found["runs"]] == ["none", "decoupled"]
    for run in found["runs"]:
        assert run["max_staleness"] == run["staleness"]["median"] == 0
        assert 0 < run["reward"]["least"] <= run["reward"]["largest"] <= 1
    assert found["runs"][0]["over_on_policy"] == 1


def check_updates(found: Figures) -> None:
    (run,) = found.values()
    assert set(found) == {"interrupt, keep"} and run["sampled_per_s_over_best"] == 1
    assert is_measured(run["sampled_per_s"], run["trained_per_s"], run["step_s"])


def check_weights(found: Figures) -> None:
    transports = {"store", "shared_memory", "collective", "disk", "delta"}
    assert set(found) == {"1M"} and set(found["1M"]) == {"bytes", *transports}
    for transport in transports:
        figures = found["1M"][transport]["generators_1"]
        assert is_measured(*(figures[n] for n in ("publish_s", "transfer_s", "load_s", "memcpy_s")))
        assert figures["end_to_end_s"] >= figures["publish_s"] + figures["load_s"]
        assert figures["decode_step_s"] > 0


def check_startup(found: Figures) -> None:
    assert {"GeneratorActor", "driver"} <= set(found["processor_s_by_process"])
    assert set(found["commands_s"]) == {"plan --help", "report", "doctor"}
    assert is_measured(*found["commands_s"].values(), found["start_processor_s"])
    assert is_measured(found["start_s"], found["restart_s"], found["limit_s"])
    assert is_measured(found["plain_start_s"], found["plain_start_processor_s"])


Check = Callable[[Figures], None]
QUICK: dict[str, Check] = {
    "data": check_data,
    "filtering": check_filtering,
    "overlap": check_overlap,
    "planner": check_planner,
    "published": check_published,
    "published.nemo_fit": check_nemo_fit,
    "published.verl_fit": check_verl_fit,
    "queue": check_queue,
    "resharding": check_resharding,
    "rewards": check_rewards,
    "schedule": check_schedule,
    "simulator": check_simulator,
}


RAY_QUEUE = "ray_queue_batch"
LONG = ("data", "overlap", "queue")
"""Those that take half a minute."""
ALL_OF = {
    "overlap": ("--parts", "empty", "real", "sleeps"),
    "queue": ("--peers", RAY_QUEUE, "memcpy", "transfer_queue"),
}
"""What a quick form leaves out, and a test need not."""


def check_trl(found: Figures) -> None:
    ours, peer = found["demo"]["streamrl"], found["demo"]["trl"]
    for figures in (ours, peer):
        assert is_measured(figures["step_s"], figures["busy_cores"])
        assert figures["peak_rss_mb"] > figures["peak_pss_mb"] > 100
    # The same model, rows and limit: they sample about as much, and are as often right.
    assert 0.7 < ours["tokens_per_step"] / peer["tokens_per_step"] < 1.4
    assert abs(ours["reward"] - peer["reward"]) < 0.2


WHOLE_ENGINES: dict[str, Check] = {
    "placement_modes": check_placement_modes,
    "simulator_vs_runs": check_simulator_vs_runs,
    "staleness": check_staleness,
    "startup": check_startup,
    "trl": check_trl,
    "updates": check_updates,
    "weights": check_weights,
}
"""Benchmarks that start vLLM: most of a minute of one core for each run."""


def benchmarks() -> set[str]:
    """Every module of benchmarks/ that is a command, by the name that follows `benchmarks.`."""
    found = set()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if path.stem.endswith("_peer"):
            continue  # another system's side of a benchmark, run by its Python
        if 'if __name__ == "__main__":' in path.read_text():
            module = path.relative_to(ROOT / "benchmarks").with_suffix("")
            found.add(".".join(module.parts).removesuffix(".__main__"))
    return found


def run_quick(name: str, *options: str) -> Figures:
    """Run a benchmark as a user does, and return the one object on its standard output."""
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", *options],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


def test_every_benchmark_has_a_test_of_its_quick_form() -> None:
    assert benchmarks() == {*QUICK, *WHOLE_ENGINES}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in QUICK]
)
def test_a_benchmark_runs_in_its_quick_form(name: str) -> None:
    QUICK[name](run_quick(name, *ALL_OF.get(name, ())))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE_ENGINES)
def test_a_benchmark_of_whole_engines_runs_in_its_quick_form(name: str) -> None:
    WHOLE_ENGINES[name](run_quick(name))
