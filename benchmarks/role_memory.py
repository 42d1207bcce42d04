"""Memory of PPO's four models on ranks: `python -m benchmarks.role_memory` prints JSON.

Ranks over gloo hold random float32 models of --millions parameters, one role after the other: a
rank of each has a process of its own, as in a run. --backend shards policy and critic (ZeRO-3 or
FSDP2); reference and reward model only score. Figures are private memory of the rank with the most,
above that before the model exists, divided by a rank's share of the model:

loaded    parameters of the loaded model; of ZeRO-3 also master weights and gradients
scored    after the columns of a group: the critic computes the values itself, without a second copy
trained   after an update: parameters and the optimizer's two moments, and what ZeRO-3 adds

`parameters` are the bytes of the parameters that a rank keeps after scoring, in the same unit.
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import get_context

from benchmarks.command import BenchmarkParser, at_least, run_benchmark
from benchmarks.loading import LAYOUTS, find_free_port
from benchmarks.random_model import SHAPES, write_model
from streamrl.algorithms import AlgorithmConfig
from streamrl.dataflow import REF_LOGPROBS
from streamrl.engines.memory.peak_memory import (
    PROC_STATUS,
    release_freed_memory,
    release_large_blocks_eagerly,
)
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.trainer_config import RankLayout, TrainerConfig
from streamrl.engines.training.model_rank import ModelRank
from streamrl.engines.training.model_trainer import ModelTrainer
from streamrl.engines.training.tasks import CriticTask, PolicyTask
from streamrl.engines.training.training_backend import import_deepspeed
from streamrl.messages import Columns, FinishReason, Rollout, rollouts_to_columns

COLUMNS = {
    "policy": REF_LOGPROBS,
    "critic": "values",
    "reference": REF_LOGPROBS,
    "reward": "values",
}
"""Column that the ranks of each role compute; a reward model is shaped like a critic."""
TRAINED = ("policy", "critic")
PPO = AlgorithmConfig(name="ppo", whiten_advantages=False)
ROLLOUTS, TOKENS = 2, 32


def make_group() -> Columns:
    prompt, completion = np.arange(4, 8, dtype=np.int32), list(range(8, TOKENS + 4))
    rollout = Rollout.from_single_turn(
        prompt,
        completion,
        logprobs=[-1.0] * len(completion),
        versions=[0] * len(completion),
        finish_reason=FinishReason.STOP,
    )
    columns = rollouts_to_columns([rollout] * ROLLOUTS)
    columns["scores"] = np.arange(ROLLOUTS, dtype=np.float32)
    zeros = np.zeros(len(columns["token_ids"]), np.float32)
    return {**columns, "values": zeros, REF_LOGPROBS: zeros}


def read_private_bytes() -> int:
    """Return this process's memory that no file backs, after freed blocks went to the system."""
    gc.collect()
    release_freed_memory()
    lines = PROC_STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def make_rank(role: str, path: str, backend: str, world_size: int, rank: int) -> ModelRank:
    settings = PPO.to_settings(max_length=TOKENS, reward_weights={})
    config = TrainerConfig(backend=backend, zero_stage=3, world_size=world_size, dtype="float32")
    layout = RankLayout(world_size).to_trainer_config(config)
    policy = PolicyTask(path, PPO.spec, settings, 1.0)
    critic = CriticTask(path, PPO.spec, settings, 0.5)
    task = policy if COLUMNS[role] == REF_LOGPROBS else critic
    if role in TRAINED:
        return ModelTrainer(task, config=config, rank=rank)
    return ModelRank(task, config=layout, rank=rank)


def count_parameter_bytes(model: ModelRank) -> int:
    """Count the bytes of the distinct parameter tensors that this rank keeps."""
    parameters = (
        getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
        for parameter in model._backend.module.parameters()
    )
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(storages.values())


def run_rank(
    role: str, path: str, backend: str, world_size: int, rank: int, port: int
) -> dict[str, float]:
    """Load, score and, in trained roles, update; return the bytes of this rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    release_large_blocks_eagerly()
    load_skeleton(path)  # imports the model's class
    import_deepspeed()
    before, group = read_private_bytes(), make_group()
    model = make_rank(role, path, backend, world_size, rank)
    figures: dict[str, float] = {"loaded": read_private_bytes() - before}
    model.compute_columns([group], COLUMNS[role], micro_batch_tokens=2 * TOKENS)
    figures["scored"] = read_private_bytes() - before
    figures["parameters"] = count_parameter_bytes(model)
    if isinstance(model, ModelTrainer):
        model.train_micro_batch({"0:0:0": group}, [("0:0:0", i) for i in range(ROLLOUTS)])
        model.update(float(TOKENS))
        figures["trained"] = read_private_bytes() - before
    torch.distributed.barrier()  # no rank ends while another one computes
    model.close()
    return figures


def measure_role(
    arguments: argparse.Namespace, role: str, path: str, size: int
) -> dict[str, float]:
    """Return the largest figure of any rank of a role, in shares."""
    ranks, port = arguments.ranks, find_free_port()
    with ProcessPoolExecutor(ranks, get_context("forkserver")) as pool:
        calls = [
            pool.submit(run_rank, role, path, arguments.backend, ranks, rank, port)
            for rank in range(ranks)
        ]
        results = [call.result() for call in calls]
    shares = {name: max(r[name] for r in results) / (size / ranks) for name in results[0]}
    print(f"{role}: {shares}", file=sys.stderr, flush=True)
    return shares


def measure(arguments: argparse.Namespace) -> Mapping[str, Any]:
    get_context("forkserver").set_forkserver_preload(["benchmarks.role_memory"])
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(arguments.millions, Path(folder))
        size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        roles = {role: measure_role(arguments, role, path, size) for role in COLUMNS}
    total = sum(figures["scored"] for figures in roles.values())
    mib = size / arguments.ranks / 2**20
    return {"ranks": arguments.ranks, "share_mib": mib, "scored_mib": total * mib, **roles}


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("role_memory", __doc__)
    parser.add_argument("--ranks", type=at_least(2), default=4)
    parser.add_argument("--millions", type=int, choices=tuple(SHAPES), default=400)
    parser.add_argument("--backend", choices=tuple(LAYOUTS.values()), default="torch")
    parser.set_quick(ranks=2, millions=1)
    return parser


if __name__ == "__main__":
    run_benchmark(make_parser(), measure)
