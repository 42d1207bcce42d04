"""A rank's part of a generator that another rank of its team leads: computed with, when told to."""

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from streamrl.engines.models.forward import local_device, wait_for_device
from streamrl.engines.vllm import engine
from streamrl.engines.vllm.engine import EngineSpec
from streamrl.engines.vllm.kv_cache import release_caches
from streamrl.engines.vllm.partial_weights import PartWeights
from streamrl.errors import ConfigError, DeadlineError, GenerationError
from streamrl.messages import Array
from streamrl.resharding.storage import Storage
from streamrl.weights.lora_merge import full_weights

if TYPE_CHECKING:
    from streamrl.engines.vllm.executor import FollowingWorker


class GeneratorPart:
    """One part; belongs to the event loop it was started on.

    What the leader has all parts do, a thread does; the rest is done while the leader stands still.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._worker: FollowingWorker | None = None
        self._weights: PartWeights | None = None
        # A daemon, so that a call that is stuck cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="vllm-part", daemon=True)

    @classmethod
    async def start(cls, spec: EngineSpec) -> "GeneratorPart":
        """Build the part of a model directory in this process, as its leader builds the engine.

        Raises as `GenerationEngine.start` does.
        """
        part = cls(spec)
        part._thread.start()
        timeout_s = spec.config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(part._started)
        except TimeoutError as error:
            raise DeadlineError(
                f"vLLM did not start its part of {spec.model_path} within {timeout_s:g} s"
            ) from error
        return part

    async def serve(self) -> None:
        """Until the leader ends. Raises GenerationError when that, or a call of its, fails."""
        await asyncio.shield(self._ended)

    async def storage(self) -> Storage | None:
        """Where what is here lies; see `GenerationEngine.storage`.

        Raises DeadlineError if the model directory is not read in time.
        """
        timeout_s = self._spec.config.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(self._storage)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._spec.model_path} was not compared with vLLM's part of it within"
                f" {timeout_s:g} s"
            ) from error

    def _storage(self) -> Storage | None:
        assert self._worker is not None and self._weights is not None
        with self._worker.lock:
            return self._weights.storage()

    def put(self, tensors: Mapping[str, torch.Tensor | Array]) -> int:
        """Serve what is here of a full set of parameters; the bytes that were copied.

        See `GenerationEngine.load_weights`. The leader stands still meanwhile, and takes the
        version up after it.
        """
        assert self._worker is not None and self._weights is not None
        full = full_weights(
            tensors, self._parameters, model_path=self._spec.model_path, device=local_device()
        )
        with self._worker.lock:
            num_bytes, _ = self._weights.put(full)
            # The worker computes on a stream of its own.
            wait_for_device()
        return num_bytes

    async def release_kv(self) -> None:
        """Free the memory of keys and values, on a CPU; the leader's next step has it again."""
        await asyncio.to_thread(self._release_kv)

    def _release_kv(self) -> None:
        assert self._worker is not None
        with self._worker.lock:
            if not self._worker.wrapper.model_config.enable_sleep_mode:
                release_caches(self._worker.wrapper)

    def _run(self) -> None:
        try:
            with engine.only_engine_of_the_process():
                self._parameters = engine.read_model_facts(self._spec.model_path).parameters
                worker = self._worker = engine.build_follower(self._spec)
                assert self._spec.team is not None
                self._weights = PartWeights(
                    worker.wrapper.worker, self._parameters, self._spec.model_path, self._spec.team
                )
                self._tell(None)
                worker.serve()
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        future = self._ended if self._started.done() else self._started
        if error is None:
            future.set_result(None)
        elif future is self._started and isinstance(error, ValueError | OSError):
            reason = f"generator: vLLM cannot start {self._spec.model_path}: {error}"
            future.set_exception(ConfigError(reason))
        elif isinstance(error, GenerationError):
            future.set_exception(error)
        else:
            future.set_exception(GenerationError(f"a part of the generator died: {error}"))
