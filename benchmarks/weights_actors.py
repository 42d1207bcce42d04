"""Processes of `benchmarks.weights`: a publisher and its followers."""

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.engine.llm_engine import LLMEngine

from benchmarks.random_model import MAX_LENGTH, make_model
from streamrl.actors.transport.ray_calls import RAY_ACCESS
from streamrl.engines.generation.generation_engine import GenerationEngine
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.vllm.requests import EngineSpec
from streamrl.engines.vllm.weight_loader import WorkerWeightLoader
from streamrl.errors import GenerationError
from streamrl.weights import TransportReader, TransportWriter, WeightManifest, WeightsConfig
from streamrl.weights.buckets import publish_version, unpack_slices, unpack_tensors
from streamrl.weights.parameters import order_for_fusion
from streamrl.weights.rank_slices import Readers, SliceLayout
from streamrl.weights.transport import TransportSpec

CHANGED_SHARE = 20
"""One element in CHANGED_SHARE changes per version."""

CONFIG = WeightsConfig()


MODEL = "model"


def make_spec(transport: str) -> TransportSpec:
    """Return the settings of both ends of a transport."""
    keep, limits = CONFIG.keep_versions, {MODEL: sys.maxsize}
    return TransportSpec(transport, "", "benchmark", keep, RAY_ACCESS, max_bytes=limits)


class BenchmarkPublisher:
    """Actor with the tensors of a model; makes versions by changing a few elements."""

    def __init__(self, millions: int) -> None:
        named = dict(make_model(millions).named_parameters())
        self._tensors = {name: named[name].detach() for name in order_for_fusion(named)}
        self._outlet: TransportWriter | None = None
        self._bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._copy = np.ones(self._bytes, np.uint8)

    def num_bytes(self) -> int:
        return self._bytes

    def set_transport(self, transport: str, readers: list[str]) -> None:
        """Publish through this transport from now on."""
        self.end()
        self._outlet = make_spec(transport).make_writer(MODEL)
        self.set_readers(dict.fromkeys(readers, ()))

    def set_readers(self, readers: Readers) -> None:
        assert self._outlet is not None
        self._outlet.set_readers(readers)

    def publish(self, version: int) -> tuple[WeightManifest, float, float]:
        """Publish a version; return its seconds, and the seconds to copy its bytes in memory."""
        assert self._outlet is not None
        for tensor in self._tensors.values():
            tensor.view(-1)[version % CHANGED_SHARE :: CHANGED_SHARE] += 1e-4
        memcpy_s = self._memcpy()
        start = time.perf_counter()
        manifest = publish_version(
            self._tensors.items(),
            version=version,
            bucket_bytes=CONFIG.bucket_bytes,
            writer=self._outlet,
        )
        return manifest, time.perf_counter() - start, memcpy_s

    def _memcpy(self) -> float:
        start, end = time.perf_counter(), 0
        for tensor in self._tensors.values():
            raw = tensor.view(-1).view(torch.uint8).numpy()
            self._copy[end : end + raw.nbytes] = raw
            end += raw.nbytes
        return time.perf_counter() - start

    def end(self) -> None:
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None


class BenchmarkGenerator:
    """Actor with an engine that loads versions, idle or while it samples rollouts."""

    async def start(self, name: str, model_path: str, tensor_parallel: int = 1) -> None:
        self._name = name
        self._inlet: TransportReader | None = None
        self._decoding: asyncio.Task[None] | None = None
        self._step_s = record_step_times()
        config = GeneratorConfig(
            tensor_parallel=tensor_parallel, max_concurrent_rollouts=16, max_new_tokens=128
        )
        spec = EngineSpec(model_path, config, MAX_LENGTH, starts_empty=True)
        self._engine = await GenerationEngine.start(spec)

    def count_rank_bytes(self) -> dict[str, list[int]]:
        """Return the bytes of a version that each rank has read, and those of the plan."""
        loader = self._engine._thread._weight_loader
        assert isinstance(loader, WorkerWeightLoader)
        planned = loader.plan.count_received_bytes()
        return {"rank_bytes": [*loader.rank_bytes], "planned_bytes": [*planned.values()]}

    def list_layouts(self) -> Sequence[SliceLayout]:
        """Return what each rank reads of later versions."""
        return self._engine._thread._weight_loader.layouts

    async def set_transport(self, transport: str) -> None:
        """Read through this transport from now on."""
        if self._inlet is not None:
            self._inlet.close()
        self._inlet = make_spec(transport).make_reader(MODEL, self._name)

    async def pull(self, manifest: WeightManifest) -> dict[str, float]:
        """Fetch, verify and load a version; return the seconds of each, and of the pause."""
        start = time.perf_counter()
        tensors = await asyncio.to_thread(self._fetch, manifest)
        fetched = time.perf_counter()
        pause_s = await self._load(tensors, manifest.version)
        loaded = time.perf_counter()
        return {"transfer_s": fetched - start, "load_s": loaded - fetched, "pause_s": pause_s}

    def _fetch(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        assert self._inlet is not None
        if slices := self._inlet.fetch_slices(manifest):
            return unpack_slices(manifest, slices)
        tensors = unpack_tensors(manifest, self._inlet.fetch_buckets(manifest))
        if self._inlet.fallback_reason:
            raise RuntimeError(f"not measured: {self._inlet.fallback_reason}")
        return tensors

    async def _load(self, tensors: dict[str, torch.Tensor], version: int) -> float:
        """Load a version; return the seconds in which no rollout was decoded."""
        return (await self._engine.load_weights(tensors, version)).pause_s

    async def start_decoding(self) -> None:
        """Start sampling rollouts."""
        self._step_s.clear()
        self._decoding = asyncio.create_task(self._decode())

    async def _decode(self) -> None:
        with contextlib.suppress(GenerationError):
            while True:
                prompt = np.arange(4, 20, dtype=np.int32)
                await self._engine.generate(prompt, seeds=list(range(8)))

    async def stop_decoding(self) -> float:
        """Stop sampling; return the median seconds of a decode step."""
        assert self._decoding is not None
        self._decoding.cancel()
        await asyncio.wait([self._decoding])
        return statistics.median(self._step_s)


def record_step_times() -> list[float]:
    """Record the seconds of every step of vLLM's engines from now on."""
    seconds: list[float] = []
    call = LLMEngine.step

    def timing(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            seconds.append(time.perf_counter() - start)

    LLMEngine.step = timing
    return seconds
