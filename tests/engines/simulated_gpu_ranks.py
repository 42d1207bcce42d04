"""Areas of the simulated GPU that need several ranks, each a process with a GPU of its own."""

import io
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.real_accelerator import set_accelerator
from torch import Tensor
from torch.utils._pytree import tree_leaves_with_path, tree_map

from scripts.gpu_check import hide_gpu
from streamrl.distributed.devices import get_local_device
from streamrl.distributed.process_group import join_process_group
from streamrl.messages import Columns
from streamrl.resharding.executors import GroupGatherExecutor, PointToPointExecutor
from streamrl.resharding.plans import plan_copies, plan_gather
from streamrl.weights.transports import collective
from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from tests import placements
from tests.engines.scoring_ranks import score_rank
from tests.engines.tiny_groups import make_groups
from tests.engines.tiny_qwen import save, tiny_model, weights_of
from tests.engines.trainer_layouts import Layout
from tests.engines.trainer_ranks import (
    LORA,
    SEVERAL_LR,
    RankJob,
    find_free_ports,
    parameters_of,
    train_step,
)
from tests.resharding import ranks as resharding_ranks
from tests.resharding.ranks import CLUSTER, make_layout, reshard_twice
from tests.simulated_gpu import GPU, GPU_0, GpuTensor, MixedDevicesError
from tests.weights.broadcast_processes import LAYOUTS, VERSIONS, fetch_slices
from tests.weights.local_transport import LocalReader, LocalWriter

WORLD = 2
TIMEOUT_S = 200.0
Groups = Mapping[str, Columns]
Area = Callable[[str, Groups], Any]


