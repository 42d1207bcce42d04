"""Check streamrl on one to eight GPUs in a few minutes: ranks, numerics, memory, speed.

    python scripts/gpu_check.py --device cuda --out gpu_check.jsonl [--minutes 10] [--resume]

Needs PyTorch, transformers, tensordict and msgspec; what lacks DeepSpeed or vLLM says so. Needs
neither Ray nor a network nor an installed streamrl: the script makes its models, with random
weights. Each step runs in a separate process with its own deadline and appends a JSON line to the
output when it ends; with `--resume` steps that have a line there do not run again. With `--minutes`
a call ends in time, and the next one goes on. A step that dies or hangs does not affect others: its
line holds the finished cases and the end of its standard error. Steps of several ranks use NCCL, as
many GPUs as they can. With `--device cpu` the same code runs on small models and gloo, which checks
this script rather than a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.rank_checks import RANK_CHECKS, RankCheck  # noqa: E402  needs the path

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from streamrl.algorithms import AlgorithmConfig
    from streamrl.engines.trainer_config import TrainerConfig
    from streamrl.engines.training.model_trainer import ModelTrainer
    from streamrl.engines.training.tasks import PolicyTask
    from streamrl.messages import Array, Columns
    from streamrl.resharding.storage import ShardStorage

Measurements = dict[str, Any]
"""Measurements of a case by name; `ok` False marks a failure."""

CPU_DEADLINE_FACTOR = 6
CPU_RANKS = 2
RANKS_ENV = "GPU_CHECK_RANKS"
"""Environment variable of steps: the most ranks that a step may have."""
STDERR_CHARS = 1500
NO_GPU = "torch.cuda.is_available() is False: no GPU, or a driver too old for this PyTorch"
CASE_PREFIX = '{"case"'
"""Start of a line that reports a case."""
GIB = 1 << 30
GB = 1e9
PROMPT_TOKENS = 4
TEMPERATURE = 0.8
LR = 3e-5

# Tolerances: larger differences are errors, smaller differences are rounding.
FP32_LOGPROB = 1e-3
FP32_GRADIENT = 1e-3
BF16_LOGPROB = 0.1
"""Mean over tokens, in nats."""
BF16_NORM = 0.2
"""Relative difference of gradient norms."""
PARAMETER_TOLERANCE = 0.1
"""Mean absolute difference between equal parameters, in learning rates."""


# --- Parent process: run steps under deadlines ----------------------------------------------------


@dataclass(frozen=True)
class CheckStep:
    """Generator function that yields name and measurements of each case, and its deadline.

    make_env: function of the device that returns environment variables of the step's process.
    """

    run: Callable[[], Iterator[tuple[str, Measurements]]]
    deadline_s: float
    make_env: Callable[[str], dict[str, str]] = lambda device: {}


def main() -> None:
    """Run the chosen steps; exit with 1 if any step fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu_check.jsonl"),
        help="file to append JSON lines to (default: gpu_check.jsonl)",
    )
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated; default: all")
    parser.add_argument("--resume", action="store_true", help="omit steps with a line in --out")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="start no step whose deadline ends later; --resume goes on with the others",
    )
    parser.add_argument("--ranks", type=int, help="default: one per GPU; with --device cpu 2")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child, arguments.device)
        return
    names = arguments.steps.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--steps: no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    if arguments.device == "cuda" and not has_gpu():
        parser.error(f"--device cuda: {NO_GPU}; --device cpu checks this script on small models")
    try:
        with arguments.out.open("a+") as file:
            file.seek(0)
            if (text := file.read()) and not text.endswith("\n"):
                file.write("\n")  # ends a truncated line
    except OSError as error:
        parser.error(f"--out {arguments.out}: {error.strerror}")
    os.environ[RANKS_ENV] = str(arguments.ranks or count_devices(arguments.device))
    done = read_done(text) if arguments.resume else {}
    failed = [name for name in names if not done.get(name, True)]
    end_s, left = time.monotonic() + 60 * arguments.minutes, []
    for name in names:
        if name in done:
            continue
        if time.monotonic() + compute_deadline_s(name, arguments.device) > end_s:
            left.append(name)
            continue
        line = run_step(name, arguments.device)
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        failed += [] if line["ok"] else [name]
    if left:
        print(f"left for --resume: {', '.join(left)}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all steps passed", flush=True)
    sys.exit(1 if failed else 0)


