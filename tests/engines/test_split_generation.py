"""A tensor-parallel engine of two processes behaves like an unsplit one."""

import asyncio
import multiprocessing
import os
import re
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from streamrl.engines.generation.generation_engine import GenerationEngine, ProgressWatch
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm import weight_loader
from streamrl.engines.vllm.local_pieces import make_storage
from streamrl.errors import LogprobCheckError, StreamError
from streamrl.weights import WeightManifest
from streamrl.weights.buckets import publish_version, unpack_slices, unpack_tensors
from streamrl.weights.transports.collective import CollectiveReader, CollectiveWriter
from tests import forked
from tests.engines.flight import SHORT, start_engine
from tests.engines.tiny_families import make_model as make_family
from tests.engines.tiny_qwen import fill, save, tiny_model, weights_of, worst_error
from tests.weights.local_transport import LocalReader, LocalWriter

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.xdist_group("engines"),
    pytest.mark.slow,
]


class Forks:
    """Makes vLLM fork the ranks of a split engine, which saves an import in each."""

    started: ClassVar[list[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(forked.context(), name)

    def Process(self, *, target: Any, kwargs: Any, **options: Any) -> Any:  # noqa: N802
        arguments = (dict(os.environ), target, kwargs)
        process = forked.context().Process(target=in_environment, args=arguments, **options)
        self.started.append(process)
        return process


def in_environment(environment: dict[str, str], target: Any, kwargs: dict[str, Any]) -> None:
    os.environ.update(environment)
    target(**kwargs)


@pytest.fixture(autouse=True)
def forks(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor import multiproc_executor

    Forks.started.clear()
    monkeypatch.setattr(multiproc_executor, "get_mp_context", Forks)


CONFIG = GeneratorConfig(max_new_tokens=32, tensor_parallel=2)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # the process has ended
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def list_ranks() -> list[psutil.Process]:
    """Return the rank processes of this process's engine."""
    pids = [process.pid for process in Forks.started if psutil.pid_exists(process.pid)]
    return [rank for rank in map(psutil.Process, pids) if is_alive(rank)]


def list_shared_files(prefix: str) -> set[Path]:
    """Return the shared memory files of ranks and engine, named or unlinked."""
    processes = [*list_ranks(), psutil.Process()]
    maps = [mapped.path for process in processes for mapped in process.memory_maps()]
    return {Path(path.removesuffix(" (deleted)")) for path in maps if f"/{prefix}" in path}


def make_dense(seed: int) -> PreTrainedModel:
    return tiny_model(tied=True, seed=seed)


def make_mixture(seed: int) -> PreTrainedModel:
    model = make_family("qwen3_moe")
    fill(model, seed=seed)
    return model.eval()


MODELS = {"dense": make_dense, "mixture": make_mixture}
REPLICATED = re.compile(r"norm|mlp\.gate\.")


def count_rank_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a rank of two: half of what vLLM splits, and the rest whole."""
    sole_head = r"|[kv]_proj" * (model.config.num_key_value_heads == 1)
    replicated = re.compile(REPLICATED.pattern + sole_head)
    return sum(
        w.nbytes // (1 if replicated.search(name) else 2) for name, w in weights_of(model).items()
    )


async def call_ranks(engine: GenerationEngine, function: Callable[..., None], *args: Any) -> None:
    await engine._thread._submit(lambda vllm: vllm.collective_rpc(function, args=args))


NOTHING, HALF, WRONG_SLICE, ELSEWHERE = "nothing", "half", "wrong slice", "elsewhere"
DAMAGED = ("down_proj", "routed_experts", "experts")


def damage_rank(worker: Any, fault: str) -> None:
    """Make the next load of rank 1 wrong: the first load of a new loader, without old values."""
    loader, model = worker.streamrl_loader, worker.get_model()
    load = type(model).load_weights

    def load_damaged(damaged: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        modules = [m for name, m in damaged.named_modules() if name.endswith(DAMAGED)]
        owners = [
            *(m.moe_config.moe_parallel_config for m in modules if hasattr(m, "moe_config")),
            *(module for module in modules if "tp_rank" in vars(module)),
            *(p for module in modules for p in module.parameters() if hasattr(p, "tp_rank")),
        ]
        for owner in owners:
            owner.tp_rank = 0 if fault == WRONG_SLICE else 1
        if fault in (NOTHING, HALF):
            weights = list(weights)[::2] if fault == HALF else []
        type(damaged).load_weights = load
        loaded: set[str] = load(damaged, weights)
        return loaded

    if worker.rank == 1:
        type(model).load_weights = load_damaged
    weight_loader.start_worker_loader(worker, loader.parameters, loader.model_path, False)


def miss_parameters(worker: Any) -> None:
    """Make rank 1 copy the next version to other memory than the model's."""
    loader = worker.streamrl_loader.rank_loader
    if worker.rank == 1:
        pieces = [(name, box, view.clone()) for name, box, view in loader._storage]
        loader._storage = make_storage(pieces, loader._parameters)


@pytest.mark.parametrize("kind", MODELS)
async def test_a_wrong_load_is_refused_naming_the_rank(tmp_path: Path, kind: str):
    models = [MODELS[kind](seed) for seed in range(5)]
    folder = save(models[0], tmp_path, ends=False)
    async with start_engine(folder, CONFIG, starts_empty=True) as engine:
        for version, fault in enumerate((NOTHING, HALF, WRONG_SLICE)):
            await call_ranks(engine, damage_rank, fault)
            loaded = await engine.load_weights(weights_of(models[version]), version)
            with pytest.raises(LogprobCheckError, match="differ from the published") as error:
                loaded.verification.raise_on_difference(fault)
            assert "of rank 1" in str(error.value), fault
            assert "of rank 0" not in str(error.value), fault
        await call_ranks(engine, damage_rank, "")
        loaded = await engine.load_weights(weights_of(models[3]), 3)
        loaded.verification.raise_on_difference("no fault")
        assert loaded.verification.num_compared
        rollouts = await engine.generate(SHORT, seeds=range(4))
        assert worst_error(rollouts, dict(enumerate(models))) < 1e-4
        if kind == "dense":  # copied by the plan, without vLLM's loader
            await call_ranks(engine, miss_parameters)
            loaded = await engine.load_weights(weights_of(models[4]), 4)
            assert {n.rpartition(" ")[2] for n in loaded.verification.differing_names} == {"1"}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("starts_empty", [True, False])
async def test_every_version_reaches_every_rank(tmp_path: Path, kind: str, starts_empty: bool):
    models = {version: MODELS[kind](version) for version in range(3)}
    folder = save(models[0], tmp_path, ends=False)
    async with start_engine(folder, CONFIG, starts_empty=starts_empty) as engine:
        assert len(list_ranks()) == 2
        shared, queues = list_shared_files("vllm_dist_"), list_shared_files("psm_")
        # vLLM's builds for CPUs without AVX-512 have no collectives over shared memory.
        assert bool(shared) == hasattr(torch.ops._C, "init_shm_manager")
        assert queues and not [path for path in (*shared, *queues) if path.exists()]
        await engine.load_weights(weights_of(models[0]), 0)
        for version in (1, 2):
            running = asyncio.create_task(
                engine.generate(
                    SHORT, seeds=range(8), max_new_tokens=300, watch=ProgressWatch("group")
                )
            )
            while not (await engine.collect_partial_rollouts()).get("group"):
                await asyncio.sleep(0.01)
            weights = weights_of(models[version])
            loaded = await engine.load_weights(weights, version)
            assert loaded.verification.num_compared and not loaded.verification.differing_names
            loader: Any = engine._thread._weight_loader
            num_bytes = count_rank_bytes(models[version])
            assert loader.rank_bytes == [num_bytes] * 2
            assert loader.plan.count_received_bytes() == {0: num_bytes, 1: num_bytes}
            rollouts = await running
            sampled_by = {int(v) for r in rollouts for v in r.policy_version[r.loss_mask]}
            assert sampled_by == {version - 1, version}
            assert worst_error(rollouts, models) < 1e-4
        (logprobs,) = await engine.compute_logprobs([rollouts[0].token_ids])
        assert engine.version == 2
        last = rollouts[0].policy_version == 2
        np.testing.assert_allclose(logprobs[last], rollouts[0].generator_logprobs[last], atol=1e-4)
    assert not list_ranks()


def lose_slice(worker: Any) -> None:
    """Have rank 1 miss one slice of the next version."""
    loader = worker.streamrl_loader.rank_loader
    load = loader.load_slices

    def load_rest(slices: dict[str, torch.Tensor]) -> Any:
        del loader.load_slices
        return load(dict(list(slices.items())[1:]))

    if worker.rank == 1:
        loader.load_slices = load_rest


class SliceTransport:
    """Publisher and generator's end of broadcasts in this process, by Gloo."""

    def __init__(self) -> None:
        options: Any = {"timeout_s": 8.0}
        self.writer = CollectiveWriter(LocalWriter(), host="127.0.0.1", **options)
        self.reader = CollectiveReader("generator-0", LocalReader(), **options)

    def publish(self, model: PreTrainedModel, version: int, layouts: Any) -> WeightManifest:
        self.writer.set_readers({"generator-0": layouts})
        tensors = weights_of(model).items()
        return publish_version(tensors, version=version, bucket_bytes=100_000, writer=self.writer)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@pytest.mark.parametrize("kind", MODELS)
async def test_slices_of_a_version_reach_every_rank(tmp_path: Path, kind: str):
    models = {version: MODELS[kind](version) for version in range(4)}
    num_bytes = count_rank_bytes(models[0])
    transport = SliceTransport()
    layouts: Any = ()
    async with start_engine(save(models[0], tmp_path, ends=False), CONFIG) as engine:
        for version in range(4):
            manifest = transport.publish(models[version], version, layouts)
            tensors: Any
            if version == 0:  # what each rank reads is not known yet
                buckets = await asyncio.to_thread(transport.reader.fetch_buckets, manifest)
                tensors = unpack_tensors(manifest, buckets)
            else:
                received = await asyncio.to_thread(transport.reader.fetch_slices, manifest)
                tensors = unpack_slices(manifest, received)
                sent = [
                    sum(slot.num_bytes for bucket in rank.buckets for slot in bucket.slots)
                    for rank in manifest.rank_manifests
                ]
                assert sent == [num_bytes] * 2
            if version == 2:
                await call_ranks(engine, lose_slice)
            loaded = await engine.load_weights(tensors, version)
            layouts = loaded.layouts
            loader: Any = engine._thread._weight_loader
            assert loader.plan.count_received_bytes() == {0: num_bytes, 1: num_bytes}
            if version == 2:
                ranks = {n.rpartition(" ")[2] for n in loaded.verification.differing_names}
                assert ranks == {"1"}
                continue
            assert version == 0 or loader.rank_bytes == [num_bytes] * 2
            assert not loaded.verification.differing_names
            assert version == 3 or loaded.verification.num_compared
            rollouts = await engine.generate(SHORT, seeds=range(4), max_new_tokens=64)
            assert worst_error(rollouts, models) < 1e-4
    transport.close()


def hold_engine(pipe: Connection, folder: str) -> None:
    """Start an engine, send the pids of its ranks, and wait."""
    from vllm.v1.executor import multiproc_executor

    async def hold() -> None:
        async with start_engine(folder, CONFIG):
            pipe.send([process.pid for process in multiprocessing.active_children()])
            await asyncio.sleep(600)

    # Saves an import in each rank.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    asyncio.run(hold())


async def test_ranks_that_hang_end_with_a_killed_engine(tmp_path: Path):
    folder = save(tiny_model(tied=True, seed=1), tmp_path, ends=False)
    # Not by forked.start, whose processes may have no children.
    parent_end, child_end = forked.context().Pipe()
    process = forked.context().Process(target=hold_engine, args=(child_end, folder))
    process.start()
    assert await asyncio.to_thread(parent_end.poll, 120)
    ranks = [psutil.Process(pid) for pid in parent_end.recv()]
    assert len(ranks) == 2
    try:
        for rank in ranks:
            rank.suspend()
        process.kill()
        async with asyncio.timeout(30):
            while any(map(is_alive, ranks)):
                await asyncio.sleep(0.1)
    finally:
        for rank in filter(is_alive, ranks):
            rank.kill()


@pytest.mark.parametrize("activity", ["rollouts", "weights"])
async def test_a_dead_rank_is_reported_and_ends_the_other_ranks(
    tmp_path: Path, activity: str, monkeypatch: pytest.MonkeyPatch
):
    from streamrl.engines.vllm import engine as vllm_engine  # loads vLLM

    # vLLM would shut the engine down on garbage collection, when the next one may run already.
    shut_down: list[None] = []
    shut_down_engine = vllm_engine.shut_down_engine
    monkeypatch.setattr(
        vllm_engine,
        "shut_down_engine",
        lambda dead_engine: shut_down.append(shut_down_engine(dead_engine)),
    )
    model = tiny_model(tied=True, seed=1)
    async with start_engine(save(model, tmp_path, ends=False), CONFIG) as engine:
        await engine.load_weights(weights_of(model), 0)
        work: Coroutine[Any, Any, object]
        if activity == "rollouts":
            work = engine.generate(SHORT, seeds=range(8), max_new_tokens=500)
        else:
            work = engine.load_weights(weights_of(model), 1)
        running = asyncio.create_task(work)
        await asyncio.sleep(0.5 if activity == "rollouts" else 0.0)
        list_ranks()[1].kill()
        with pytest.raises(StreamError, match="a process of the split engine has died"):
            async with asyncio.timeout(60):
                await running
                await engine.load_weights(weights_of(model), 2)
    psutil.wait_procs(list_ranks(), timeout=30)
    assert not list_ranks()
    assert len(shut_down) == 1