def run_ranks(run: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `run(rank, *arguments)` in a process per rank; return the results, on the CPU."""
    context = multiprocessing.get_context("fork")
    processes, results, ranks = [], dict[int, Any](), dict[Any, int]()
    for rank in range(WORLD):
        receiver, sender = context.Pipe()
        process = context.Process(target=_answer, args=(sender, run, rank, *arguments))
        process.start()
        sender.close()
        ranks[receiver] = rank
        processes.append(process)
    try:
        while ranks:
            ready: list[Any] = wait([*ranks], TIMEOUT_S)
            assert ready, f"ranks {[*ranks.values()]} did not answer in {TIMEOUT_S:g} s"
            # The first error, since other ranks wait for the one that raised it.
            for pipe in ready:
                result, error, reached = torch.load(
                    io.BytesIO(pipe.recv_bytes()), weights_only=False
                )
                placements.LOG.reached |= reached
                if error is not None:
                    raise RuntimeError(error)
                results[ranks.pop(pipe)] = result
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(WORLD)]


def _answer(pipe: Any, run: Callable[..., Any], rank: int, *arguments: Any) -> None:
    """Send a result, then live until killed: a peer may still need this rank."""
    result, message, text = None, None, io.BytesIO()
    try:
        result = tree_map(move_to_cpu, run(rank, *arguments))
    except Exception as error:  # noqa: BLE001  the parent raises it
        message = f"{type(error).__name__}: {error}"
    torch.save((result, message, placements.LOG.reached), text)
    pipe.send_bytes(text.getvalue())
    pipe.recv_bytes()


def move_to_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def compare_ranks(run: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Run ranks on GPUs and on CPUs; return the largest difference of the numbers in the results.

    Relative, to numbers beyond 1. leaves: how many values and tensors were compared.
    """
    on_gpu = run_ranks(run, *arguments)
    with hide_gpu():
        on_cpu = run_ranks(run, *arguments)
    expected, differences = dict(tree_leaves_with_path(on_cpu)), {"": 0.0}
    actual = dict(tree_leaves_with_path(on_gpu))
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        a, b = (torch.as_tensor(v).double() for v in (actual[path], value))
        error = (a - b).abs() / b.abs().clamp(min=1.0)
        differences[str(path)] = float(error.max()) if error.numel() else 0.0
    worst = max(differences, key=differences.__getitem__)
    return {"difference": differences[worst], "worst": worst, "leaves": len(expected)}


# --- Trainers and scorers -------------------------------------------------------------------------


class SimulatedAccelerator(CPU_Accelerator):
    """DeepSpeed's interface to the simulated GPU."""

    def device_name(self, device_index: int | None = None) -> str:
        return GPU if device_index is None else f"{GPU}:{device_index}"

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return GPU_0

    def device_count(self) -> int:
        return 1

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == GPU


def use_simulated_accelerator() -> None:
    """Let DeepSpeed compute on the simulated GPU, until this process ends."""
    set_accelerator(SimulatedAccelerator())


def train(
    layout: Layout, path: str, groups: Groups, *, is_tied: bool = True, **changes: Any
) -> dict[str, Any]:
    """Train two updates; the optimizer's state is offloaded between them."""
    with tempfile.TemporaryDirectory() as folder:
        model = save(tiny_model(tied=is_tied, seed=0, kv_heads=2), Path(folder))
        return compare_ranks(train_rank, layout, model, find_free_ports(2), changes)


def train_rank(
    rank: int, layout: Layout, path: str, ports: Sequence[int], changes: Mapping[str, Any]
) -> Any:
    on_gpu = get_local_device().type != "cpu"
    if on_gpu:
        use_simulated_accelerator()
    job = RankJob(rank, path, Path(path), [ports[on_gpu]])
    trainer = job.trainer(layout, lr=SEVERAL_LR, **changes)
    norms = []
    for _ in range(2):
        norms.append(train_step(trainer, 1, layout.num_shares)[1]["policy/grad_norm"])
        trainer.offload_optimizer()
    parameters = parameters_of(trainer)
    trainer.close()
    return {"norms": norms, "parameters": parameters}


def score(layout: Mapping[str, int], path: str, groups: Groups) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = save(tiny_model(tied=False, seed=0, kv_heads=2), Path(folder))
        critic = weights_of(tiny_model(tied=False, seed=1, kv_heads=2))
        published = {n: t for n, t in critic.items() if not n.startswith("lm_head")}
        published |= {"score.weight": torch.ones(1, 64), "score.bias": torch.zeros(1)}
        columns = list(make_groups().values())
        ports = find_free_ports(4)
        return compare_ranks(score_on_rank, ports, model, layout, columns, published)


def score_on_rank(rank: int, ports: Sequence[int], *arguments: Any) -> Any:
    own_ports = ports[:2] if get_local_device().type == "cpu" else ports[2:]
    scores = score_rank(rank, own_ports, *arguments)
    return [torch.from_numpy(column) for column in (*scores.ref_logprobs, *scores.values)]


# --- Weights between ranks ------------------------------------------------------------------------


def reshard_rank(rank: int, port: int) -> Any:
    """Reshard between layouts of two ranks, by copies and by gathers."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    join_process_group(rank=rank, world_size=WORLD, timeout_s=60.0)
    source, target = make_layout("1-2-1"), make_layout("1-1-2")
    results = []
    with mock.patch.object(resharding_ranks, "get_collective_device", get_local_device):
        for executor in (
            PointToPointExecutor(plan_copies(source, target, CLUSTER)),
            GroupGatherExecutor(plan_gather(source, target, [[0, 1]])),
        ):
            moved = reshard_twice(executor, source, target)
            results.append({"exact": moved["exact"], "received": moved["received"]})
    return results


def reshard(path: str, groups: Groups) -> Any:
    (port,) = find_free_ports(1)
    return run_ranks(reshard_rank, port)


class GlooAsNccl:
    """Group of `collective` with the constructor of NCCL's; it refuses tensors of the CPU."""

    def __init__(self, store: dist.Store, rank: int, size: int, deadline: Any) -> None:
        self._group = collective.make_gloo_group(
            dist.PrefixStore("nccl", store), rank, size, deadline
        )

    def broadcast(self, tensors: Sequence[Any], options: Any) -> Any:
        if not all(isinstance(tensor, GpuTensor) for tensor in tensors):
            raise MixedDevicesError("a broadcast of NCCL has a tensor on the CPU")
        return self._group.broadcast([tensor.on_cpu for tensor in tensors], options)

    def abort(self) -> None:
        self._group.abort()


def broadcast_rank(rank: int, pipes: Sequence[Any]) -> Any:
    """Publish versions and slices to a reader; return whether it got each, by what transport."""
    cluster = SimpleNamespace(get_address=lambda: "127.0.0.1")
    spec: Any = SimpleNamespace(cluster=cluster, copied_roles=())
    store = SimpleNamespace(
        make_writer=lambda *_: SharedMemoryWriter("simulated", LocalWriter(), keep_versions=3),
        make_reader=lambda *_: SharedMemoryReader("policy", LocalReader()),
    )
    with (
        mock.patch.object(collective, "object_store", store),
        mock.patch.object(collective, "GPU", GPU),
        mock.patch.object(collective, "make_nccl_group", GlooAsNccl),
        mock.patch.object(collective, "TIMEOUT_S", 6.0),
    ):
        pipe, outcomes = pipes[rank], []
        reader: Any = collective.make_reader(spec, "policy", "reader") if rank else None
        writer = None if rank else collective.make_writer(spec, "policy")
        for version in range(5):
            if writer is not None:
                writer.set_readers({"reader": LAYOUTS if version > 2 else ()})
                pipe.send(VERSIONS.publish(writer, version))
                outcomes.append(pipe.recv())
            else:
                fetch = fetch_slices if version > 2 else VERSIONS.fetch
                outcomes.append((fetch(reader, pipe.recv()), reader.fallback_reason))
                pipe.send(outcomes[-1])
        if writer is not None:
            writer.close()
    return outcomes


def broadcast(path: str, groups: Groups) -> Any:
    return run_ranks(broadcast_rank, multiprocessing.get_context("fork").Pipe())[0]


FSDP, ZERO_3 = Layout("torch", 3, 2), Layout("deepspeed", 3, 2)
AREAS: Mapping[str, Area] = {
    "FSDP2": partial(train, FSDP, **LORA),
    "ZeRO 3": partial(train, ZERO_3, **LORA),
    "sequence parallel": partial(train, Layout("torch", 3, 2, sequence_parallel=2)),
    "ranks that score": partial(score, {}),
    "resharding ranks": reshard,
    "broadcasts": broadcast,
}
