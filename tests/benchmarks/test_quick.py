"""Every benchmark runs in its shortest form and prints the figures that it promises."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest

from benchmarks.command import ROOT

LONGEST_S = 900.0
Figures = dict[str, Any]
QUICK = {
    "pipelines": (
        *("llama3-70b/64/sharded/step_s", "llama3-70b/64/pipelines/step_s"),
        "llama3-70b/64/sharded_over_pipelines",
    ),
    "resharding": (
        *("ways/in_groups/seconds", "ways/point_to_point/seconds", "ways/full_gather/seconds"),
        "ways/*/over_all_gather",
    ),
    "simulator": ("apart/*", "in_turn/*", "devices", "steps"),
}
LONG = {
    "control": (
        *("virtual/task_us", "virtual/largest_over_smallest", "virtual/8 groups/*"),
        *("virtual/32 groups/us_per_group/*", "virtual/32 groups/shard_calls_per_group"),
    ),
    "warm_start": ("untrained_pass_at_8/largest", "warm_after/median", "cold_after/largest"),
    "distill": ("seeds/0/bound", "seeds/0/scores/gkd/1", "seeds/0/scores/grpo/0"),
    "credit": ("runs/*/pass_at_1/median", "runs/1/over_episode", "runs/0/reward/largest"),
    "data": ("jsonl/*check*_s", "parquet/check_s", "jsonl/prompts_per_s", "parquet/prompts_per_s"),
    "filtering": ("*/filtered_50_gated_auto/over_unfiltered",),
    "loading": ("model_mib", "fsdp2/shards/*", "fsdp2/whole/*", "zero3/shards/*", "zero3/whole/*"),
    "memory": ("counted/qwen2.5-7b/*", "measured/*"),
    "published.nemo_fit": ("steps/*", "squares"),
    "role_memory": tuple(
        f"{role}/{figure}"
        for role in ("policy", "critic", "reference", "reward")
        for figure in ("loaded", "scored", "parameters")
    ),
    "router_replay": ("runs/*/mismatch_frac/median", "runs/*/chi2/median", "runs/0/kl/largest"),
    "overlap": (
        *("empty/call_s", "empty/max_staleness_1/step_per_call", "*/max_staleness_1/step_s"),
        *("sleeps/max_staleness_1/busy_s/generate", "*/step_s_mean", "*/tokens_per_s"),
        *("real/sequential/speed_up", "real/max_staleness_1/speed_up", "*/overlap_efficiency"),
    ),
    "packing": ("*/p*_tokens_per_s", "*/packed_over_padded"),
    "planner": ("seconds/0/step_s/*", "seeds/0/step_s/*", "gap/*/oracle_looked_at"),
    "published": ("summary/hybridflow/figures", "summary/flexrlhf/figures"),
    "queue": (
        *("1024 bytes/1 shards, journal off/*_per_s", "1024 bytes/1 shards, journal on/*_per_s"),
        *("1024 bytes/memcpy/mb_per_s", "1024 bytes/ray_queue_batch/groups_per_s"),
        *("1024 bytes/ratios/of memcpy", "1024 bytes/ratios/journal's time"),
        "1024 bytes/ratios/over ray_queue_batch",
    ),
    "recipes": (
        *("grpo_qwen2.5_7b_math_split/step_s", "grpo_qwen2.5_7b_math_split/tokens_per_s"),
        *("grpo_qwen2.5_7b_math_split/gpus_idle", "grpo_qwen2.5_7b_math_split/kv_rollouts"),
    ),
    "rewards": (
        *("1_workers/function/rollouts_per_s", "1_workers/math/rollouts_per_s"),
        *("1_workers/code/rollouts_per_s", "gsm8k/rollouts_per_s", "*/latency_p50_s"),
        *("sandbox/start_s", "sandbox/pass_rate"),
    ),
    "schedule": ("placements", "errors/*/simulated_s"),
    "published.verl_fit": ("parts/*/gen/*", "parts/*/own/*", "parts/*/update/*", "squares"),
}
"""Benchmarks that take ten seconds or more."""
WITH_ENGINES = {
    "families": (),
    "episodes": ("alone/*", "beside/*", "beside_over_alone", "open_s", "close_s"),
    "generator": ("tokens_per_s/generator", "tokens_per_s/vllm", "tokens_per_s/vllm_apart"),
    "placement_modes": (
        *("max_staleness_1/disaggregated/step_s", "max_staleness_1/one_slot/step_s"),
        *("*/tokens_per_s", "*/length_mean", "*/length_max"),
    ),
    "plan_order": ("placements/*/simulated_s", "placements/*/measured_s"),
    "run_page": ("steps", "render_s", "open_s", "plotly_s", "ratio"),
    "simulator_vs_runs": (
        "recipes/grpo/ahead, seed 0/itself/step_s/measured",
        "recipes/grpo/ahead, seed 1/itself/step_s/measured",
    ),
    "staleness": ("runs/0/reward/largest", "runs/0/over_on_policy"),
    "startup": (
        *("processor_s_by_process/GeneratorActor", "processor_s_by_process/driver"),
        *("commands_s/plan --help", "commands_s/report", "commands_s/doctor", "limit_s"),
        *("start_s", "restart_s", "start_processor_s", "plain_start_s", "plain_start_processor_s"),
    ),
    "trl": ("demo/streamrl/step_s", "demo/trl/step_s", "demo/*/busy_cores", "demo/*/peak_pss_mb"),
    "updates": ("keep/sampled_per_s", "keep/trained_per_s", "keep/step_s"),
    "weights": tuple(
        f"1M/{transport}/generators_1/{name}_s"
        for transport in ("store", "shared_memory", "collective")
        for name in ("publish", "transfer", "load", "memcpy", "decode_step")
    ),
}
"""Benchmarks that start vLLM: most of a minute of one core for each run."""
PROMISED = {**QUICK, **LONG, **WITH_ENGINES}
"""Patterns of the figures of each benchmark, paths into its JSON; each is positive and finite."""
MORE_OPTIONS = {
    "overlap": ("--parts", "empty", "real", "sleeps"),
    "queue": ("--peers", "ray_queue_batch", "memcpy"),
    "resharding": (
        *("--train=4-1-1", "--generate=2-1-2-1"),  # stages of unequal size
        *("--model=transformer", "--bucket-mb=0.01"),
    ),
}
"""Parts that the quick form leaves out, and harder cases."""


LIMITS: dict[str, dict[str, tuple[float, float]]] = {
    "families": {
        "gpt2/trainer_twice": (0, 0),
        "gpt2/*_plain": (0, 1e-4),
        "gpt2/bfloat16_generator/mean": (0, 0.1),
    },
    "filtering": {
        "*/filtered_50_gated/computed_reference": (1, 1),
        "*/filtered_50_gated/computed_value": (1, 1),
        "*/filtered_50_side_by_side/computed_reference": (1.5, math.inf),
    },
    "loading": {"*/bit_equal": (1, 1)},
    "packing": {"full/padding": (0, 0)},
    "plan_order": {"loss": (0, math.inf), "kendall": (-1, 1), "spearman": (-1, 1)},
    "planner": {"gap/*/plan_gap": (-math.inf, 1)},
    "resharding": {"ways/*/bit_exact": (1, 1)},
    "rewards": {"*/pass_rate": (1, 1)},
    "role_memory": {"*/parameters": (0.99, 1.1)},
    "schedule": {"errors/*/error": (-1, 1)},
}
"""Least and largest values of figures, by patterns of their paths; truth counts as 1."""


def check_memory(figures: Figures) -> None:
    for role in (figures["counted"]["qwen2.5-7b"][name] for name in ("policy", "reference")):
        assert role["chunks"] < role["full_logits"]
        assert role.get("offload", 0) <= role["chunks"]


def check_packing(figures: Figures) -> None:
    assert figures["streamed"]["tokens"] == figures["whole_step"]["tokens"]


def check_resharding(figures: Figures) -> None:
    for name, way in figures["ways"].items():
        assert way["received_of_M"] == way["planned_of_M"]
        assert way["peak_of_M"] == way["planned_peak_of_M"]
        assert name == "full_gather" or way["redundant_of_M"] == ["0"] * 4


def check_simulator_vs_runs(figures: Figures) -> None:
    assert figures["worst_error"]["other_mode"] == {} != figures["worst_error"]["itself"]


def check_trl(figures: Figures) -> None:
    ours, peer = figures["demo"]["streamrl"], figures["demo"]["trl"]
    # With equal model, rows and limit, tokens and rewards are about equal.
    assert 0.7 < ours["tokens_per_step"] / peer["tokens_per_step"] < 1.4
    assert abs(ours["reward"] - peer["reward"]) < 0.2


RULES: dict[str, Callable[[Figures], None]] = {
    "memory": check_memory,
    "packing": check_packing,
    "resharding": check_resharding,
    "simulator_vs_runs": check_simulator_vs_runs,
    "trl": check_trl,
}


def list_numbers(tree: Any, path: str = "") -> dict[str, float]:
    """Return every number in a tree of figures by its path."""
    if isinstance(tree, int | float):
        return {path.removeprefix("/"): tree}
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    numbers: dict[str, float] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        numbers |= list_numbers(value, f"{path}/{key}")
    return numbers


def test_every_benchmark_has_a_test_of_its_quick_form():
    names = set()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        # A file *_peer.py is run by another system's Python.
        if 'if __name__ == "__main__":' in path.read_text() and not path.stem.endswith("_peer"):
            module = path.relative_to(ROOT / "benchmarks").with_suffix("")
            names.add(".".join(module.parts).removesuffix(".__main__"))
    assert names == set(PROMISED)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in PROMISED],
)
def test_a_benchmark_runs_in_its_quick_form(name: str):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *MORE_OPTIONS.get(name, ())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-4000:]
    figures = json.loads(result.stdout)
    numbers = list_numbers(figures)
    promised = dict.fromkeys(PROMISED[name], (math.ulp(0), sys.float_info.max))
    for pattern, (least, largest) in [*promised.items(), *LIMITS.get(name, {}).items()]:
        found = {path: number for path, number in numbers.items() if fnmatchcase(path, pattern)}
        assert found, pattern
        assert all(least <= number <= largest for number in found.values()), found
    if name in RULES:
        RULES[name](figures)
