"""Peer rank of a tensor-parallel generator; the leader rank runs the engine."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import torch

from streamrl.distributed.devices import get_local_device, synchronize_device
from streamrl.engines.vllm import engine
from streamrl.engines.vllm.executor import PeerWorker
from streamrl.engines.vllm.rank_loader import RankLoader
from streamrl.engines.vllm.requests import EngineSpec, raise_after
from streamrl.errors import ConfigError, GenerationError
from streamrl.messages import Array
from streamrl.resharding.storage import ShardStorage
from streamrl.weights.parameters import build_full_weights


class PeerRank:
    """The vLLM worker of a peer rank; use it only on the event loop that started it.

    A thread executes the leader's calls. The other methods require the leader to be paused.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._finished: asyncio.Future[None] = loop.create_future()
        self._kv_freed = asyncio.Event()
        self._loop = loop
        self._worker: PeerWorker | None = None
        self._weight_loader: RankLoader | None = None
        # A daemon thread: a stuck call must not keep the process alive.
        self._thread = threading.Thread(target=self._run_worker, name="vllm-part", daemon=True)

    @classmethod
    async def start(cls, spec: EngineSpec) -> "PeerRank":
        """Build the vLLM worker of this rank while the leader builds the engine.

        Raises as `GenerationEngine.start` does.
        """
        peer = cls(spec)
        peer._thread.start()
        late = f"vLLM did not start its part of {spec.model_path}"
        async with raise_after(spec.config.start_timeout_s, late):
            await asyncio.shield(peer._started)
        return peer

    async def wait_until_closed(self) -> None:
        """Wait until the leader shuts down; a thread executes its calls meanwhile.

        Raises GenerationError if the leader dies or one of its calls fails on this rank.
        """
        await asyncio.shield(self._finished)

    async def get_storage(self) -> ShardStorage | None:
        """Return views of this rank's parameters, into which resharding writes new weights.

        Resharding writes only while the leader is paused. Returns None if vLLM's layout differs
        from the checkpoint's. Raises DeadlineError if comparing with the model directory takes over
        `start_timeout_s`.
        """
        late = f"{self._spec.model_path} was not compared with vLLM's part of it"
        async with raise_after(self._spec.config.start_timeout_s, late):
            return await asyncio.to_thread(self._get_storage)

    def _get_storage(self) -> ShardStorage | None:
        assert self._worker is not None and self._weight_loader is not None
        with self._worker.lock:
            return self._weight_loader.get_storage()

    def fill_shard(self, tensors: Mapping[str, torch.Tensor | Array]) -> int:
        """Set this rank's part of all parameters and return the bytes copied.

        `tensors` are as for `GenerationEngine.load_weights`. The leader must be paused, and
        activates the version after all peers have loaded it. Raises LogprobCheckError if a
        parameter differs from its published value.
        """
        assert self._worker is not None and self._weight_loader is not None
        full = build_full_weights(
            tensors, self._parameters, model_path=self._spec.model_path, device=get_local_device()
        )
        with self._worker.lock:
            num_bytes, verification = self._weight_loader.set_parameters(full)
            # The worker uses another CUDA stream.
            synchronize_device()
        assert self._spec.rank_group is not None
        rank = self._spec.rank_group.rank
        verification.raise_on_difference(f"the generator's part of rank {rank}")
        return num_bytes

    async def sleep(self) -> None:
        """Wait until the leader's `sleep` has freed this rank's KV cache, as it does on all ranks.

        The leader's next decode step allocates the cache again. Raises DeadlineError after
        `request_timeout_s`.
        """
        late = (
            "training waited for the KV cache of this rank: the generator's leader did not free it"
        )
        async with raise_after(self._spec.config.request_timeout_s, late):
            await self._kv_freed.wait()

    def _note_call(self, method: Any) -> None:
        """Tell the event loop, from the worker's thread, whether a call freed the KV cache."""
        is_freed = engine.is_freed_after(method)
        change = self._kv_freed.set if is_freed else self._kv_freed.clear
        if is_freed is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(change)

    def _run_worker(self) -> None:
        try:
            with engine.claim_process_engine():
                self._parameters = engine.read_model_info(self._spec.model_path).parameters
                assert self._spec.rank_group is not None
                config = engine.make_engine_config(self._spec)
                with engine.keep_plain_on_cpu():
                    worker = self._worker = PeerWorker(config, self._spec.rank_group)
                self._weight_loader = engine.make_group_loader(
                    worker.wrapper.worker, self._spec, self._parameters
                )
                self._report_status(None)
                worker.serve(self._note_call)
        except BaseException as error:
            self._report_status(error)
            raise

    def _report_status(self, error: BaseException | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._resolve_future, error)

    def _resolve_future(self, error: BaseException | None) -> None:
        """Resolve the future of the start, or, if the worker has started, that of its end."""
        future = self._finished if self._started.done() else self._started
        if error is None:
            future.set_result(None)
        elif future is self._started and isinstance(error, ValueError | OSError):
            reason = f"generator: vLLM cannot start {self._spec.model_path}: {error}"
            future.set_exception(ConfigError(reason))
        elif isinstance(error, GenerationError):
            future.set_exception(error)
        else:
            future.set_exception(GenerationError(f"a part of the generator died: {error}"))
