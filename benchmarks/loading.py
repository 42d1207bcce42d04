"""Memory of ranks that load and save a sharded model: `python -m benchmarks.loading` prints JSON.

Ranks over gloo load a random float32 model of --millions parameters from its safetensors, shard it
with FSDP2 and with ZeRO-3, and write it as a Hugging Face directory:

shards  a trainer: each rank reads its part; gathers and writes one parameter at a time
whole   the peer: each rank loads the model, then shards it; rank 0 gathers it and writes it

Peaks are a rank's resident memory (sampled every 2 ms) above its level before loading, of the rank
with the most, divided by a rank's share of the model; `kept_shares` is what stays after loading.
DeepSpeed keeps three shares: parameters, master weights, gradients. `bit_equal` says whether the
gathered parameters of both ways are equal.
"""

import argparse
import hashlib
import importlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from benchmarks.command import BenchmarkParser, at_least, run_benchmark
from benchmarks.random_model import SHAPES, write_model
from streamrl.algorithms import AlgorithmConfig
from streamrl.distributed.process_group import join_process_group
from streamrl.engines.models.forward import load_model, load_skeleton
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.model_trainer import ModelTrainer, write_hf_model
from streamrl.engines.training.tasks import PolicyTask
from streamrl.engines.training.training_backend import make_backend

LAYOUTS = {"fsdp2": "torch", "zero3": "deepspeed"}
SAMPLE_S = 0.002
Figures = dict[str, Any]


class PeakMemory:
    """Peak of this process's resident memory in a context, bytes above a level."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def measure(self, base: int) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.wait(SAMPLE_S):
                self.num_bytes = max(self.num_bytes, read_resident_bytes() - base)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def read_resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class WholeModel:
    """The peer of a trainer: loads the whole model on each rank, then shards it."""

    def __init__(self, path: str, config: TrainerConfig, rank: int) -> None:
        self._path, self._rank = path, rank
        self._backend = make_backend(load_model(path, dtype=torch.float32), config)

    def save_model(self, folder: Path) -> None:
        tensors = [(name, tensor.cpu()) for name, tensor in self.full_state() if self._rank == 0]
        if tensors:
            write_hf_model(folder, self._backend.module, tensors, tokenizer_from=self._path)

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        return self._backend.full_state()

    def close(self) -> None:
        self._backend.close()


def make_trainer(path: str, config: TrainerConfig, rank: int) -> ModelTrainer:
    algorithm = AlgorithmConfig()
    settings = algorithm.to_settings(max_length=8, reward_weights={})
    task = PolicyTask(path, algorithm.spec, settings, 1.0)
    return ModelTrainer(task, config=config, rank=rank)


def run_rank(rank: int, world_size: int, port: int, paths: Sequence[str], way: str) -> Figures:
    """Load and save the model; return peaks and seconds.

    `paths` are the model and the folder to write into; `way` is layout/way.
    """
    (path, folder), (layout, way) = paths, way.split("/")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    config = TrainerConfig(backend=LAYOUTS[layout], world_size=world_size, zero_stage=3)
    join_process_group(rank=rank, world_size=world_size, timeout_s=300.0)
    load_skeleton(path)  # imports the model's class
    if layout == "zero3":
        importlib.import_module("deepspeed")
    make = make_trainer if way == "shards" else WholeModel
    base, loading, saving = read_resident_bytes(), PeakMemory(), PeakMemory()
    start = time.monotonic()
    with loading.measure(base):
        model = make(path, config, rank)
    kept = read_resident_bytes() - base
    loaded = time.monotonic()
    with saving.measure(base):
        model.save_model(Path(folder))
    saved = time.monotonic()
    digest = hashlib.sha256()
    for _, tensor in model.full_state():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    model.close()
    return {
        "load_peak": max(loading.num_bytes, kept),
        "kept": kept,
        "save_peak": saving.num_bytes,
        "load_s": loaded - start,
        "save_s": saved - loaded,
        "digest": digest.hexdigest(),
    }


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def measure_way(
    arguments: argparse.Namespace, path: str, layout: str, way: str
) -> tuple[dict[str, Any], set[str]]:
    """Return the figures of a way, and the digests of the ranks' parameters."""
    share = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) / arguments.ranks
    port = find_free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(arguments.ranks, get_context("forkserver")) as pool,
    ):
        ranks = [
            pool.submit(run_rank, rank, arguments.ranks, port, (path, folder), f"{layout}/{way}")
            for rank in range(arguments.ranks)
        ]
        results = [rank.result() for rank in ranks]
    figures = {
        "load_peak_shares": max(result["load_peak"] for result in results) / share,
        "kept_shares": max(result["kept"] for result in results) / share,
        "save_peak_shares": max(result["save_peak"] for result in results) / share,
        "load_s": max(result["load_s"] for result in results),
        "save_s": max(result["save_s"] for result in results),
    }
    return figures, {result["digest"] for result in results}


def measure(arguments: argparse.Namespace) -> Mapping[str, Any]:
    # The ranks of all ways are forked from one process that has imported torch.
    get_context("forkserver").set_forkserver_preload(["benchmarks.loading"])
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(arguments.millions, Path(folder))
        size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        layouts = {}
        for layout in LAYOUTS:
            ways, digests = {}, set[str]()
            for way in ("shards", "whole"):
                ways[way], found = measure_way(arguments, path, layout, way)
                print(f"{layout}, {way}: {ways[way]}", file=sys.stderr, flush=True)
                digests |= found
            layouts[layout] = {**ways, "bit_equal": len(digests) == 1}
    return {"ranks": arguments.ranks, "model_mib": size / 2**20, **layouts}


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("loading", __doc__)
    parser.add_argument("--ranks", type=at_least(2), default=4)
    parser.add_argument("--millions", type=int, choices=tuple(SHAPES), default=400)
    parser.set_quick(ranks=2, millions=1)
    return parser


if __name__ == "__main__":
    run_benchmark(make_parser(), measure)
