"""Check the trainer's half of streamrl on one GPU in a few minutes: numbers, memory, speed.

    python scripts/gpu_check.py --device cuda --out gpu_check.jsonl

Needs PyTorch, transformers, DeepSpeed and tensordict; neither Ray nor vLLM, and no network: models
are made here, with random weights. Each step runs in a process of its own with its own deadline
and adds one JSON line to the output as it ends. A step that dies or hangs costs only itself: its
line has the cases that were done and the end of what it wrote to standard error. With `--device
cpu` the same code runs on small models, which checks this script rather than a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algorithms import AlgorithmConfig
    from streamrl.engines.trainer_config import TrainerConfig
    from streamrl.engines.training.model_trainer import ModelTrainer
    from streamrl.engines.training.tasks import PolicyTask
    from streamrl.messages import Array, Columns
    from streamrl.resharding.storage import ShardStorage

Found = dict[str, Any]
"""What a case found; `ok` False marks a failure."""

CPU_PATIENCE = 6
"""Factor on the deadlines where everything runs on a CPU."""
STDERR_CHARS = 1500
CASE = '{"case"'
"""How the line of a case begins."""
GIB = 1 << 30
GB = 1e9
PROMPT = 4
"""Tokens of a prompt in made-up rollouts."""
TEMPERATURE = 0.8
LR = 3e-5

# Largest differences that count as rounding.
FP32_LOGPROB = 1e-3
FP32_GRADIENT = 1e-3
BF16_LOGPROB = 0.1
"""Mean over tokens, in nats."""
BF16_NORM = 0.2
"""Of the gradient's norm, relative."""
SAME_STEP = 0.1
"""Mean difference between two parameters that should be the same, in learning rates."""


# --- The parent: steps, deadlines, lines ----------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A function that yields a name and what was found for each of its cases."""

    run: Callable[[], Iterator[tuple[str, Found]]]
    deadline_s: float


def main() -> None:
    """Run the chosen steps and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu_check.jsonl"),
        help="file the JSON lines are added to (gpu_check.jsonl)",
    )
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated; default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child, arguments.device)
        return
    names = arguments.steps.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--steps: no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    failed = []
    for name in names:
        line = run_step(name, arguments.device)
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        failed += [] if line["ok"] else [name]
    print(f"failed: {', '.join(failed)}" if failed else "all steps passed", flush=True)
    sys.exit(1 if failed else 0)


def run_step(name: str, device: str) -> Found:
    """Run a step in a process of its own; its line, whatever becomes of the process."""
    deadline_s = STEPS[name].deadline_s * (1 if device == "cuda" else CPU_PATIENCE)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as stdout, err.open("w") as stderr:
            process = start_child(
                name, device, stdout=stdout, stderr=stderr, start_new_session=True
            )
            code = wait_or_kill(process, deadline_s)
        cases = read_cases(out)
        line: Found = {
            "step": name,
            "ok": code == 0 and all(found.get("ok", True) for found in cases.values()),
            "seconds": round(time.monotonic() - begun, 1),
            "cases": cases,
        }
        if code != 0:
            line["end"] = "deadline" if code is None else f"exit code {code}"
        if not line["ok"]:
            line["stderr"] = err.read_text(errors="replace")[-STDERR_CHARS:]
    return line


def start_child(name: str, device: str, **options: Any) -> subprocess.Popen[str]:
    """Start this script for one step, or for one part of a step."""
    env = {**os.environ, **options.pop("env", {})}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-u", __file__, "--device", device, "--child", name]
    return subprocess.Popen(command, env=env, text=True, **options)


def wait_or_kill(process: subprocess.Popen[str], deadline_s: float) -> int | None:
    """Wait for the exit code; None if the process had to be killed, with a group it leads."""
    try:
        return process.wait(max(deadline_s, 0))
    except subprocess.TimeoutExpired:
        # Only a leader's group has its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        return None


def read_cases(path: Path) -> dict[str, Found]:
    """Read what a child printed, without what libraries print and a line that was cut off."""
    cases = {}
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith(CASE):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                cases[found.pop("case")] = found
    return cases


# --- The child: one step --------------------------------------------------------------------------


def run_child(name: str, device: str) -> None:
    """Run one step, or one part of a step, and print a line for each case."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch.cuda.is_available() is False: no GPU, or a driver too old for this PyTorch")
    fill_gaps_of_torch()
    run = STEPS[name].run if name in STEPS else NCCL_PARTS[name]
    for case, found in run():
        print(json.dumps({"case": case, **tidy(found)}), flush=True)


def fill_gaps_of_torch() -> None:
    """Add names that streamrl uses and that PyTorch before 2.13 has under another name."""
    import torch.distributed as dist

    if not hasattr(dist, "all_gather_single"):
        vars(dist)["all_gather_single"] = dist.all_gather_into_tensor


def run_cases(cases: Mapping[str, Callable[[], Found]]) -> Iterator[tuple[str, Found]]:
    """Run each case; one that raises is reported and does not end the others."""
    for name, run in cases.items():
        begun = time.monotonic()
        try:
            found = run()
        except Exception as error:  # noqa: BLE001  whatever it is, the next case may still tell
            traceback.print_exc()
            reason = " ".join(str(error).split())[:400]
            found = {"ok": False, "error": f"{type(error).__name__}: {reason}"}
            free_memory()
        yield name, {**found, "seconds": time.monotonic() - begun}