def count_devices(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else CPU_RANKS


def read_done(text: str) -> dict[str, bool]:
    """Return whether each step with a line was ok; skip truncated lines."""
    done = {}
    for json_text in text.splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(json_text)
            done[line["step"]] = line["ok"]
    return done


def compute_deadline_s(name: str, device: str) -> float:
    return STEPS[name].deadline_s * (1 if device == "cuda" else CPU_DEADLINE_FACTOR)


def run_step(name: str, device: str) -> Measurements:
    """Run a step in a separate process; return its JSON line even if the process dies or hangs."""
    begun, deadline_s = time.monotonic(), compute_deadline_s(name, device)
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as stdout, err.open("w") as stderr:
            env = STEPS[name].make_env(device)
            process = start_child(
                name, device, env=env, stdout=stdout, stderr=stderr, start_new_session=True
            )
            code = wait_or_kill(process, deadline_s)
        cases = read_cases(out)
        line: Measurements = {
            "step": name,
            "ok": code == 0
            and all(measurements.get("ok", True) for measurements in cases.values()),
            "seconds": round(time.monotonic() - begun, 1),
            "cases": cases,
        }
        if code != 0:
            line["end"] = "deadline" if code is None else f"exit code {code}"
        if not line["ok"]:
            line["stderr"] = err.read_text(errors="replace")[-STDERR_CHARS:]
    return line


def start_child(name: str, device: str, **options: Any) -> subprocess.Popen[str]:
    """Start this script for a step or for a part of a step."""
    env = {**os.environ, **options.pop("env", {})}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-u", __file__, "--device", device, "--child", name]
    return subprocess.Popen(command, env=env, text=True, **options)


def wait_or_kill(process: subprocess.Popen[str], deadline_s: float) -> int | None:
    """Wait for the exit code; at the deadline kill the process, and its group, and return None."""
    try:
        return process.wait(max(deadline_s, 0))
    except subprocess.TimeoutExpired:
        # A process group exists under this pid only if the process leads a session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        return None


def read_cases(path: Path) -> dict[str, Measurements]:
    """Read the cases that a child printed; skip output of libraries and truncated lines."""
    cases = {}
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith(CASE_PREFIX):
            with contextlib.suppress(ValueError):
                measurements = json.loads(line)
                cases[measurements.pop("case")] = measurements
    return cases


# --- Child process: run a step --------------------------------------------------------------------


def run_child(name: str, device: str) -> None:
    """Run a step or a part of a step; print a line per case."""
    if device == "cuda" and not has_gpu():
        sys.exit(NO_GPU)
    alias_torch_functions()
    run = STEPS[name].run if name in STEPS else NCCL_PARTS[name]
    try:
        for case, measurements in run():
            print(json.dumps({"case": case, **round_floats(measurements)}), flush=True)
    except ModuleNotFoundError as error:
        print(json.dumps({"case": "all", **explain_missing(error)}), flush=True)


def explain_missing(error: ModuleNotFoundError) -> Measurements:
    """Report a package that is not installed; a module of this repository is a failure."""
    package = (error.name or "").partition(".")[0]
    if package in ("streamrl", "tests", "scripts", "benchmarks"):
        raise error
    return {"skipped": f"{package} is not installed"}


def alias_torch_functions() -> None:
    """Alias functions that PyTorch has under the name that streamrl uses only since 2.13."""
    import torch.distributed as dist

    if not hasattr(dist, "all_gather_single"):
        vars(dist)["all_gather_single"] = dist.all_gather_into_tensor


def run_cases(
    cases: Mapping[str, Callable[[], Measurements]],
) -> Iterator[tuple[str, Measurements]]:
    """Run all cases; report a case that raises as failed and continue with the next."""
    for name, run in cases.items():
        begun = time.monotonic()
        try:
            measurements = run()
        except ModuleNotFoundError as error:
            measurements = explain_missing(error)
        except Exception as error:  # noqa: BLE001  report any error, run the next case
            traceback.print_exc()
            reason = " ".join(str(error).split())[:400]
            measurements = {"ok": False, "error": f"{type(error).__name__}: {reason}"}
            free_memory()
        yield name, {**measurements, "seconds": time.monotonic() - begun}


def round_floats(value: Any) -> Any:
    """Round nested floats to four digits; turn NaN and infinity into text, as JSON has neither."""
    if isinstance(value, Mapping):
        return {str(key): round_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_floats(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def synchronize_gpu() -> None:
    import torch

    if has_gpu():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Return unused memory to the GPU."""
    import gc

    import torch

    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()


def time_seconds(run: Callable[[], object], repeats: int = 1) -> float:
    """Measure the mean wall time of a call, including its GPU work, s."""
    synchronize_gpu()
    begun = time.monotonic()
    for _ in range(repeats):
        run()
    synchronize_gpu()
    return (time.monotonic() - begun) / repeats


@contextlib.contextmanager
def hide_gpu() -> Iterator[None]:
    """Hide the GPU from streamrl and transformers."""
    from streamrl.distributed import devices

    with mock.patch.object(devices, "has_local_gpu", lambda: False):
        yield


# --- Models and rollouts --------------------------------------------------------------------------

TINY_CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN2_COMMON: dict[str, Any] = {
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
TINY = "tiny"
QWEN2: Mapping[str, dict[str, Any]] = {
    TINY: TINY_CONFIG,
    "0.5B": {
        **QWEN2_COMMON,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5B": {
        **QWEN2_COMMON,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "3B": {
        **QWEN2_COMMON,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
}
"""Settings of Qwen2 models by size; all but the tiny model equal Qwen2.5."""
MIXED_ATTENTION = ["sliding_attention", "full_attention"]
ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "llama": {},
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 32,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "layer_types": MIXED_ATTENTION,
    },
    "deepseek_v3": {
        **ROUTED_EXPERTS,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    # Last: on a GPU transformers compiles its attention, which may take long or fail.
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
}


@contextlib.contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """Make a temporary folder, in shared memory if a model fits."""
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and shutil.disk_usage(shared).free > 16 * GIB
    with tempfile.TemporaryDirectory(dir=shared if has_room else None) as folder:
        yield Path(folder)


def write_tiny(folder: Path, architecture: str = "qwen2") -> str:
    """Write a float32 model with distributions far from uniform; return its path."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **{**TINY_CONFIG, **ARCHITECTURES[architecture]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            if values.dim() == 1:
                values.add_(0.1 * noise)
            elif "embed" in name:
                values.copy_(noise)
            else:
                values.copy_(1.5 * noise / math.sqrt(max(values.shape[-2:])))
    model.save_pretrained(folder / architecture)
    return str(folder / architecture)


def write_qwen2(folder: Path, size: str) -> str:
    """Write a Qwen2 model with random weights, drawn on the GPU if available; return its path."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    path = folder / size
    with torch.device("cuda" if has_gpu() else "cpu"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2[size]), dtype=torch.bfloat16)
    model.save_pretrained(path)
    del model
    free_memory()
    return str(path)


def make_groups(
    lengths: Sequence[Sequence[int]], vocabulary: int, *, seed: int = 0
) -> dict[str, Columns]:
    """Generate groups of rollouts of these lengths with every column that an algorithm may read."""
    import numpy as np

    from streamrl.messages import FinishReason, Rollout, rollouts_to_columns

    rng = np.random.default_rng(seed)
    groups: dict[str, Columns] = {}
    for number, group in enumerate(lengths):
        rollouts = [
            Rollout.from_single_turn(
                rng.integers(3, vocabulary, PROMPT_TOKENS).astype(np.int32),
                rng.integers(3, vocabulary, length - PROMPT_TOKENS).tolist(),
                logprobs=(-rng.uniform(2, 6, length - PROMPT_TOKENS)).tolist(),
                versions=[0] * (length - PROMPT_TOKENS),
                finish_reason=FinishReason.STOP,
            )
            for length in group
        ]
        columns = rollouts_to_columns(rollouts)
        mask, size = columns["loss_mask"], len(group)
        scores = rng.random(size).astype(np.float32)
        noise = rng.normal(0, 0.3, len(mask)).astype(np.float32)
        groups[f"0:{number}:0"] = {
            **columns,
            "scores": scores,
            "costs": 1 - scores,
            "reward/right": scores,
            "answers": rng.integers(1, 3, size),
            "baseline_scores": np.full_like(scores, scores.mean()),
            "values": np.where(mask, 0.1 * noise, 0).astype(np.float32),
            "cost_values": np.where(mask, -0.1 * noise, 0).astype(np.float32),
            "ref_logprobs": np.where(mask, columns["generator_logprobs"] + noise, 0),
        }
    return groups


def sample_logprobs(groups: Mapping[str, Columns], model_path: str) -> dict[str, Columns]:
    """Replace log-probabilities with those of a policy close to the model."""
    import numpy as np

    with hide_gpu():
        logprobs, _ = score_groups(model_path, list(groups.values()), "float32", TEMPERATURE)
        rng = np.random.default_rng(7)
        sampled: dict[str, Columns] = {}
        for (uid, columns), own in zip(groups.items(), logprobs, strict=True):
            near, far = (rng.normal(0, scale, len(own)).astype(np.float32) for scale in (0.1, 0.3))
            mask = columns["loss_mask"]
            sampled[uid] = {
                **columns,
                "generator_logprobs": np.where(mask, own + near, 0),
                "ref_logprobs": np.where(mask, own + far, 0),
            }
    return sampled


def make_policy_task(
    model_path: str, config: AlgorithmConfig, groups: Mapping[str, Columns]
) -> Any:
    from streamrl.engines.training.tasks import PolicyTask

    longest = max(int(columns["lengths"].max()) for columns in groups.values())
    settings = config.to_settings(max_length=longest, reward_weights={"right": 1.0})
    return PolicyTask(model_path, config.spec, settings, TEMPERATURE)


def list_picks(groups: Mapping[str, Columns]) -> list[tuple[str, int]]:
    """List all rollouts as (group uid, index)."""
    return [(uid, i) for uid, columns in groups.items() for i in range(len(columns["lengths"]))]


def build_full_batch(task: PolicyTask, groups: Mapping[str, Columns]) -> Any:
    """Build a batch of all rollouts, with the columns that the algorithm derives."""
    from streamrl.engines.training.collate import build_batch, derive_columns

    derived = derive_columns(task.spec, task.settings, groups)
    return build_batch(
        groups, list_picks(groups), derived=derived, token_columns=task.token_columns
    )


def make_tiny_groups(model_path: str) -> dict[str, Columns]:
    """Generate three groups of four short rollouts with log-probabilities close to the model's."""
    lengths = [[11, 7, 30, 19], [25, 9, 14, 40], [6, 33, 12, 21]]
    return sample_logprobs(make_groups(lengths, TINY_CONFIG["vocab_size"]), model_path)


# --- Step: the machine ----------------------------------------------------------------------------

PACKAGES = ("torch", "transformers", "deepspeed", "tensordict", "triton", "numpy", "safetensors")


def check_machine() -> Iterator[tuple[str, Measurements]]:
    """Report driver, compilers and memory; import the trainer."""
    yield from run_cases({"system": describe_system, "imports": import_trainer})


def describe_system() -> Measurements:
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    measurements: Measurements = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "nvidia_smi": read_output_line(query),
        "nvcc": read_output_line(["nvcc", "--version"], last=True),
        "compiler": read_output_line(["cc", "--version"]),
        "Python.h": Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        "shared_memory_gib": shutil.disk_usage("/dev/shm").total / GIB,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "cuda": torch.version.cuda,
        "versions": {name: get_package_version(name) for name in PACKAGES},
    }
    if has_gpu():
        properties = torch.cuda.get_device_properties(0)
        measurements |= {
            "gpu": properties.name,
            "capability": list(torch.cuda.get_device_capability()),
            "free_gib": torch.cuda.mem_get_info()[0] / GIB,
            "nccl": list(torch.cuda.nccl.version()),
        }
    return measurements


def read_output_line(command: Sequence[str], *, last: bool = False) -> str | None:
    """Run a command; return its first or last output line, None if it fails to start."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines() or [""]
    return lines[-1 if last else 0]


def get_package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_trainer() -> Measurements:
    """Import the trainer and DeepSpeed; fail if they import Ray or vLLM."""
    begun = time.monotonic()
    import streamrl.engines.training.model_trainer
    import streamrl.weights.buckets  # noqa: F401
    from streamrl.engines.training.training_backend import import_deepspeed

    imported = time.monotonic()
    # On a GPU DeepSpeed also probes the compilers, once per kind of kernel.
    import_deepspeed()
    needless = [name for name in ("ray", "vllm") if name in sys.modules]
    return {
        "ok": not needless,
        "needless": needless,
        "trainer_s": imported - begun,
        "deepspeed_s": time.monotonic() - imported,
    }


# --- Step: every loss -----------------------------------------------------------------------------

VARIANTS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"kl_coef": 0.1},
    "entropy": {"entropy_coef": 0.01},
}


@dataclass(frozen=True)
class LossResult:
    """Loss of a batch, flat gradient of all parameters, and the sums that the loss reports."""

    loss: float
    gradient: Tensor
    sums: Mapping[str, float]


def check_losses() -> Iterator[tuple[str, Measurements]]:
    """Compare scores, losses and gradients of all algorithms with the CPU in float32."""
    with make_scratch_folder() as folder:
        path = write_tiny(folder)
        groups = make_tiny_groups(path)
        cases = {
            f"{quantity}, {dtype}": partial(compare, path, groups, dtype)
            for dtype in ("float32", "bfloat16")
            for quantity, compare in (("scores", compare_scores), ("losses", compare_losses))
        }
        yield from run_cases(cases)


@cache
def load_reference_model(model_path: str) -> Any:
    """Load a model on the CPU in float32."""
    import torch

    from streamrl.engines.models.forward import load_model

    with hide_gpu():
        return load_model(model_path, dtype=torch.float32)


@cache
def load_device_model(model_path: str, dtype: str) -> Any:
    """Load a model on the device that streamrl chooses."""
    from streamrl.engines.dtypes import TORCH_DTYPES
    from streamrl.engines.models.forward import load_model

    return load_model(model_path, dtype=TORCH_DTYPES[dtype])


def compare_scores(path: str, groups: Mapping[str, Columns], dtype: str) -> Measurements:
    """Compare log-probabilities and entropies."""
    import torch

    from streamrl.algorithms import AlgorithmConfig
    from streamrl.distributed.devices import get_local_device

    task = make_policy_task(path, AlgorithmConfig(), groups)
    batch = build_full_batch(task, groups)
    with torch.no_grad():
        expected = task.score_batch(load_reference_model(path), batch, "value")
        actual = task.score_batch(
            load_device_model(path, dtype), batch.to(get_local_device()), "value"
        )
    mask = batch["attention_mask"]
    logprobs = (actual.logprobs.cpu() - expected.logprobs).abs()[mask]
    entropy = (actual.entropy.cpu() - expected.entropy).abs()[mask]
    is_close = (
        logprobs.max() < FP32_LOGPROB if dtype == "float32" else logprobs.mean() < BF16_LOGPROB
    )
    return {
        "ok": bool(is_close),
        "logprob": summarize_differences(logprobs),
        "entropy": summarize_differences(entropy),
    }


def summarize_differences(differences: Tensor) -> Measurements:
    """Compute maximum and mean of absolute differences."""
    return {"max": float(differences.max()), "mean": float(differences.mean())}


def compare_losses(
    path: str,
    groups: Mapping[str, Columns],
    dtype: str,
    variants: Mapping[str, Mapping[str, Any]] = VARIANTS,
) -> Measurements:
    """Compare loss and gradient of every algorithm: by default plain, with KL, with entropy."""
    from streamrl.algorithms import ALGORITHMS, AlgorithmConfig
    from streamrl.distributed.devices import get_local_device
    from streamrl.errors import ConfigError

    losses: dict[str, float] = {}
    gradients: dict[str, float] = {}
    refused = []
    for name in ALGORITHMS:
        for variant, settings in variants.items():
            label = f"{name}/{variant}"
            try:
                config = AlgorithmConfig(name=name, **settings)
            except ConfigError:
                refused.append(label)
                continue
            task = make_policy_task(path, config, groups)
            batch = build_full_batch(task, groups)
            expected = compute_loss_and_gradient(task, load_reference_model(path), batch)
            actual = compute_loss_and_gradient(
                task, load_device_model(path, dtype), batch.to(get_local_device())
            )
            scale = max(abs(expected.loss), expected.sums.get("num_tokens", 1.0) * 1e-2)
            losses[label] = abs(actual.loss - expected.loss) / scale
            norm = float(expected.gradient.norm())
            gradients[label] = float((actual.gradient - expected.gradient).norm()) / max(norm, 1e-9)
    worst = max(gradients.values())
    limit = FP32_GRADIENT if dtype == "float32" else math.inf
    return {
        "ok": math.isfinite(worst) and worst < limit,
        "variants": len(losses),
        "refused": refused,
        "median_gradient": sorted(gradients.values())[len(gradients) // 2],
        "worst_losses": select_largest(losses),
        "worst_gradients": select_largest(gradients),
    }


def compute_loss_and_gradient(task: PolicyTask, model: Any, batch: Any) -> LossResult:
    """Compute loss and gradient of a batch on the device of the model."""
    import torch

    model.zero_grad()
    loss, sums = task.compute_loss(model, batch, version=0)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.detach().float().cpu().flatten() for gradient in gradients])
    return LossResult(loss.item(), flat, {name: float(value) for name, value in sums.items()})


def select_largest(differences: Mapping[str, float], count: int = 3) -> dict[str, float]:
    """Select the largest differences; NaN ranks first."""

    def rank_by(item: tuple[str, float]) -> float:
        return math.inf if math.isnan(item[1]) else item[1]

    return dict(sorted(differences.items(), key=rank_by, reverse=True)[:count])


# --- Step: the trainer ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerLayout:
    """Backend, ZeRO stage, parameter dtype, LoRA rank and checkpointing of a trainer."""

    backend: str
    zero_stage: int
    dtype: str
    lora_rank: int = 0
    gradient_checkpointing: bool | str = False

    @property
    def label(self) -> str:
        """Case name in the report."""
        lora = f" LoRA {self.lora_rank}" if self.lora_rank else ""
        offload = f" {self.gradient_checkpointing}" if self.gradient_checkpointing else ""
        return f"{self.backend} {self.zero_stage} {self.dtype}{lora}{offload}"


LAYOUTS = (
    TrainerLayout("deepspeed", 1, "bfloat16"),
    TrainerLayout("deepspeed", 1, "float32"),
    TrainerLayout("torch", 0, "float32"),
    TrainerLayout("deepspeed", 3, "bfloat16"),
    TrainerLayout("deepspeed", 1, "bfloat16", lora_rank=8),
    TrainerLayout("deepspeed", 2, "bfloat16"),
    TrainerLayout("deepspeed", 2, "float32"),
    TrainerLayout("deepspeed", 3, "float32"),
    TrainerLayout("deepspeed", 3, "bfloat16", gradient_checkpointing="offload"),
    TrainerLayout("deepspeed", 3, "float32", gradient_checkpointing="offload"),
    TrainerLayout("torch", 0, "float32", gradient_checkpointing="offload"),
)
"""Starts with the default of a GPU run, so that a missed deadline still covers it."""


def check_trainer() -> Iterator[tuple[str, Measurements]]:
    """Train three steps in every layout; compare with a plain loop and with a resumed trainer."""
    from streamrl.engines.models import activation_checkpointing

    activation_checkpointing.MLP_CHUNK_TOKENS = 16  # several chunks of the MLPs
    with make_scratch_folder() as folder:
        path = write_tiny(folder)
        groups = make_tiny_groups(path)
        cases: dict[str, Callable[[], Measurements]] = {
            layout.label: partial(train_and_resume, layout, path, groups, folder)
            for layout in LAYOUTS
        }
        yield from run_cases(cases)


def train_and_resume(
    layout: TrainerLayout, path: str, groups: Mapping[str, Columns], folder: Path
) -> Measurements:
    """Train three steps; then load the state saved after the second step and repeat the third."""
    import torch

    saved = folder / layout.label.replace(" ", "-")
    trainer = make_trainer(layout, path, groups)
    norms = [take_step(trainer, groups) for _ in range(2)]
    trainer.save_training_state(saved)
    drawn = torch.rand(4, device=get_device_name()).tolist()
    norms.append(take_step(trainer, groups))
    trained = copy_parameters(trainer)
    trainer.close()
    trainer = make_trainer(layout, path, groups)
    trainer.load_training_state(saved)
    drawn_again = torch.rand(4, device=get_device_name()).tolist()
    take_step(trainer, groups)
    resumed = copy_parameters(trainer)
    trainer.close()
    from_resumed = compare_parameters(trained, resumed)
    measurements = {
        "ok": from_resumed["mean"] < PARAMETER_TOLERANCE and drawn == drawn_again,
        "norms": norms,
        "from_resumed_in_lr": from_resumed,
        "resumed_bits_equal": from_resumed["max"] == 0,
        "same_random_numbers": drawn == drawn_again,
    }
    if layout.lora_rank:  # the plain loop has no adapters
        return measurements
    expected, expected_norms = train_plain_loop(path, groups, 3)
    norm_error = max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True))
    measurements["norm_error"] = norm_error
    if layout.dtype == "bfloat16":
        # bfloat16 rounds parameters by far more than a learning rate.
        measurements["ok"] &= norm_error < BF16_NORM
    else:
        measurements["from_plain_in_lr"] = from_plain = compare_parameters(trained, expected)
        measurements["ok"] &= (
            norm_error < FP32_GRADIENT and from_plain["mean"] < PARAMETER_TOLERANCE
        )
    return measurements


def get_device_name() -> str:
    from streamrl.distributed.devices import get_local_device

    return str(get_local_device())


def make_trainer(
    layout: TrainerLayout, path: str, groups: Mapping[str, Columns], **changes: Any
) -> ModelTrainer:
    """Make a single-rank trainer."""
    from streamrl.algorithms import AlgorithmConfig
    from streamrl.engines.training.model_trainer import ModelTrainer

    task = make_policy_task(path, AlgorithmConfig(), groups)
    return ModelTrainer(task, config=make_trainer_config(layout, **changes))


def make_trainer_config(layout: TrainerLayout, **changes: Any) -> TrainerConfig:
    from streamrl.engines.trainer_config import TrainerConfig

    return TrainerConfig(lr=LR, **{**asdict(layout), **changes})


def take_step(trainer: ModelTrainer, groups: Mapping[str, Columns]) -> float:
    """Train all rollouts in two micro-batches and update; return the gradient norm."""
    picks = list_picks(groups)
    sums: dict[str, float] = {}
    for part in (picks[::2], picks[1::2]):
        for name, value in trainer.train_micro_batch(groups, part).items():
            sums[name] = sums.get(name, 0.0) + value
    return trainer.update(trainer.compute_loss_denominator(sums))["policy/grad_norm"]


def copy_parameters(trainer: ModelTrainer) -> dict[str, Tensor]:
    """Copy the parameters to the CPU."""
    return {name: tensor.float().cpu().clone() for name, tensor in trainer.full_state()}


def train_plain_loop(
    path: str, groups: Mapping[str, Columns], num_steps: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in float32 on the CPU without `ModelTrainer`; return parameters and gradient norms."""
    import torch

    from streamrl.algorithms import AlgorithmConfig

    task = make_policy_task(path, AlgorithmConfig(), groups)
    model = copy.deepcopy(load_reference_model(path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    batch = build_full_batch(task, groups)
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss, sums = task.compute_loss(model, batch, version=0)
        (
            loss / task.compute_loss_denominator({n: float(value) for n, value in sums.items()})
        ).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


def compare_parameters(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Measurements:
    """Measure the difference of parameters, in learning rates."""
    import torch

    differences = [
        (tensor - expected[name]).abs().flatten() / LR for name, tensor in actual.items()
    ]
    return summarize_differences(torch.cat(differences))


# --- Step: architectures --------------------------------------------------------------------------


CHOSEN_KERNELS = ("attn", "experts")
"""Layers for which transformers chooses an implementation, by the prefix of its setting."""


def check_architectures() -> Iterator[tuple[str, Measurements]]:
    """Compare log-probabilities of ten architectures with the CPU in float32."""
    with make_scratch_folder() as folder:
        yield from run_cases(
            {name: partial(compare_architecture, folder, name) for name in ARCHITECTURES}
        )


def compare_architecture(folder: Path, architecture: str) -> Measurements:
    """Score generated rollouts with a reference's rank on CPU and GPU."""
    path = write_tiny(folder, architecture)
    (columns,) = make_groups([[60, 17, 33, 100]], TINY_CONFIG["vocab_size"]).values()
    with hide_gpu():
        expected, on_cpu = score_group(path, columns, "float32")
        # Rounding to expect: bfloat16 on the CPU.
        rounded, _ = score_group(path, columns, "bfloat16")
    mask = columns["loss_mask"]
    measurements: Measurements = {"ok": True, "cpu": on_cpu}
    measurements["cpu bfloat16"] = summarize_sampled(rounded - expected, mask)
    for dtype in ("float32", "bfloat16"):
        logprobs, chosen = score_group(path, columns, dtype)
        differences = summarize_sampled(logprobs - expected, mask)
        measurements |= {**chosen, dtype: differences}
        if dtype == "float32":
            measurements["ok"] &= differences["max"] < FP32_LOGPROB
        else:
            measurements["ok"] &= (
                differences["mean"] < 2 * measurements["cpu bfloat16"]["mean"] + BF16_LOGPROB
            )
    return measurements


def score_group(path: str, columns: Columns, dtype: str) -> tuple[Array, Measurements]:
    """Return the log-probabilities of a group, and the implementation of attention and experts."""
    (logprobs,), chosen = score_groups(path, [columns], dtype, temperature=1.0)
    return logprobs, chosen


def score_groups(
    path: str, groups: list[Columns], dtype: str, temperature: float
) -> tuple[list[Array], Measurements]:
    """Return log-probabilities under a reference, and its kernels of attention and experts."""
    from streamrl.algorithms import AlgorithmConfig
    from streamrl.engines.trainer_config import RankLayout, TrainerConfig
    from streamrl.engines.training.model_rank import ModelRank
    from streamrl.engines.training.tasks import PolicyTask

    algorithm = AlgorithmConfig()
    settings = algorithm.to_settings(max_length=4096, reward_weights={"right": 1.0})
    ranks = RankLayout().to_trainer_config(TrainerConfig(dtype=dtype))
    reference = ModelRank(PolicyTask(path, algorithm.spec, settings, temperature), config=ranks)
    config = vars(reference._backend.module.config)
    chosen = {kind: config.get(f"_{kind}_implementation_internal") for kind in CHOSEN_KERNELS}
    logprobs = reference.compute_columns(groups, "ref_logprobs", micro_batch_tokens=4096)
    reference.close()
    return logprobs, chosen


def summarize_sampled(differences: Array, mask: Array) -> Measurements:
    """Compute maximum and mean of absolute differences of sampled tokens."""
    import torch

    return summarize_differences(torch.from_numpy(abs(differences[mask])))


# --- Step: nccl without a peer --------------------------------------------------------------------

NCCL_TIMEOUT_S = 3.0
JOIN_S = 20.0
ALIVE_S = 20.0
"""A process that lives this long after its call ended counts as having survived, s."""
NCCL_S = 62.0
STUCK_S = 10.0
"""Time that the GPU is kept busy before the late collective, s."""
CYCLES_PER_S = 1.7e9
NCCL_RUNS: Mapping[str, tuple[str, dict[str, str]]] = {
    "late collective of a trainer": ("late", {}),
    "trainer left alone": ("left_alone", {}),
    "join without a peer": ("lonely_join", {}),
    "reader never joins": ("lonely_group", {}),
    "reader dies before the broadcast": ("dead_reader", {}),
    "reader on the same GPU": ("same_gpu", {}),
    "broadcast that the GPU never reaches": ("stalled", {}),
}
"""By case: the part of this step to run, and environment variables to add."""
SURVIVORS = ("lonely_group", "dead_reader", "same_gpu", "stalled")
"""Parts that a process must survive, with an error in time: a reader must not cost a trainer."""
BROADCAST_S = 30.0
"""Time after which a broadcast must have ended: its own deadline and that of connecting, s."""
READERS: Mapping[str, str] = {
    "left_alone": "leave_at_once",
    "dead_reader": "die_as_reader",
    "same_gpu": "join_as_reader",
}
"""By part: part of a second process that runs beside it."""


def check_nccl() -> Iterator[tuple[str, Measurements]]:
    """Report error, delay and survival of a process whose nccl call gets no answer."""
    if not has_gpu():
        yield "all", {"skipped": "nccl needs a GPU; gloo enforces its own timeouts"}
        return
    with tempfile.TemporaryDirectory() as name:
        begun = time.monotonic()
        runs = {}
        for label, (part, env) in NCCL_RUNS.items():
            out = Path(name, label)
            with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
                env = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
                started = start_child(part, "cuda", env=env, stdout=stdout, stderr=stderr)
                if part in READERS:
                    start_child(READERS[part], "cuda", env=env, stdout=stdout, stderr=stderr)
            runs[label] = (started, out)
        for label, (process, out) in runs.items():
            code = wait_or_kill(process, NCCL_S - (time.monotonic() - begun))
            events = read_cases(out)
            outcome = "died" if code else "ran on until it was killed"
            is_alive = "alive" in events
            is_prompt = bool(events.get("ended", {}).get("raised")) and (
                events["ended"]["at"] < BROADCAST_S
            )
            measurements = {
                "ok": NCCL_RUNS[label][0] not in SURVIVORS or (is_alive and is_prompt),
                "outcome": "lived on" if is_alive else outcome,
                "exit_code": code,
                "events": events,
                "stderr": out.with_suffix(".err").read_text(errors="replace")[-500:],
            }
            yield label, measurements


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def report_call(run: Callable[[], object]) -> Iterator[tuple[str, Measurements]]:
    """Report the error of a call, and whether the process survives the call."""
    begun = time.monotonic()
    yield "begun", {}
    try:
        run()
        ended: Measurements = {"raised": None}
    except Exception as error:  # noqa: BLE001  the type of the error is the result
        ended = {"raised": f"{type(error).__name__}: {str(error)[:300]}"}
    yield "ended", {**ended, "at": time.monotonic() - begun}
    time.sleep(ALIVE_S)
    import torch

    is_right = bool((torch.ones(1 << 20, device="cuda") * 2).sum().item() == 2 << 20)
    yield "alive", {"at": time.monotonic() - begun, "gpu_still_computes": is_right}


def wait_for_late_collective() -> Iterator[tuple[str, Measurements]]:
    """Wait for a collective behind a busy kernel on the same GPU.

    nccl's watchdog cannot tell this from a collective that waits for a dead peer.
    """
    import torch
    import torch.distributed as dist

    from streamrl.distributed.process_group import join_process_group, translate_collective_errors

    join_process_group(rank=0, world_size=1, timeout_s=NCCL_TIMEOUT_S)
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()

    def wait() -> None:
        torch.cuda._sleep(int(STUCK_S * CYCLES_PER_S))
        with translate_collective_errors("late"):
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=NCCL_TIMEOUT_S))
            tensor.sum().item()

    return report_call(wait)


def make_broadcast_group(rank: int, num_readers: int) -> Any:
    """Make a broadcast group of the weights; rank 0 serves its store at MASTER_PORT."""
    import torch

    from streamrl.distributed.process_group import serve_tcp_store
    from streamrl.errors import WeightsError
    from streamrl.weights.transports.collective import (
        BroadcastGroup,
        GroupEpoch,
        SharedDeadline,
        join_store,
    )

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    epoch = GroupEpoch(0, host, port, ("reader",) * num_readers)
    deadline = SharedDeadline(JOIN_S)
    store = None if rank else serve_tcp_store(host, port, JOIN_S)
    while store is None:
        try:
            store = join_store(epoch, deadline)
        except WeightsError:  # the publisher's process does not listen yet
            if deadline.has_passed():
                raise
            time.sleep(0.1)
    return BroadcastGroup(store, epoch, rank, torch.device("cuda", 0), deadline)


def broadcast_tensor(group: Any, timeout_s: float = NCCL_TIMEOUT_S) -> None:
    """Broadcast pinned memory with a deadline."""
    import torch

    from streamrl.weights.transports.collective import SharedDeadline

    tensor = torch.ones(1 << 20, pin_memory=True)
    group.broadcast_tensor(tensor, SharedDeadline(timeout_s))


def broadcast_to_reader(*, wait_s: float = 0.0) -> Iterator[tuple[str, Measurements]]:
    """Broadcast weights to a reader, after waiting."""
    group = make_broadcast_group(0, 1)
    time.sleep(wait_s)
    return report_call(partial(broadcast_tensor, group))


def join_as_reader() -> Iterator[tuple[str, Measurements]]:
    """Receive a broadcast on the GPU of its sender, which nccl refuses."""
    broadcast_tensor(make_broadcast_group(1, 1))
    yield from ()


def die_as_reader() -> Iterator[tuple[str, Measurements]]:
    """Make the group, then kill this process."""
    make_broadcast_group(1, 1)
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def broadcast_on_busy_gpu() -> Iterator[tuple[str, Measurements]]:
    """Broadcast behind a kernel that outlasts the deadline, as behind a dead reader."""
    import torch

    group = make_broadcast_group(0, 0)
    broadcast_tensor(group, JOIN_S)
    with torch.cuda.stream(group._stream):
        torch.cuda._sleep(int(STUCK_S * CYCLES_PER_S))
    return report_call(partial(broadcast_tensor, group))


def reduce_when_left_alone() -> Iterator[tuple[str, Measurements]]:
    """Reduce with a rank that joined and then died."""
    import torch
    import torch.distributed as dist

    from streamrl.distributed.process_group import (
        join_process_group,
        set_collective_timeout,
        translate_collective_errors,
    )

    join_process_group(rank=0, world_size=2, timeout_s=JOIN_S)
    set_collective_timeout(NCCL_TIMEOUT_S)
    time.sleep(1)

    def reduce() -> None:
        with translate_collective_errors("left alone"):
            tensor = torch.ones(1 << 20, device="cuda")
            dist.all_reduce(tensor)
            tensor.sum().item()

    return report_call(reduce)


def leave_at_once() -> Iterator[tuple[str, Measurements]]:
    """Join as the second rank, then kill this process."""
    from streamrl.distributed.process_group import join_process_group

    join_process_group(rank=1, world_size=2, timeout_s=JOIN_S)
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def join_alone() -> Iterator[tuple[str, Measurements]]:
    """Wait for a second rank that never joins."""
    from streamrl.distributed.process_group import join_process_group

    return report_call(partial(join_process_group, rank=0, world_size=2, timeout_s=NCCL_TIMEOUT_S))


NCCL_PARTS: Mapping[str, Callable[[], Iterator[tuple[str, Measurements]]]] = {
    "late": wait_for_late_collective,
    "lonely_group": broadcast_to_reader,
    "dead_reader": partial(broadcast_to_reader, wait_s=2.0),
    "same_gpu": broadcast_to_reader,
    "join_as_reader": join_as_reader,
    "die_as_reader": die_as_reader,
    "stalled": broadcast_on_busy_gpu,
    "left_alone": reduce_when_left_alone,
    "leave_at_once": leave_at_once,
    "lonely_join": join_alone,
}


# --- Step: memory ---------------------------------------------------------------------------------


MEMORY_ROW = 4096
PASSES: Mapping[str, Sequence[tuple[int, bool | str]]] = {
    "1.5B": ((1, True), (1, False), (4, True), (8, True), (8, "offload"), (4, False)),
    "3B": ((1, True), (2, True), (4, True), (4, "offload"), (1, False)),
    TINY: ((1, True), (1, False), (1, "offload")),
}
"""By model: rows of a micro-batch, and trainer.gradient_checkpointing. The largest come last."""


def check_memory(size: str) -> Iterator[tuple[str, Measurements]]:
    """Compare peak memory of a micro-batch and of an update with streamrl's estimate.

    Stop after the first pass out of memory: its leftovers would count in the next. A first update
    that does not fit is reported with its estimate, and is a failure if the GPU has that memory.
    """
    import torch

    model, width = (size, MEMORY_ROW) if has_gpu() else (TINY, 64)
    layout = TrainerLayout("deepspeed", 1, "bfloat16")
    with make_scratch_folder() as folder:
        path = write_qwen2(folder, model)
        groups = make_groups([[width] * 8], QWEN2[model]["vocab_size"])
        picks = list_picks(groups)
        try:
            trainer = make_trainer(layout, path, groups, gradient_checkpointing=True)
            # The first update allocates the optimizer's state.
            measure_pass(trainer, groups, picks[:1])
        except torch.OutOfMemoryError as error:
            config = make_trainer_config(layout, gradient_checkpointing=True)
            expected = estimate_pass_memory(path, config, width)
            total_gib = torch.cuda.mem_get_info()[1] / GIB if has_gpu() else 0.0
            is_too_large = expected["expected_update"] > total_gib
            measurements = {"error": f"OutOfMemory: {error}", **expected, "ok": is_too_large}
            yield f"{width} tokens, first update", measurements
            return
        for rows, checkpointing in PASSES[model]:
            set_checkpointing(trainer._backend.module, checkpointing)
            config = make_trainer_config(layout, gradient_checkpointing=checkpointing)
            expected = estimate_pass_memory(path, config, rows * width)
            label = "checkpointing" if checkpointing is True else checkpointing
            name = f"{rows * width} tokens" + (f", {label}" if label else "")
            run = partial(measure_pass, trainer, groups, picks[:rows])
            ((_, measurements),) = run_cases({name: run})
            is_full = "OutOfMemory" in measurements.get("error", "")
            yield name, {**measurements, **expected, "ok": is_full or measurements.get("ok", True)}
            if "error" in measurements:
                break
        trainer.close()


def set_checkpointing(module: Any, setting: bool | str) -> None:
    """Make a model recompute activations as with trainer.gradient_checkpointing=`setting`."""
    from streamrl.engines.models.activation_checkpointing import (
        checkpoint_layers,
        iter_chunked_mlps,
    )

    for mlp in list(iter_chunked_mlps(module)):
        del vars(mlp)["forward"]
    module.gradient_checkpointing_disable()
    if setting:
        checkpoint_layers(module, offload=setting == "offload" and has_gpu(), chunk_mlps=True)


def measure_pass(
    trainer: ModelTrainer, groups: Mapping[str, Columns], picks: Sequence[tuple[str, int]]
) -> Measurements:
    """Train a micro-batch and update; return the peak memory of both, GiB."""
    free_memory()
    held = read_memory_gib("memory_allocated")
    reset_peak_memory()
    seconds = time_seconds(lambda: trainer.train_micro_batch(groups, picks))
    peak = read_memory_gib("max_memory_allocated")
    reset_peak_memory()
    trainer.update(float(len(picks)))
    return {
        "held": held,
        "micro_batch": peak,
        "update": read_memory_gib("max_memory_allocated"),
        "reserved": read_memory_gib("max_memory_reserved"),
        "pass_seconds": seconds,
    }


def read_memory_gib(name: str) -> float | None:
    """Read a memory counter of `torch.cuda`, GiB; None on a CPU."""
    import torch

    return getattr(torch.cuda, name)() / GIB if has_gpu() else None


def reset_peak_memory() -> None:
    import torch

    if has_gpu():
        torch.cuda.reset_peak_memory_stats()


def estimate_pass_memory(path: str, config: TrainerConfig, tokens: int) -> Measurements:
    """Compute streamrl's estimate for a micro-batch, GiB."""
    from streamrl.engines.generator_config import GeneratorConfig
    from streamrl.engines.memory.memory_model import measure_training_sizes
    from streamrl.engines.memory.training_memory import estimate_rank_memory
    from streamrl.engines.models.forward import load_skeleton

    generator = GeneratorConfig(kv_cache_mb=64)
    sizes = measure_training_sizes(load_skeleton(path), config, on_gpu=True)
    tokens = -(-tokens // config.sequence_parallel)
    estimate = estimate_rank_memory(sizes, config, generator, tokens=tokens, on_gpu=True)
    held = (estimate.weights + estimate.optimizer + estimate.gradients) / GIB
    return {
        "expected_held": held,
        "expected_micro_batch": held + estimate.activations / GIB,
        "expected_update": held + estimate.update_buffers / GIB,
    }


# --- Step: optimizer offload ----------------------------------------------------------------------


def check_optimizer_memory() -> Iterator[tuple[str, Measurements]]:
    """Offload and restore the optimizer's state; measure memory and time, compare bitwise."""
    size = "0.5B" if has_gpu() else TINY
    with make_scratch_folder() as folder:
        path = write_qwen2(folder, size)
        groups = make_groups([[64, 40, 52, 64]], QWEN2[size]["vocab_size"])
        layouts = [TrainerLayout("deepspeed", stage, "bfloat16") for stage in (1, 3)]
        yield from run_cases(
            {layout.label: partial(offload_and_restore, layout, path, groups) for layout in layouts}
        )


def offload_and_restore(
    layout: TrainerLayout, path: str, groups: Mapping[str, Columns]
) -> Measurements:
    """Offload and restore twice; the second round reuses pinned memory."""
    import torch

    trainer = make_trainer(layout, path, groups)
    take_step(trainer, groups)
    before = [tensor.detach().clone() for tensor in trainer._backend.iter_optimizer_state()]
    rounds = []
    for _ in range(2):
        free = measure_free_gib()
        away_s = time_seconds(trainer.offload_optimizer)
        freed = measure_free_gib()
        back_s = time_seconds(trainer._optimizer_offload.restore_state)
        rounds.append({"away_s": away_s, "back_s": back_s, "freed_gib": freed - free})
    after = list(trainer._backend.iter_optimizer_state())
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    state_gib = sum(tensor.nbytes for tensor in before) / GIB
    norm = take_step(trainer, groups)
    trainer.close()
    measurements = {
        "ok": same and math.isfinite(norm),
        "bits_equal": same,
        "state_gib": state_gib,
        "rounds": rounds,
        "pinned_gib": count_pinned_gib(),
    }
    del trainer
    free_memory()
    return measurements


def measure_free_gib() -> float:
    """Measure the free memory of the GPU, all processes counted; 0 on a CPU."""
    import torch

    return torch.cuda.mem_get_info()[0] / GIB if has_gpu() else 0.0


def count_pinned_gib() -> float:
    """Return the pinned memory that offloads keep for the next one, GiB; 0 on a CPU."""
    from streamrl.weights.pinned_memory import FREE_BLOCKS

    return sum(size * len(blocks) for (size, *_), blocks in FREE_BLOCKS.items()) / GIB


# --- Step: layers in host memory ------------------------------------------------------------------


def check_layer_offload() -> Iterator[tuple[str, Measurements]]:
    """Score with layers on the device, then in host memory: bits, seconds and memory."""
    size, counts = ("3B", (1024, 8192, 32768)) if has_gpu() else (TINY, (64,))
    with make_scratch_folder() as folder:
        path = write_qwen2(folder, size)
        cases = {f"{size}, {n} tokens": partial(score_from_host, path, size, n) for n in counts}
        yield from run_cases(cases)


def score_from_host(path: str, size: str, num_tokens: int) -> Measurements:
    import torch

    from streamrl.distributed.devices import get_local_device
    from streamrl.engines.models.forward import compute_token_logprobs, load_model
    from streamrl.engines.models.layer_offload import keep_layers_on_host

    model = load_model(path, dtype=torch.bfloat16)
    ids = torch.randint(QWEN2[size]["vocab_size"], (1, num_tokens)).to(get_local_device())
    num_layers, results = QWEN2[size]["num_hidden_layers"], []

    def score() -> Tensor:
        with torch.inference_mode():
            return compute_token_logprobs(model, ids, ids >= 0, temperature=1.0).logprobs

    for move in (lambda _: None, keep_layers_on_host):
        move(model)
        free_memory()
        logprobs = score()
        reset_peak_memory()
        seconds = time_seconds(score, repeats=3)
        peak = read_memory_gib("max_memory_allocated")
        results.append((logprobs, {"layer_ms": 1e3 * seconds / num_layers, "peak_gib": peak}))
    (plain, on_device), (found, from_host) = results
    same = torch.equal(plain, found)
    layer_gib = sum(p.nbytes for p in model.model.layers[0].parameters()) / GIB
    sizes = {"layer_gib": layer_gib, "on_device": on_device, "from_host": from_host}
    return {"ok": same, "bits_equal": same, **sizes}


# --- Step: weights --------------------------------------------------------------------------------


def check_weights() -> Iterator[tuple[str, Measurements]]:
    """Publish weights to a model on the same GPU, through host and GPU memory; measure GB/s."""
    num_tensors, elements = (48, 32 << 20) if has_gpu() else (4, 1 << 20)
    yield from run_cases(
        {
            "shared memory": partial(publish_and_fetch, num_tensors, elements),
        }
    )


def publish_and_fetch(num_tensors: int, elements: int) -> Measurements:
    """Publish three versions of bfloat16 tensors; from the second on, shared memory is reused."""
    import torch

    from streamrl.weights import TransportReader, TransportWriter
    from streamrl.weights.buckets import publish_version, unpack_tensors
    from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter

    device = get_device_name()
    trained = {
        f"layer.{i}": torch.randn(elements, device=device).bfloat16() for i in range(num_tensors)
    }
    served = {name: torch.empty_like(tensor) for name, tensor in trained.items()}
    num_bytes = sum(tensor.nbytes for tensor in trained.values())
    # The fallbacks do nothing: every bucket must fit in shared memory.
    writer = SharedMemoryWriter(f"gpu-check-{os.getpid()}", TransportWriter(), keep_versions=1)
    reader = SharedMemoryReader("gpu check", TransportReader())
    rounds = []
    try:
        for version in range(3):
            for tensor in trained.values():
                tensor.add_(1)
            synchronize_gpu()
            begun = time.monotonic()
            manifest = publish_version(
                trained.items(), version=version, bucket_bytes=64 << 20, writer=writer
            )
            published = time.monotonic()
            tensors = unpack_tensors(manifest, reader.fetch_buckets(manifest))
            verified = time.monotonic()
            copy_s = time_seconds(partial(copy_tensors, served, tensors))
            rounds.append(
                {
                    "publish": num_bytes / GB / (published - begun),
                    "verify": num_bytes / GB / (verified - published),
                    "copy_in": num_bytes / GB / copy_s,
                }
            )
            del tensors
    finally:
        writer.close()
    same = all(torch.equal(tensor, served[name]) for name, tensor in trained.items())
    return {
        "ok": same,
        "bits_equal": same,
        "gb_per_s": rounds,
        **measure_copy_speeds(trained, served),
    }


def copy_tensors(target: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        target[name].copy_(tensor)


def measure_copy_speeds(
    trained: Mapping[str, Tensor], served: Mapping[str, Tensor]
) -> Measurements:
    """Measure copies without shared memory, for comparison, GB/s."""
    import torch

    num_bytes = sum(tensor.nbytes for tensor in trained.values())
    speeds: Measurements = {
        "device_to_device": num_bytes / GB / time_seconds(lambda: copy_tensors(served, trained), 3)
    }
    tensor = next(iter(trained.values()))
    for kind in ("pageable", "pinned") if has_gpu() else ():
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=kind == "pinned")
        host.copy_(tensor)
        speeds[f"{kind}_out"] = tensor.nbytes / GB / time_seconds(partial(host.copy_, tensor), 8)
        speeds[f"{kind}_in"] = tensor.nbytes / GB / time_seconds(partial(tensor.copy_, host), 8)
    return speeds


# --- Step: speed ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedWorkload:
    """Size of a model, and rows and tokens per row of a batch."""

    model: str
    rows: int
    width: int


def check_speed() -> Iterator[tuple[str, Measurements]]:
    """Measure tokens per second of forward and backward, and the time of scoring alone."""
    workload = SpeedWorkload("0.5B", 4, 2048) if has_gpu() else SpeedWorkload(TINY, 4, 64)
    step = workload.width // workload.rows
    full = [workload.width] * workload.rows
    ragged = [step * (i + 1) for i in range(workload.rows)]
    with make_scratch_folder() as folder:
        path = write_qwen2(folder, workload.model)
        cases: dict[str, Callable[[], Measurements]] = {
            f"{dtype}, {rows}": partial(measure_speed, path, dtype, lengths, workload.model)
            for dtype in ("bfloat16", "float32", "float32 by TF32")
            for rows, lengths in (("full rows", full), ("ragged rows", ragged))
        }
        cases["scores alone"] = partial(measure_scores, workload)
        yield from run_cases(cases)


def measure_speed(path: str, dtype: str, lengths: list[int], model: str) -> Measurements:
    """Measure loss and backward pass of a batch."""
    import torch

    from streamrl.algorithms import AlgorithmConfig
    from streamrl.distributed.devices import get_local_device
    from streamrl.engines.dtypes import TORCH_DTYPES
    from streamrl.engines.models.forward import load_model

    free_memory()
    torch.set_float32_matmul_precision("high" if "TF32" in dtype else "highest")
    groups = make_groups([lengths], QWEN2[model]["vocab_size"])
    task = make_policy_task(path, AlgorithmConfig(), groups)
    module = load_model(path, dtype=TORCH_DTYPES[dtype.partition(" ")[0]])
    batch = build_full_batch(task, groups).to(get_local_device())

    def run() -> None:
        module.zero_grad()
        task.compute_loss(module, batch, version=0)[0].backward()

    run()
    seconds = time_seconds(run, 2)
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "padded_tokens_per_s": batch["token_ids"].numel() / seconds,
        "pass_seconds": seconds,
    }


def measure_scores(workload: SpeedWorkload) -> Measurements:
    """Measure forward and backward of a model without layers: embedding, output head, scores."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from streamrl.engines.models.forward import compute_token_logprobs

    shape, sizes = (workload.rows, workload.width), QWEN2[workload.model]
    config = Qwen2Config(**{**sizes, "num_hidden_layers": 0})
    device = get_device_name()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(sizes["vocab_size"], shape, device=device)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    seconds = {}
    for mode in ("none", "value", "gradient"):

        def run(mode: Any = mode) -> None:
            model.zero_grad()
            scores = compute_token_logprobs(model, ids, mask, temperature=1.0, entropy_mode=mode)
            (scores.logprobs.sum() + scores.entropy.sum()).backward()

        run()
        seconds[f"entropy {mode}"] = time_seconds(run, 2)
    return {"pass_seconds": seconds}


# --- Step: resharding -----------------------------------------------------------------------------


def check_resharding() -> Iterator[tuple[str, Measurements]]:
    """Reshard parameters from a trainer to a generator on the same GPU; compare bitwise."""
    size = "0.5B" if has_gpu() else TINY
    layouts = (
        TrainerLayout("deepspeed", 1, "bfloat16"),
        TrainerLayout("deepspeed", 3, "bfloat16"),
        TrainerLayout("torch", 0, "float32"),
    )
    with make_scratch_folder() as folder:
        path = write_qwen2(folder, size)
        groups = make_groups([[64, 40, 52, 64]], QWEN2[size]["vocab_size"])
        yield from run_cases(
            {layout.label: partial(reshard_twice, layout, path, groups) for layout in layouts}
        )


def reshard_twice(layout: TrainerLayout, path: str, groups: Mapping[str, Columns]) -> Measurements:
    """Reshard two versions into bfloat16 parameters; the second reuses the plan."""
    import torch

    trainer = make_trainer(layout, path, groups)
    served = {n: torch.zeros_like(t, dtype=torch.bfloat16) for n, t in trainer.full_state()}
    storage = make_shard_storage(served)
    rounds = []
    for version in (1, 2):
        take_step(trainer, groups)
        start_s = time.perf_counter()
        moved = trainer.reshard_to_generator(storage, version)
        seconds = time.perf_counter() - start_s
        same = all(torch.equal(t.bfloat16(), served[n]) for n, t in trainer.full_state())
        rounds.append(
            {"bits_equal": same, "seconds": seconds, "copied_gib": moved.copied_bytes / GIB}
            if moved
            else {"bits_equal": False, "reason": "no switch was planned"}
        )
    trainer.close()
    del trainer
    free_memory()
    return {"ok": all(entry["bits_equal"] for entry in rounds), "rounds": rounds}


def make_shard_storage(tensors: Mapping[str, Tensor]) -> ShardStorage:
    """Make the storage of a generator that holds every tensor whole."""
    from streamrl.resharding.boxes import TensorBox
    from streamrl.resharding.storage import ShardStorage

    def make_box(tensor: Tensor) -> TensorBox:
        return TensorBox((0,) * tensor.dim(), tuple(tensor.shape))

    return ShardStorage({name: [(make_box(t), t)] for name, t in tensors.items()})


# --- Step: the generator --------------------------------------------------------------------------

GENERATOR_CONFIG: Mapping[str, Any] = {
    **TINY_CONFIG,
    # vLLM's kernels need heads of at least 32 elements.
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
NEW_TOKENS = 48
GENERATOR_RANKS = (1, 2)
"""Tensor-parallel sizes of vLLM."""


def make_generator_env(device: str) -> dict[str, str]:
    from streamrl.engines.vllm.environment import make_vllm_env

    return make_vllm_env(device)


def check_generator() -> Iterator[tuple[str, Measurements]]:
    """Sample with vLLM, load versions while it samples, compare with the trainer's model."""
    if importlib.util.find_spec("vllm") is None:
        yield "all", {"skipped": "vLLM is not installed"}
        return
    cases = {
        f"{ranks} {'GPU' if ranks == 1 else 'GPUs'}": partial(sample_on, ranks)
        for ranks in GENERATOR_RANKS
        if ranks <= int(os.environ[RANKS_ENV])
    }
    yield from run_cases(cases)


def sample_on(num_ranks: int) -> Measurements:
    return asyncio.run(sample_and_load(num_ranks))


async def sample_and_load(num_ranks: int) -> Measurements:
    """Return pauses, tokens per second and differences of log-probabilities in nats, by version."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.generator_config import GeneratorConfig
    from streamrl.engines.vllm.requests import EngineSpec

    config = AutoConfig.for_model("qwen2", **GENERATOR_CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(get_device_name())
    settings = GeneratorConfig(
        max_new_tokens=NEW_TOKENS,
        kv_cache_mb=256,
        max_concurrent_rollouts=64,
        tensor_parallel=num_ranks,
    )
    limit = BF16_LOGPROB if has_gpu() else FP32_LOGPROB
    versions: list[Measurements] = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = await GenerationEngine.start(
            EngineSpec(folder, settings, max_length=2 * NEW_TOKENS)
        )
        try:
            prompt = np.arange(3, 3 + PROMPT_TOKENS, dtype=np.int32)
            await engine.use_model_dir(0)
            for version in (1, 2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.05 * torch.randn_like(parameter))
                sampling = asyncio.create_task(engine.generate(prompt, seeds=range(8)))
                await asyncio.sleep(0.05)
                tensors = {name: value.detach() for name, value in model.named_parameters()}
                stats = await engine.load_weights(tensors, version)
                await sampling
                begun = time.monotonic()
                rollouts = await engine.generate(prompt, seeds=range(64))
                seconds = time.monotonic() - begun
                sequences = [rollout.token_ids for rollout in rollouts[:8]]
                served = await engine.compute_logprobs(sequences)
                check, difference = stats.verification, compare_logprobs(model, sequences, served)
                versions.append(
                    {
                        "ok": bool(check.num_compared)
                        and not check.differing_names
                        and difference < limit,
                        "compared": check.num_compared,
                        "pause_s": stats.pause_s,
                        "interrupted": stats.num_interrupted,
                        "differing": list(check.differing_names),
                        "tokens_per_s": sum(int(r.loss_mask.sum()) for r in rollouts) / seconds,
                        "difference": difference,
                    }
                )
        finally:
            await engine.close()
    return {"ok": all(line["ok"] for line in versions), "versions": versions}


def compare_logprobs(
    model: PreTrainedModel, sequences: Sequence[Array], served: Sequence[Array]
) -> float:
    """Return the mean absolute difference between vLLM's log-probabilities and the model's."""
    import numpy as np
    import torch

    from streamrl.engines.models.forward import compute_token_logprobs

    differences = []
    for sequence, logprobs in zip(sequences, served, strict=True):
        ids = torch.from_numpy(sequence).long()[None].to(get_device_name())
        with torch.no_grad():
            scores = compute_token_logprobs(
                model, ids, torch.ones_like(ids, dtype=torch.bool), temperature=1.0
            )
        differences.append(np.abs(scores.logprobs[0].cpu().numpy() - logprobs))
    return float(np.concatenate(differences).mean())


# --- Steps of several ranks -----------------------------------------------------------------------


def check_ranks(check: RankCheck) -> Iterator[tuple[str, Measurements]]:
    """Run the cases of a list of rank tests on as many ranks as there may be."""
    most = int(os.environ[RANKS_ENV])
    world = check.choose_world(most)
    if not world:
        yield "all", {"skipped": f"needs {min(check.worlds)} GPUs, there are {most}"}
        return
    for name, measurements in run_cases(check.list_cases(world)):
        yield name, {"ranks": world, **measurements}


RANK_STEPS = {
    name: CheckStep(partial(check_ranks, check), check.deadline_s, make_generator_env)
    for name, check in RANK_CHECKS.items()
}
STEPS: Mapping[str, CheckStep] = {
    "machine": CheckStep(check_machine, 20),
    **RANK_STEPS,
    "generator": CheckStep(check_generator, 120, make_generator_env),
    "losses": CheckStep(check_losses, 30),
    "trainer": CheckStep(check_trainer, 60),
    "architectures": CheckStep(check_architectures, 70),
    "nccl": CheckStep(check_nccl, 70),
    "memory-1.5B": CheckStep(partial(check_memory, "1.5B"), 45),
    "memory-3B": CheckStep(partial(check_memory, "3B"), 40),
    "optimizer": CheckStep(check_optimizer_memory, 60),
    "layer offload": CheckStep(check_layer_offload, 45),
    "weights": CheckStep(check_weights, 45),
    "speed": CheckStep(check_speed, 60),
    "one-GPU resharding": CheckStep(check_resharding, 60),
}
"""What has run on no GPU yet comes first. On one GPU most steps of ranks end at once; the deadlines
of the others, and all of them on several GPUs, sum to at most the minutes that `make` names."""

if __name__ == "__main__":
    main()
