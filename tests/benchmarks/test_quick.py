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
    """Return whether all values are positive and finite."""
    return all(0 < value < math.inf for value in values)


def is_missing(peer: dict[str, str]) -> bool:
    """Return whether a peer is not installed and its error says so."""
    return not PARITY.exists() and "install it with `make parity`" in peer["error"]


def numbers(tree: Any) -> Iterator[float]:
    """Yield every number in a tree of figures."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from numbers(item)
    elif isinstance(tree, int | float):
        yield tree


def check_overlap(figures: Figures) -> None:
    assert set(figures) == {"empty", "real", "sleeps"}
    check_stream(figures["empty"]["max_staleness_1"], steps=8)
    assert figures["empty"]["max_staleness_1"]["step_per_call"] > 1
    assert is_measured(figures["empty"]["call_s"])
    check_stream(figures["sleeps"]["max_staleness_1"], steps=2)
    assert figures["sleeps"]["max_staleness_1"]["busy_s"]["generate"] > 0.1
    assert set(figures["real"]) == {"sequential", "max_staleness_1"}
    for run in figures["real"].values():
        check_stream(run, steps=2)
        assert is_measured(run["speed_up"])
    assert figures["real"]["sequential"]["speed_up"] == 1


def check_stream(run: Figures, *, steps: int) -> None:
    assert run["steps"] == steps and set(run["busy_s"]) == {"generate", "score", "train"}
    assert is_measured(run["step_s"], run["step_s_mean"], run["tokens_per_s"])
    # A stage of several actors may be busy for longer than a step.
    assert is_measured(run["overlap_efficiency"])


def check_placement_modes(figures: Figures) -> None:
    runs = figures["max_staleness_1"]
    assert set(runs) == {"disaggregated", "one_slot"}
    assert runs["disaggregated"]["over_disaggregated"] == 1
    for run in runs.values():
        assert run["steps"] == 2 and is_measured(run["step_s"], run["tokens_per_s"])
        assert run["length_mean"] <= run["length_max"] <= 224 and 0 <= run["staleness_mean"] <= 1


def check_data(figures: Figures) -> None:
    assert set(figures) == {"rows", "jsonl", "parquet"}
    for kind in ("jsonl", "parquet"):
        assert is_measured(figures[kind]["check_s"], figures[kind]["prompts_per_s"])
        # Far below the size of the rows, some 6 KB each.
        assert 0 <= figures[kind]["driver_mb"] < 500 and figures[kind]["sent_mb"] < 50
    assert is_measured(figures["jsonl"]["data_check_rows_per_s"])


def check_memory(figures: Figures) -> None:
    for roles in (figures["counted"]["qwen2.5-7b"], figures["measured"]):
        assert set(roles) == {"tokens", "policy", "reference", "critic"}
        assert is_measured(*numbers({role: roles[role] for role in roles}))
    for role in ("policy", "reference"):
        chunks, full = (
            figures["counted"]["qwen2.5-7b"][role][n] for n in ("chunks", "full_logits")
        )
        assert chunks < full
    for role, name in (("policy", "chunks"), ("critic", "values")):
        counted = figures["counted"]["qwen2.5-7b"][role]
        assert counted["offload"] <= counted[name]


def check_planner(figures: Figures) -> None:
    assert figures["command"] == []
    (large,) = figures["seconds"]
    assert large["cluster"] == "4xA100" and large["model"] == "qwen2.5-1.5b"
    assert large["placements"] > 1 and is_measured(*large["step_s"].values())
    (seeds,) = figures["seeds"]
    assert len(seeds["step_s"]) == 2 and seeds["gap"] >= 0
    assert [row["max_staleness"] for row in figures["gap"]] == [0, 1]
    assert all(row["oracle_looked_at"] > 0 and row["plan_gap"] < 1 for row in figures["gap"])


def check_published(figures: Figures) -> None:
    assert set(figures["constants"]) == set(figures["summary"]) == {"hybridflow", "flexrlhf"}
    assert {point["source"] for point in figures["points"]} == {"hybridflow", "flexrlhf"}
    for rates in figures["summary"].values():
        assert 0 <= rates["figures_within_15_percent"] <= rates["figures"]


def check_nemo_fit(figures: Figures) -> None:
    assert set(figures["constants"]) == {"expert_layer_s", "train_step_s", "network_hop_s"}
    assert len(figures["steps"]) > 1 and is_measured(*numbers(figures["steps"]), figures["squares"])


def check_verl_fit(figures: Figures) -> None:
    assert all({"gen", "own", "update"} <= set(parts) for parts in figures["parts"].values())
    assert len(figures["parts"]) > 1 and is_measured(*numbers(figures["parts"]), figures["squares"])


def check_queue(figures: Figures) -> None:
    assert set(figures) == {"1024 bytes"}
    size = figures["1024 bytes"]
    for name in ("1 shards, journal off", "1 shards, journal on"):
        assert is_measured(size[name]["groups_per_s"], size[name]["mb_per_s"]), name
    ratios = size["ratios"]
    assert is_measured(size["memcpy"]["mb_per_s"], ratios["of memcpy"], ratios["journal's time"])
    assert is_measured(size[RAY_QUEUE]["groups_per_s"], ratios[f"over {RAY_QUEUE}"])
    peer = size["transfer_queue"]
    assert is_measured(peer["groups_per_s"]) if "groups_per_s" in peer else is_missing(peer)


def check_resharding(figures: Figures) -> None:
    assert (figures["train"], figures["generate"]) == ("1-2-1", "1-1-2-1")
    assert set(figures["ways"]) == {"in_groups", "point_to_point", "full_gather"}
    for way in figures["ways"].values():
        assert way["bit_exact"] and way["received_of_M"] == way["planned_of_M"]
        assert is_measured(way["seconds"], way["over_all_gather"])


def check_loading(figures: Figures) -> None:
    assert figures["ranks"] == 2 and is_measured(figures["model_mib"])
    for layout in ("fsdp2", "zero3"):
        assert figures[layout]["bit_equal"]
        for way in ("shards", "whole"):
            assert is_measured(*figures[layout][way].values())
            assert figures[layout][way]["kept_shares"] <= figures[layout][way]["load_peak_shares"]


def check_control(figures: Figures) -> None:
    (virtual,) = figures.values()
    assert virtual["generators"] == 8 and is_measured(virtual["task_us"])
    for groups in (8, 32):
        size = virtual[f"{groups} groups"]
        assert set(size["us_per_group"]) == {"coordinator", "queue", "replicas", "weights"}
        assert is_measured(*numbers(size)) and size["shard_calls_per_group"] > 4
    assert is_measured(virtual["largest_over_smallest"])


def check_families(figures: Figures) -> None:
    assert figures["gpt2"]["trainer_twice"] == 0
    assert figures["gpt2"]["trainer_plain"] < 1e-4 > figures["gpt2"]["generator_plain"]
    assert figures["gpt2"]["bfloat16_generator"]["mean"] < 0.1


def check_packing(figures: Figures) -> None:
    assert set(figures) == {"streamed", "whole_step", "full"}
    for case in figures.values():
        assert is_measured(case["padded_tokens_per_s"], case["packed_tokens_per_s"])
        assert is_measured(case["packed_over_padded"])
    assert figures["streamed"]["tokens"] == figures["whole_step"]["tokens"]
    assert figures["streamed"]["padding"] > figures["full"]["padding"] == 0


def check_rewards(figures: Figures) -> None:
    assert figures["group"] == 8 and figures["groups"] == 10
    for judged in (*figures["1_workers"].values(), figures["gsm8k"]):
        assert is_measured(judged["rollouts_per_s"])
        assert 0 < judged["latency_p50_s"] <= judged["latency_p99_s"]
    assert set(figures["1_workers"]) == {"function", "math", "code"}
    assert figures["sandbox"]["pass_rate"] == 1 and is_measured(figures["sandbox"]["start_s"])
    peer = figures["prime_code"]
    assert peer["pass_rate"] == 1 if "pass_rate" in peer else is_missing(peer)


def check_schedule(figures: Figures) -> None:
    assert figures["placements"] == len(figures["errors"]) > 1
    assert figures["on_policy"]["lowest"] <= figures["on_policy"]["highest"]
    assert all(abs(row["error"]) < 1 and row["simulated_s"] > 0 for row in figures["errors"])


def check_filtering(figures: Figures) -> None:
    for runs in figures.values():
        gated, beside = runs["filtered_50_gated"], runs["filtered_50_side_by_side"]
        assert gated["computed_reference"] == gated["computed_value"] == 1
        assert beside["computed_reference"] > 1.5
        assert is_measured(runs["filtered_50_gated_auto"]["over_unfiltered"])


def check_simulator(figures: Figures) -> None:
    assert figures["devices"] == 1024 and figures["steps"] == 3
    for placement in ("apart", "in_turn"):
        assert is_measured(*figures[placement].values())


def check_simulator_vs_runs(figures: Figures) -> None:
    runs = figures["recipes"]["grpo"]
    assert set(runs) == {"ahead, seed 0", "ahead, seed 1"}
    for run in runs.values():
        assert run["steps"] > 1 and {"same_mode", "itself"} <= set(run)
        assert is_measured(run["itself"]["step_s"]["measured"])
    assert figures["worst_error"]["other_mode"] == {} != figures["worst_error"]["itself"]


def check_staleness(figures: Figures) -> None:
    assert figures["steps"] == 3 and figures["seeds"] == [0]
    assert [run["correction"] for run in figures["runs"]] == ["none", "decoupled"]
    for run in figures["runs"]:
        assert run["max_staleness"] == run["staleness"]["median"] == 0
        assert 0 < run["reward"]["least"] <= run["reward"]["largest"] <= 1
    assert figures["runs"][0]["over_on_policy"] == 1


def check_updates(figures: Figures) -> None:
    (run,) = figures.values()
    assert set(figures) == {"keep"} and run["sampled_per_s_over_best"] == 1
    assert is_measured(run["sampled_per_s"], run["trained_per_s"], run["step_s"])


def check_weights(figures: Figures) -> None:
    transports = {"store", "shared_memory", "collective", "disk"}
    assert set(figures) == {"1M"} and set(figures["1M"]) == {"bytes", *transports}
    for transport in transports:
        times = figures["1M"][transport]["generators_1"]
        assert is_measured(*(times[n] for n in ("publish_s", "transfer_s", "load_s", "memcpy_s")))
        assert times["end_to_end_s"] >= times["publish_s"] + times["load_s"]
        assert times["decode_step_s"] > 0


def check_startup(figures: Figures) -> None:
    assert {"GeneratorActor", "driver"} <= set(figures["processor_s_by_process"])
    assert set(figures["commands_s"]) == {"plan --help", "report", "doctor"}
    assert is_measured(*figures["commands_s"].values(), figures["start_processor_s"])
    assert is_measured(figures["start_s"], figures["restart_s"], figures["limit_s"])
    assert is_measured(figures["plain_start_s"], figures["plain_start_processor_s"])


QUICK = (check_resharding, check_simulator)
RAY_QUEUE = "ray_queue_batch"
LONG = (
    *(check_control, check_data, check_filtering, check_loading, check_memory, check_nemo_fit),
    *(check_overlap, check_packing, check_planner, check_published, check_queue, check_rewards),
    *(check_schedule, check_verl_fit),
)
"""Benchmarks that take ten seconds or more."""
MORE_OPTIONS = {
    "overlap": ("--parts", "empty", "real", "sleeps"),
    "queue": ("--peers", RAY_QUEUE, "memcpy", "transfer_queue"),
}
"""Parts that the quick form leaves out."""


def check_trl(figures: Figures) -> None:
    ours, peer = figures["demo"]["streamrl"], figures["demo"]["trl"]
    for side in (ours, peer):
        assert is_measured(side["step_s"], side["busy_cores"])
        assert side["peak_rss_mb"] > side["peak_pss_mb"] > 100
    # With equal model, rows and limit, tokens and rewards are about equal.
    assert 0.7 < ours["tokens_per_step"] / peer["tokens_per_step"] < 1.4
    assert abs(ours["reward"] - peer["reward"]) < 0.2


def check_episodes(figures: Figures) -> None:
    assert is_measured(*figures["alone"], *figures["beside"], figures["beside_over_alone"])
    assert set(figures["kib_per_sleeper"]) == {"driver", "environment"}
    assert is_measured(figures["open_s"], figures["close_s"])


def check_generator(figures: Figures) -> None:
    assert set(figures["tokens_per_s"]) == {"generator", "vllm", "vllm_apart"}
    assert is_measured(*numbers(figures))


def check_run_page(figures: Figures) -> None:
    assert figures["steps"] == 300
    assert is_measured(*(figures[name] for name in ("render_s", "open_s", "plotly_s", "ratio")))


WITH_ENGINES = (
    check_families,
    *(
        check_episodes,
        check_generator,
        check_placement_modes,
        check_run_page,
        check_simulator_vs_runs,
        check_staleness,
        check_startup,
    ),
    *(check_trl, check_updates, check_weights),
)
"""Benchmarks that start vLLM: most of a minute of one core for each run."""
CHECKS = (*QUICK, *LONG, *WITH_ENGINES)


def get_module(check: Callable[[Figures], None]) -> str:
    """Return the benchmark that a function checks, as a module of benchmarks/."""
    name = check.__name__.removeprefix("check_")
    return f"published.{name}" if name.endswith("_fit") else name


def test_every_benchmark_has_a_test_of_its_quick_form():
    names = set()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        # A file *_peer.py is run by another system's Python.
        if 'if __name__ == "__main__":' in path.read_text() and not path.stem.endswith("_peer"):
            module = path.relative_to(ROOT / "benchmarks").with_suffix("")
            names.add(".".join(module.parts).removesuffix(".__main__"))
    assert names == set(map(get_module, CHECKS))


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=[pytest.mark.slow] * (check not in QUICK)) for check in CHECKS],
    ids=get_module,
)
def test_a_benchmark_runs_in_its_quick_form(check: Callable[[Figures], None]):
    name = get_module(check)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *MORE_OPTIONS.get(name, ())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-4000:]
    figures = json.loads(result.stdout)
    assert isinstance(figures, dict)
    check(figures)