def tidy(found: Any) -> Any:
    """Round numbers to four digits; JSON has no NaN and no infinity."""
    if isinstance(found, Mapping):
        return {str(key): tidy(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [tidy(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.4g}") if math.isfinite(found) else str(found)
    return found


def on_gpu() -> bool:
    """Whether this process checks a GPU."""
    import torch

    return torch.cuda.is_available()


def synchronize() -> None:
    """Wait for the GPU."""
    import torch

    if on_gpu():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give memory that nothing uses back to the GPU."""
    import gc

    import torch

    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def time_seconds(run: Callable[[], object], repeats: int = 1) -> float:
    """Time a call, GPU included, mean over the repeats, s."""
    synchronize()
    begun = time.monotonic()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.monotonic() - begun) / repeats


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Let streamrl and transformers take this machine for one without a GPU."""
    import torch

    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        yield


# --- Models and rollouts --------------------------------------------------------------------------

COMMON: Found = {
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
BIG: Found = {
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
TINY = "tiny"
QWEN2: Mapping[str, Found] = {
    TINY: COMMON,
    "0.5B": {
        **BIG,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5B": {
        **BIG,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "3B": {
        **BIG,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
}
"""Settings of Qwen2 models, those with a size as Qwen2.5 has them."""
MIXED = ["sliding_attention", "full_attention"]
ROUTED: Found = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
ARCHITECTURES: Mapping[str, Found] = {
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
        "layer_types": MIXED,
    },
    "deepseek_v3": {
        **ROUTED,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    # Last: on a GPU its attention is compiled, which may take long or fail.
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder in main memory, where that has room for a model, until the step ends."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 16 * GIB
    with tempfile.TemporaryDirectory(dir=shared if roomy else None) as folder:
        yield Path(folder)


def write_tiny(folder: Path, architecture: str = "qwen2") -> str:
    """Write a float32 model whose distributions are far from uniform; returns its path."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **{**COMMON, **ARCHITECTURES[architecture]})
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
    """Write a Qwen2 of a size with random weights, made on the GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    path = folder / size
    with torch.device("cuda" if on_gpu() else "cpu"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2[size]), dtype=torch.bfloat16)
    model.save_pretrained(path)
    del model
    free_memory()
    return str(path)


def make_groups(
    lengths: Sequence[Sequence[int]], vocabulary: int, *, seed: int = 0
) -> dict[str, Columns]:
    """Make up groups of rollouts of these lengths, with every column that an algorithm may read."""
    import numpy as np

    from streamrl.messages import FinishReason, Rollout, rollouts_to_columns

    rng = np.random.default_rng(seed)
    groups: dict[str, Columns] = {}
    for number, group in enumerate(lengths):
        rollouts = [
            Rollout.from_single_turn(
                rng.integers(3, vocabulary, PROMPT).astype(np.int32),
                rng.integers(3, vocabulary, length - PROMPT).tolist(),
                logprobs=(-rng.uniform(2, 6, length - PROMPT)).tolist(),
                versions=[0] * (length - PROMPT),
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
    """Replace log-probabilities by what a policy near that of the model would have said."""
    import numpy as np

    from streamrl.engines.training.forward_scorers import LogprobScorer

    with without_gpu():
        scorer = LogprobScorer(model_path, temperature=TEMPERATURE, micro_batch_tokens=4096)
        rng = np.random.default_rng(7)
        found: dict[str, Columns] = {}
        for uid, columns in groups.items():
            own = scorer.compute_ref_logprobs(columns)["ref_logprobs"]
            near, far = (rng.normal(0, scale, len(own)).astype(np.float32) for scale in (0.1, 0.3))
            mask = columns["loss_mask"]
            found[uid] = {
                **columns,
                "generator_logprobs": np.where(mask, own + near, 0),
                "ref_logprobs": np.where(mask, own + far, 0),
            }
    return found


def policy_task(model_path: str, config: AlgorithmConfig, groups: Mapping[str, Columns]) -> Any:
    """Make the task of a policy under an algorithm."""
    from streamrl.engines.training.tasks import PolicyTask

    longest = max(int(columns["lengths"].max()) for columns in groups.values())
    settings = config.to_settings(max_length=longest, reward_weights={"right": 1.0})
    return PolicyTask(model_path, config.spec, settings, TEMPERATURE)


def all_picks(groups: Mapping[str, Columns]) -> list[tuple[str, int]]:
    """Name every rollout."""
    return [(uid, i) for uid, columns in groups.items() for i in range(len(columns["lengths"]))]


def batch_of(task: PolicyTask, groups: Mapping[str, Columns]) -> Any:
    """Lay all rollouts into one batch, with what the algorithm derives."""
    from streamrl.engines.training.collate import build_batch, derive_columns

    derived = derive_columns(task.spec, task.settings, groups)
    return build_batch(groups, all_picks(groups), derived=derived, token_columns=task.token_columns)


def tiny_groups(model_path: str) -> dict[str, Columns]:
    """Make three groups of four short rollouts that the tiny model may have sampled."""
    lengths = [[11, 7, 30, 19], [25, 9, 14, 40], [6, 33, 12, 21]]
    return sample_logprobs(make_groups(lengths, COMMON["vocab_size"]), model_path)


# --- Step: the machine ----------------------------------------------------------------------------

PACKAGES = ("torch", "transformers", "deepspeed", "tensordict", "triton", "numpy", "safetensors")


def check_machine() -> Iterator[tuple[str, Found]]:
    """Report driver, compilers and memory, and import the trainer's half."""
    yield from run_cases({"system": describe_system, "imports": import_trainer})


def describe_system() -> Found:
    """Report what a GPU run needs from its machine."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found: Found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "nvidia_smi": first_line(query),
        "nvcc": first_line(["nvcc", "--version"], last=True),
        "compiler": first_line(["cc", "--version"]),
        "Python.h": Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        "shared_memory_gib": shutil.disk_usage("/dev/shm").total / GIB,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        "cuda": torch.version.cuda,
        "versions": {name: version_of(name) for name in PACKAGES},
    }
    if on_gpu():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "capability": list(torch.cuda.get_device_capability()),
            "free_gib": torch.cuda.mem_get_info()[0] / GIB,
            "nccl": list(torch.cuda.nccl.version()),
        }
    return found


def first_line(command: Sequence[str], *, last: bool = False) -> str | None:
    """Run a command; the first or last line it prints, None if there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines() or [""]
    return lines[-1 if last else 0]


def version_of(package: str) -> str | None:
    """Name the installed version of a package, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_trainer() -> Found:
    """Import the trainer and DeepSpeed; neither may need Ray or vLLM."""
    begun = time.monotonic()
    import streamrl.engines.training.model_trainer
    import streamrl.weights.buckets  # noqa: F401
    from streamrl.engines.training.deepspeed_backend import _import_deepspeed

    imported = time.monotonic()
    # On a GPU this also tries compilers, once for each kind of DeepSpeed's kernels.
    _import_deepspeed()
    needless = [name for name in ("ray", "vllm") if name in sys.modules]
    return {
        "ok": not needless,
        "needless": needless,
        "trainer_s": imported - begun,
        "deepspeed_s": time.monotonic() - imported,
    }


# --- Step: every loss -----------------------------------------------------------------------------

VARIANTS: Mapping[str, Found] = {
    "plain": {},
    "kl": {"kl_coef": 0.1},
    "entropy": {"entropy_coef": 0.01},
}


@dataclass(frozen=True)
class LossOf:
    """What one loss says of a batch: its value, the gradient of all parameters, its sums."""

    loss: float
    gradient: Tensor
    sums: Mapping[str, float]


def check_losses() -> Iterator[tuple[str, Found]]:
    """Compare scores, losses and gradients of all algorithms with those on the CPU in float32."""
    with scratch() as folder:
        path = write_tiny(folder)
        groups = tiny_groups(path)
        cases = {
            f"{what}, {dtype}": partial(compare, path, groups, dtype)
            for dtype in ("float32", "bfloat16")
            for what, compare in (("scores", compare_scores), ("losses", compare_losses))
        }
        yield from run_cases(cases)


@cache
def reference_model(model_path: str) -> Any:
    """Load a model on the CPU in float32."""
    import torch

    from streamrl.engines.models.forward import load_model

    with without_gpu():
        return load_model(model_path, dtype=torch.float32)


@cache
def device_model(model_path: str, dtype: str) -> Any:
    """Load a model where streamrl would have it."""
    from streamrl.engines.dtypes import TORCH_DTYPES
    from streamrl.engines.models.forward import load_model

    return load_model(model_path, dtype=TORCH_DTYPES[dtype])


def compare_scores(path: str, groups: Mapping[str, Columns], dtype: str) -> Found:
    """Compare log-probabilities and entropies."""
    import torch

    from streamrl.algorithms import AlgorithmConfig
    from streamrl.engines.models.forward import get_local_device

    task = policy_task(path, AlgorithmConfig(), groups)
    batch = batch_of(task, groups)
    with torch.no_grad():
        expected = task.score_batch(reference_model(path), batch, "value")
        found = task.score_batch(device_model(path, dtype), batch.to(get_local_device()), "value")
    mask = batch["attention_mask"]
    logprobs = (found.logprobs.cpu() - expected.logprobs).abs()[mask]
    entropy = (found.entropy.cpu() - expected.entropy).abs()[mask]
    is_close = (
        logprobs.max() < FP32_LOGPROB if dtype == "float32" else logprobs.mean() < BF16_LOGPROB
    )
    return {"ok": bool(is_close), "logprob": spread(logprobs), "entropy": spread(entropy)}


def spread(differences: Tensor) -> Found:
    """Summarize absolute differences."""
    return {"max": float(differences.max()), "mean": float(differences.mean())}


def compare_losses(path: str, groups: Mapping[str, Columns], dtype: str) -> Found:
    """Compare the loss and the gradient of every algorithm, plain, with KL and with entropy."""
    from streamrl.algorithms import ALGORITHMS, AlgorithmConfig
    from streamrl.engines.models.forward import get_local_device
    from streamrl.errors import ConfigError

    losses: dict[str, float] = {}
    gradients: dict[str, float] = {}
    refused = []
    for name in ALGORITHMS:
        for variant, settings in VARIANTS.items():
            label = f"{name}/{variant}"
            try:
                config = AlgorithmConfig(name=name, **settings)
            except ConfigError:
                refused.append(label)
                continue
            task = policy_task(path, config, groups)
            batch = batch_of(task, groups)
            expected = loss_of(task, reference_model(path), batch)
            found = loss_of(task, device_model(path, dtype), batch.to(get_local_device()))
            scale = max(abs(expected.loss), expected.sums.get("num_tokens", 1.0) * 1e-2)
            losses[label] = abs(found.loss - expected.loss) / scale
            norm = float(expected.gradient.norm())
            gradients[label] = float((found.gradient - expected.gradient).norm()) / max(norm, 1e-9)
    worst = max(gradients.values())
    limit = FP32_GRADIENT if dtype == "float32" else math.inf
    return {
        "ok": math.isfinite(worst) and worst < limit,
        "variants": len(losses),
        "refused": refused,
        "median_gradient": sorted(gradients.values())[len(gradients) // 2],
        "worst_losses": worst_of(losses),
        "worst_gradients": worst_of(gradients),
    }


def loss_of(task: PolicyTask, model: Any, batch: Any) -> LossOf:
    """Compute loss and gradient of a batch where the model is."""
    import torch

    model.zero_grad()
    loss, sums = task.compute_loss(model, batch, version=0)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.detach().float().cpu().flatten() for gradient in gradients])
    return LossOf(loss.item(), flat, {name: float(value) for name, value in sums.items()})


def worst_of(differences: Mapping[str, float], count: int = 3) -> dict[str, float]:
    """Pick the largest; what is no number counts as the largest of all."""
    ranked = sorted(
        differences.items(), key=lambda item: -item[1] if item[1] == item[1] else -math.inf
    )
    return dict(ranked[:count])


# --- Step: the trainer ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A way to train."""

    backend: str
    zero_stage: int
    dtype: str

    @property
    def label(self) -> str:
        """Its name in the report."""
        return f"{self.backend} {self.zero_stage} {self.dtype}"


LAYOUTS = (
    Layout("deepspeed", 1, "bfloat16"),
    Layout("deepspeed", 1, "float32"),
    Layout("torch", 0, "float32"),
    Layout("deepspeed", 3, "bfloat16"),
    Layout("deepspeed", 2, "bfloat16"),
    Layout("deepspeed", 0, "float32"),
    Layout("deepspeed", 2, "float32"),
    Layout("deepspeed", 3, "float32"),
)
"""The default of a GPU run first."""


def check_trainer() -> Iterator[tuple[str, Found]]:
    """Train three steps in every layout, against a plain loop, through a save and a load."""
    with scratch() as folder:
        path = write_tiny(folder)
        groups = tiny_groups(path)
        cases: dict[str, Callable[[], Found]] = {
            layout.label: partial(train_and_resume, layout, path, groups, folder)
            for layout in LAYOUTS
        }
        yield from run_cases(cases)


def train_and_resume(
    layout: Layout, path: str, groups: Mapping[str, Columns], folder: Path
) -> Found:
    """Take three steps and compare; load what was saved after the second, and repeat the third."""
    import torch

    saved = folder / layout.label.replace(" ", "-")
    trainer = make_trainer(layout, path, groups)
    norms = [take_step(trainer, groups) for _ in range(2)]
    trainer.save_training_state(saved)
    drawn = torch.rand(4, device=device_name()).tolist()
    norms.append(take_step(trainer, groups))
    trained = whole_state(trainer)
    trainer.close()
    trainer = make_trainer(layout, path, groups)
    trainer.load_training_state(saved)
    drawn_again = torch.rand(4, device=device_name()).tolist()
    take_step(trainer, groups)
    resumed = whole_state(trainer)
    trainer.close()
    expected, expected_norms = plain_steps(path, groups, 3)
    norm_error = max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True))
    from_resumed = apart(trained, resumed)
    found = {
        "ok": from_resumed["mean"] < SAME_STEP and drawn == drawn_again,
        "norms": norms,
        "norm_error": norm_error,
        "from_resumed_in_lr": from_resumed,
        "resumed_bits_equal": from_resumed["max"] == 0,
        "same_random_numbers": drawn == drawn_again,
    }
    if layout.dtype == "bfloat16":
        # Its parameters are rounded to far more than a learning rate.
        found["ok"] &= norm_error < BF16_NORM
    else:
        found["from_plain_in_lr"] = from_plain = apart(trained, expected)
        found["ok"] &= norm_error < FP32_GRADIENT and from_plain["mean"] < SAME_STEP
    return found


def device_name() -> str:
    """Name the device that streamrl works on."""
    from streamrl.engines.models.forward import get_local_device

    return str(get_local_device())


def make_trainer(
    layout: Layout, path: str, groups: Mapping[str, Columns], **changes: Any
) -> ModelTrainer:
    """Make a trainer of one rank."""
    from streamrl.algorithms import AlgorithmConfig
    from streamrl.engines.training.model_trainer import ModelTrainer

    task = policy_task(path, AlgorithmConfig(), groups)
    return ModelTrainer(task, config=trainer_config(layout, **changes))


def trainer_config(layout: Layout, **changes: Any) -> TrainerConfig:
    """Make the settings of a layout."""
    from streamrl.engines.trainer_config import TrainerConfig

    return TrainerConfig(
        backend=layout.backend, zero_stage=layout.zero_stage, dtype=layout.dtype, lr=LR, **changes
    )


def take_step(trainer: ModelTrainer, groups: Mapping[str, Columns]) -> float:
    """Train all rollouts in two micro-batches and update; the gradient's norm."""
    picks = all_picks(groups)
    sums: dict[str, float] = {}
    for part in (picks[::2], picks[1::2]):
        for name, value in trainer.train_micro_batch(groups, part).items():
            sums[name] = sums.get(name, 0.0) + value
    return trainer.step(trainer.compute_loss_denominator(sums))["policy/grad_norm"]


def whole_state(trainer: ModelTrainer) -> dict[str, Tensor]:
    """Copy the parameters to the CPU."""
    return {name: tensor.float().cpu().clone() for name, tensor in trainer.full_state()}


def plain_steps(
    path: str, groups: Mapping[str, Columns], num_steps: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Take the same steps in float32 on the CPU, in a loop without streamrl's trainer."""
    import torch

    from streamrl.algorithms import AlgorithmConfig

    task = policy_task(path, AlgorithmConfig(), groups)
    model = copy.deepcopy(reference_model(path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    batch = batch_of(task, groups)
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


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Found:
    """Say how far apart parameters are, in learning rates."""
    import torch

    differences = [(tensor - other[name]).abs().flatten() / LR for name, tensor in one.items()]
    return spread(torch.cat(differences))


# --- Step: architectures --------------------------------------------------------------------------


IMPLEMENTED = ("attn", "experts")
"""What transformers has several implementations of."""


def check_architectures() -> Iterator[tuple[str, Found]]:
    """Compare log-probabilities of ten architectures with those on the CPU in float32."""
    with scratch() as folder:
        yield from run_cases({name: partial(score, folder, name) for name in ARCHITECTURES})


def score(folder: Path, architecture: str) -> Found:
    """Score made-up rollouts with streamrl's own scorer on both devices."""
    path = write_tiny(folder, architecture)
    (columns,) = make_groups([[60, 17, 33, 100]], COMMON["vocab_size"]).values()
    with without_gpu():
        expected, on_cpu = score_group(path, columns, "float32")
        # The rounding to expect: what bfloat16 does where no GPU has a part in it.
        rounded, _ = score_group(path, columns, "bfloat16")
    mask = columns["loss_mask"]
    found: Found = {"ok": True, "cpu": on_cpu}
    found["cpu bfloat16"] = spread_of(rounded - expected, mask)
    for dtype in ("float32", "bfloat16"):
        logprobs, chosen = score_group(path, columns, dtype)
        seen = spread_of(logprobs - expected, mask)
        found |= {**chosen, dtype: seen}
        if dtype == "float32":
            found["ok"] &= seen["max"] < FP32_LOGPROB
        else:
            found["ok"] &= seen["mean"] < 2 * found["cpu bfloat16"]["mean"] + BF16_LOGPROB
    return found


def score_group(path: str, columns: Columns, dtype: str) -> tuple[Array, Found]:
    """Give the log-probabilities of a group and what computed attention and experts."""
    from streamrl.engines.training.forward_scorers import LogprobScorer

    scorer = LogprobScorer(path, temperature=1.0, micro_batch_tokens=512, dtype=dtype)
    config = vars(scorer._model.config)
    chosen = {kind: config.get(f"_{kind}_implementation_internal") for kind in IMPLEMENTED}
    return scorer.compute_ref_logprobs(columns)["ref_logprobs"], chosen


def spread_of(differences: Array, mask: Array) -> Found:
    """Summarize the differences of what was sampled."""
    import torch

    return spread(torch.from_numpy(abs(differences[mask])))


# --- Step: nccl without a peer --------------------------------------------------------------------

NCCL_TIMEOUT_S = 3.0
JOIN_S = 20.0
ALIVE_S = 20.0
"""How long after its call has ended a process has to live to count as having survived."""
NCCL_S = 42.0
STUCK_S = 10.0
"""How long the GPU is kept busy before the collective that is late."""
CYCLES_PER_S = 1.7e9
HANDLING, BLOCKING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "5"}
NCCL_RUNS: Mapping[str, tuple[str, dict[str, str]]] = {
    "late, default": ("late", {}),
    "late, handling 0": ("late", {HANDLING: "0"}),
    "late, handling 2": ("late", {HANDLING: "2"}),
    "late, blocking": ("late", {BLOCKING: "1"}),
    "group, default": ("lonely_group", {}),
    "group, handling 0": ("lonely_group", {HANDLING: "0"}),
    "group, nonblocking": ("lonely_group", NONBLOCKING),
    "left, default": ("left_alone", {}),
    "left, nonblocking": ("left_alone", NONBLOCKING),
    "join": ("lonely_join", {}),
}
"""By name: a part of this step and what is added to its environment."""


def check_nccl() -> Iterator[tuple[str, Found]]:
    """Report what is raised, when, and whether the process lives on, if nccl gets no answer."""
    if not on_gpu():
        yield "all", {"skipped": "nccl needs a GPU; gloo has deadlines of its own"}
        return
    with tempfile.TemporaryDirectory() as name:
        begun = time.monotonic()
        runs = {}
        for label, (part, env) in NCCL_RUNS.items():
            out = Path(name, label)
            with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
                env = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                started = start_child(part, "cuda", env=env, stdout=stdout, stderr=stderr)
                if part == "left_alone":
                    start_child("leave_at_once", "cuda", env=env, stdout=stdout, stderr=stderr)
            runs[label] = (started, out)
        for label, (process, out) in runs.items():
            code = wait_or_kill(process, NCCL_S - (time.monotonic() - begun))
            events = read_cases(out)
            outcome = "died" if code else "ran on until it was killed"
            found = {
                "outcome": "lived on" if "alive" in events else outcome,
                "exit_code": code,
                "events": events,
                "stderr": out.with_suffix(".err").read_text(errors="replace")[-500:],
            }
            yield label, found


def free_port() -> int:
    """Find a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def watch(run: Callable[[], object]) -> Iterator[tuple[str, Found]]:
    """Report how a call ends, and whether the process lives on after that."""
    begun = time.monotonic()
    yield "begun", {}
    try:
        run()
        ended: Found = {"raised": None}
    except Exception as error:  # noqa: BLE001  what is raised is the question
        ended = {"raised": f"{type(error).__name__}: {str(error)[:300]}"}
    yield "ended", {**ended, "at": time.monotonic() - begun}
    time.sleep(ALIVE_S)
    yield "alive", {"at": time.monotonic() - begun}


def wait_for_late_collective() -> Iterator[tuple[str, Found]]:
    """Wait for a collective that the GPU does not get to: it is busy with something else.

    To nccl's watchdog it looks as one that waits for a peer that has died.
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

    return watch(wait)


def broadcast_in_lonely_group() -> Iterator[tuple[str, Found]]:
    """Broadcast weights to a reader that never comes."""
    import torch

    from streamrl.weights.transports.collective_group import (
        BroadcastGroup,
        GroupEpoch,
        SharedDeadline,
        serve_readers,
    )

    store = serve_readers("127.0.0.1", NCCL_TIMEOUT_S)
    term = GroupEpoch(0, "127.0.0.1", store.port, ("reader",))

    def broadcast() -> None:
        until = SharedDeadline(NCCL_TIMEOUT_S)
        group = BroadcastGroup(store, term, 0, torch.device("cuda", 0), until)
        group.broadcast_tensor(torch.ones(1 << 20), until)

    return watch(broadcast)


def reduce_when_left_alone() -> Iterator[tuple[str, Found]]:
    """Reduce with a rank that has joined and then died."""
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

    return watch(reduce)


def leave_at_once() -> Iterator[tuple[str, Found]]:
    """Join as the second rank and die."""
    from streamrl.distributed.process_group import join_process_group

    join_process_group(rank=1, world_size=2, timeout_s=JOIN_S)
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def join_alone() -> Iterator[tuple[str, Found]]:
    """Wait for a second rank that does not come."""
    from streamrl.distributed.process_group import join_process_group

    return watch(partial(join_process_group, rank=0, world_size=2, timeout_s=NCCL_TIMEOUT_S))


NCCL_PARTS: Mapping[str, Callable[[], Iterator[tuple[str, Found]]]] = {
    "late": wait_for_late_collective,
    "lonely_group": broadcast_in_lonely_group,
    "left_alone": reduce_when_left_alone,
    "leave_at_once": leave_at_once,
    "lonely_join": join_alone,
}


# --- Step: memory ---------------------------------------------------------------------------------


MEMORY_ROW = 4096
PASSES: Mapping[str, Sequence[tuple[int, bool]]] = {
    "1.5B": ((1, True), (1, False), (4, True), (8, True), (4, False)),
    "3B": ((1, True), (2, True), (4, True), (1, False)),
    TINY: ((1, True), (1, False)),
}
"""By model: rows of a micro-batch, and whether with checkpointing. What may not fit comes last."""


def check_memory(size: str) -> Iterator[tuple[str, Found]]:
    """Compare the memory of a micro-batch and of an update with what streamrl expects.

    The first pass that does not fit is the last: what it leaves behind would count in the next.
    """
    model, width = (size, MEMORY_ROW) if on_gpu() else (TINY, 64)
    layout = Layout("deepspeed", 1, "bfloat16")
    with scratch() as folder:
        path = write_qwen2(folder, model)
        groups = make_groups([[width] * 8], QWEN2[model]["vocab_size"])
        trainer = make_trainer(layout, path, groups, gradient_checkpointing=True)
        picks = all_picks(groups)
        measure_pass(trainer, groups, picks[:1])  # the optimizer's state comes with an update
        for rows, checkpointing in PASSES[model]:
            set_checkpointing(trainer._backend.module, checkpointing)
            config = trainer_config(layout, gradient_checkpointing=checkpointing)
            expected = expect_memory(path, config, rows * width)
            name = f"{rows * width} tokens" + (", checkpointing" if checkpointing else "")
            run = partial(measure_pass, trainer, groups, picks[:rows])
            ((_, found),) = run_cases({name: run})
            is_full = "OutOfMemory" in found.get("error", "")
            yield name, {**found, **expected, "ok": is_full or found.get("ok", True)}
            if "error" in found:
                break
        trainer.close()


def set_checkpointing(module: Any, wanted: bool) -> None:
    """Turn gradient checkpointing on as the trainer does, or off."""
    if wanted:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        module.gradient_checkpointing_disable()


def measure_pass(
    trainer: ModelTrainer, groups: Mapping[str, Columns], picks: Sequence[tuple[str, int]]
) -> Found:
    """Train one micro-batch and update; the peaks of both, GiB."""
    free_memory()
    held = memory_gib("memory_allocated")
    reset_peak()
    seconds = time_seconds(lambda: trainer.train_micro_batch(groups, picks))
    peak = memory_gib("max_memory_allocated")
    reset_peak()
    trainer.step(float(len(picks)))
    return {
        "held": held,
        "micro_batch": peak,
        "update": memory_gib("max_memory_allocated"),
        "reserved": memory_gib("max_memory_reserved"),
        "pass_seconds": seconds,
    }


def memory_gib(name: str) -> float | None:
    """Read one of torch's counters, GiB; None on a CPU."""
    import torch

    return getattr(torch.cuda, name)() / GIB if on_gpu() else None


def reset_peak() -> None:
    """Begin a new peak."""
    import torch

    if on_gpu():
        torch.cuda.reset_peak_memory_stats()


def expect_memory(path: str, config: TrainerConfig, tokens: int) -> Found:
    """Compute what streamrl expects of such a micro-batch, GiB."""
    from streamrl.engines.generator_config import GeneratorConfig
    from streamrl.engines.memory.memory_model import estimate_worker_memory

    generator = GeneratorConfig(kv_cache_mb=64)
    found = estimate_worker_memory(path, config, generator, micro_batch_tokens=tokens, on_gpu=True)
    held = (found.weights + found.optimizer + found.gradients) / GIB
    return {
        "expected_held": held,
        "expected_micro_batch": held + found.activations / GIB,
        "expected_update": held + found.update_buffers / GIB,
    }


# --- Step: the optimizer's memory -----------------------------------------------------------------


def check_optimizer_memory() -> Iterator[tuple[str, Found]]:
    """Release the optimizer's state and restore it: memory, time, and every bit."""
    size = "0.5B" if on_gpu() else TINY
    with scratch() as folder:
        path = write_qwen2(folder, size)
        groups = make_groups([[64, 40, 52, 64]], QWEN2[size]["vocab_size"])
        layouts = [Layout("deepspeed", stage, "bfloat16") for stage in (1, 3)]
        yield from run_cases(
            {layout.label: partial(release_and_restore, layout, path, groups) for layout in layouts}
        )


def release_and_restore(layout: Layout, path: str, groups: Mapping[str, Columns]) -> Found:
    """Release and restore twice; the second time finds pinned memory that was kept."""
    import torch

    trainer = make_trainer(layout, path, groups)
    take_step(trainer, groups)
    before = [tensor.detach().clone() for tensor in trainer._backend.iter_optimizer_state()]
    rounds = []
    for _ in range(2):
        free = free_gib()
        away_s = time_seconds(trainer.offload_optimizer)
        freed = free_gib()
        back_s = time_seconds(trainer._optimizer_offload.restore_state)
        rounds.append({"away_s": away_s, "back_s": back_s, "freed_gib": freed - free})
    after = list(trainer._backend.iter_optimizer_state())
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    state_gib = sum(tensor.nbytes for tensor in before) / GIB
    norm = take_step(trainer, groups)
    trainer.close()
    found = {
        "ok": same and math.isfinite(norm),
        "bits_equal": same,
        "state_gib": state_gib,
        "rounds": rounds,
        "pinned": pinned_memory(),
    }
    del trainer
    free_memory()
    return found


def free_gib() -> float:
    """Measure what the GPU has free, for whatever process; 0 on a CPU."""
    import torch

    return torch.cuda.mem_get_info()[0] / GIB if on_gpu() else 0.0


def pinned_memory() -> Found:
    """Read how much pinned memory torch holds, GiB, where it counts that."""
    import torch

    if not on_gpu() or not hasattr(torch.cuda, "host_memory_stats"):
        return {}
    stats = torch.cuda.host_memory_stats()
    return {name: n / GIB for name, n in stats.items() if name.endswith("bytes.current")}


# --- Step: weights --------------------------------------------------------------------------------


def check_weights() -> Iterator[tuple[str, Found]]:
    """Publish weights through shared memory into a model on the same GPU; GB/s of each part."""
    num_tensors, elements = (48, 32 << 20) if on_gpu() else (4, 1 << 20)
    yield from run_cases({"shared memory": partial(move_weights, num_tensors, elements)})


def move_weights(num_tensors: int, elements: int) -> Found:
    """Move three versions of bfloat16 tensors; from the second on, memory is used again."""
    import torch

    from streamrl.weights import TransportReader, TransportWriter
    from streamrl.weights.buckets import publish_version, unpack_tensors
    from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter

    device = device_name()
    trained = {
        f"layer.{i}": torch.randn(elements, device=device).bfloat16() for i in range(num_tensors)
    }
    served = {name: torch.empty_like(tensor) for name, tensor in trained.items()}
    num_bytes = sum(tensor.nbytes for tensor in trained.values())
    # The fallbacks can do nothing: every bucket must find room in shared memory.
    outlet = SharedMemoryWriter(f"gpu-check-{os.getpid()}", TransportWriter(), keep_versions=1)
    inlet = SharedMemoryReader("gpu check", TransportReader())
    rounds = []
    try:
        for version in range(3):
            for tensor in trained.values():
                tensor.add_(1)
            synchronize()
            begun = time.monotonic()
            manifest = publish_version(
                trained.items(), version=version, bucket_bytes=64 << 20, writer=outlet
            )
            published = time.monotonic()
            tensors = unpack_tensors(manifest, inlet.fetch_buckets(manifest))
            verified = time.monotonic()
            copy_s = time_seconds(partial(copy_all, served, tensors))
            rounds.append(
                {
                    "publish": num_bytes / GB / (published - begun),
                    "verify": num_bytes / GB / (verified - published),
                    "copy_in": num_bytes / GB / copy_s,
                }
            )
            del tensors
    finally:
        outlet.close()
    same = all(torch.equal(tensor, served[name]) for name, tensor in trained.items())
    return {"ok": same, "bits_equal": same, "gb_per_s": rounds, **copy_speeds(trained, served)}


def copy_all(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors by name."""
    for name, tensor in tensors.items():
        into[name].copy_(tensor)


def copy_speeds(trained: Mapping[str, Tensor], served: Mapping[str, Tensor]) -> Found:
    """Measure the copies that streamrl could make instead, GB/s."""
    import torch

    num_bytes = sum(tensor.nbytes for tensor in trained.values())
    found: Found = {
        "device_to_device": num_bytes / GB / time_seconds(lambda: copy_all(served, trained), 3)
    }
    tensor = next(iter(trained.values()))
    for kind in ("pageable", "pinned") if on_gpu() else ():
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=kind == "pinned")
        host.copy_(tensor)
        found[f"{kind}_out"] = tensor.nbytes / GB / time_seconds(partial(host.copy_, tensor), 8)
        found[f"{kind}_in"] = tensor.nbytes / GB / time_seconds(partial(tensor.copy_, host), 8)
    return found


# --- Step: speed ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedSizes:
    """A model and a batch of so many rows of at most so many tokens."""

    model: str
    rows: int
    width: int


def check_speed() -> Iterator[tuple[str, Found]]:
    """Measure tokens per second of a forward and a backward pass, and of the scores alone."""
    sizes = SpeedSizes("0.5B", 4, 2048) if on_gpu() else SpeedSizes(TINY, 4, 64)
    step = sizes.width // sizes.rows
    full = [sizes.width] * sizes.rows
    ragged = [step * (i + 1) for i in range(sizes.rows)]
    with scratch() as folder:
        path = write_qwen2(folder, sizes.model)
        cases: dict[str, Callable[[], Found]] = {
            f"{dtype}, {rows}": partial(measure_speed, path, dtype, lengths, sizes.model)
            for dtype in ("bfloat16", "float32", "float32 by TF32")
            for rows, lengths in (("full rows", full), ("ragged rows", ragged))
        }
        cases["scores alone"] = partial(measure_scores, sizes)
        yield from run_cases(cases)


def measure_speed(path: str, dtype: str, lengths: list[int], model: str) -> Found:
    """Time the loss of a batch and its backward pass."""
    import torch

    from streamrl.algorithms import AlgorithmConfig
    from streamrl.engines.dtypes import TORCH_DTYPES
    from streamrl.engines.models.forward import get_local_device, load_model

    free_memory()
    torch.set_float32_matmul_precision("high" if "TF32" in dtype else "highest")
    groups = make_groups([lengths], QWEN2[model]["vocab_size"])
    task = policy_task(path, AlgorithmConfig(), groups)
    module = load_model(path, dtype=TORCH_DTYPES[dtype.partition(" ")[0]])
    batch = batch_of(task, groups).to(get_local_device())

    def run() -> None:
        module.zero_grad()
        task.compute_loss(module, batch, version=0)[0].backward()

    run()
    seconds = time_seconds(run, 2)
    found = {
        "tokens_per_s": sum(lengths) / seconds,
        "padded_tokens_per_s": batch["token_ids"].numel() / seconds,
        "pass_seconds": seconds,
    }
    return found


def measure_scores(sizes: SpeedSizes) -> Found:
    """Time what follows the logits, forward and backward."""
    import torch

    from streamrl.engines.models.forward import score_tokens

    shape, vocabulary = (sizes.rows, sizes.width), QWEN2[sizes.model]["vocab_size"]
    device = device_name()
    logits = torch.randn(*shape, vocabulary, device=device, dtype=torch.bfloat16)
    logits.requires_grad_()
    ids = torch.randint(vocabulary, shape, device=device)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    found = {}
    for mode in ("none", "value", "gradient"):

        def run(mode: Any = mode) -> None:
            logits.grad = None
            scores = score_tokens(logits, ids, mask, temperature=1.0, entropy_mode=mode)
            (scores.logprobs.sum() + scores.entropy.sum()).backward()

        run()
        found[f"entropy {mode}"] = time_seconds(run, 2)
    return {"pass_seconds": found}


# --- Step: resharding -----------------------------------------------------------------------------


def check_resharding() -> Iterator[tuple[str, Found]]:
    """Fill a generator's parameters from the trainer's on the same GPU, to the last bit."""
    size = "0.5B" if on_gpu() else TINY
    layouts = (
        Layout("deepspeed", 1, "bfloat16"),
        Layout("deepspeed", 3, "bfloat16"),
        Layout("torch", 0, "float32"),
    )
    with scratch() as folder:
        path = write_qwen2(folder, size)
        groups = make_groups([[64, 40, 52, 64]], QWEN2[size]["vocab_size"])
        yield from run_cases(
            {layout.label: partial(switch_twice, layout, path, groups) for layout in layouts}
        )


def switch_twice(layout: Layout, path: str, groups: Mapping[str, Columns]) -> Found:
    """Switch two versions into bfloat16 parameters; the second is of a plan that was made."""
    import torch

    trainer = make_trainer(layout, path, groups)
    served = {n: torch.zeros_like(t, dtype=torch.bfloat16) for n, t in trainer.full_state()}
    storage = storage_of(served)
    rounds = []
    for version in (1, 2):
        take_step(trainer, groups)
        moved = trainer.reshard_to_generator(storage, version)
        same = all(torch.equal(t.bfloat16(), served[n]) for n, t in trainer.full_state())
        rounds.append(
            {"bits_equal": same, "seconds": moved.seconds, "copied_gib": moved.copied_bytes / GIB}
            if moved
            else {"bits_equal": False, "reason": "no switch was planned"}
        )
    trainer.close()
    del trainer
    free_memory()
    return {"ok": all(found["bits_equal"] for found in rounds), "rounds": rounds}


def storage_of(tensors: Mapping[str, Tensor]) -> ShardStorage:
    """Describe whole tensors as what a generator serves."""
    from streamrl.resharding.boxes import TensorBox
    from streamrl.resharding.storage import ShardStorage

    def whole(tensor: Tensor) -> Iterable[tuple[TensorBox, Tensor]]:
        shape = tuple(tensor.shape)
        return [(TensorBox((0,) * len(shape), shape), tensor)]

    return ShardStorage({name: list(whole(tensor)) for name, tensor in tensors.items()})


STEPS: Mapping[str, Step] = {
    "machine": Step(check_machine, 20),
    "losses": Step(check_losses, 30),
    "trainer": Step(check_trainer, 60),
    "architectures": Step(check_architectures, 70),
    "nccl": Step(check_nccl, 50),
    "memory-1.5B": Step(partial(check_memory, "1.5B"), 45),
    "memory-3B": Step(partial(check_memory, "3B"), 40),
    "optimizer": Step(check_optimizer_memory, 60),
    "weights": Step(check_weights, 20),
    "speed": Step(check_speed, 60),
    "resharding": Step(check_resharding, 60),
}
"""In the order of their worth; the deadlines add up to 515 s."""

if __name__ == "__main__":
    main()
